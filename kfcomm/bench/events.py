"""Events of a running benchmark, as rank 0 writes them: a line of JSON each, and back.

Other lines, such as the output of a library, read as None.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from kfcomm.bench.figures import Result
from kfcomm.bench.suite import Case

_TAG = "kfcomm-bench"


@dataclass(frozen=True, slots=True)
class Begun:
    """The world is complete.

    Attributes:
        size: number of ranks.
        total: number of cases.
        hosts: descriptions of the hosts, each with the ``ranks`` on it.
        devices: those that hold the arrays, and their routes; None where the arrays are on the hosts.
    """

    size: int
    total: int
    hosts: tuple[dict[str, Any], ...]
    devices: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Starting:
    """A case is about to be measured."""

    case: Case


@dataclass(frozen=True, slots=True)
class Measured:
    """A case has been measured, and its results were right."""

    result: Result


@dataclass(frozen=True, slots=True)
class Failed:
    """The benchmark ended: a result was wrong."""

    message: str


Event: TypeAlias = Begun | Starting | Measured | Failed
Emit: TypeAlias = Callable[[Event], None]


def to_line(event: Event) -> str:
    """The event as a line, without its line break."""
    return json.dumps({_TAG: type(event).__name__, **asdict(event)})


def from_line(line: str) -> Event | None:
    """The event of a line; None if it is another line."""
    if not line.startswith('{"' + _TAG):
        return None
    fields = json.loads(line)
    kind = fields.pop(_TAG)
    match kind:
        case "Begun":
            return Begun(fields["size"], fields["total"], tuple(fields["hosts"]), fields["devices"])
        case "Starting":
            return Starting(Case.from_wire(fields["case"]))
        case "Measured":
            result = fields["result"]
            return Measured(Result(Case.from_wire(result["case"]), result["size"], tuple(result["times_s"])))
        case _:
            return Failed(fields["message"])
