"""Workload of a step: what every rank does in turn: compute, post calls, wait.

As text, one item after the other, with commas or line ends between them; ``#`` begins a comment::

    compute 5 ms                       # beside the calls that are under way
    4 MiB                              # an all_reduce
    16 MiB by ring as grads priority 1
    broadcast 1 MiB after grads        # posted when grads is complete on this rank
    wait grads                         # until it is complete; "wait": for all posted so far
    compute 3 ms

A step ends on a rank when all its calls are complete.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from kfcomm.common.sizes import parse_size
from kfcomm.core.graph import Graph, GraphPair
from kfcomm.errors import ConfigError
from kfcomm.simulate.fields import parse_time_s
from kfcomm.strategies import AnyStrategy

_HELP: Final = "write 'compute 5 ms', '4 MiB', 'broadcast 4 MiB by tree as x priority 1 after y', or 'wait x'"
_CALL: Final = re.compile(
    r"(?:(?P<verb>[a-z_]+)\s+)?(?P<size>[\d.]+\s*[A-Za-z]+)(?:\s+by\s+(?P<strategy>\S+))?(?:\s+as\s+(?P<name>\S+))?"
    r"(?:\s+priority\s+(?P<priority>-?\d+))?(?:\s+after\s+(?P<after>.+))?"
)


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute that each rank does beside its calls, on a device or another processor.

    Raises:
        ConfigError: the seconds are negative or infinite.
    """

    seconds: float

    def __post_init__(self) -> None:
        if not 0 <= self.seconds < math.inf:
            raise ConfigError(f"compute of {self.seconds!r} s: expected a finite number of at least 0")


@dataclass(frozen=True, slots=True)
class Call:
    """One collective that each rank posts.

    Attributes:
        nbytes: of one rank's input.
        name: by which others wait for it, and which picks the way of a message that is not shared out.
        strategy: None for that of the step.
        verb: as of `simulate`.
        root: of verbs that have one.
        dtype: of the elements.
        priority: larger is more urgent: on every link its chunks leave before those of others.
        after: names of calls before this one that must be complete on a rank when it posts this one; what follows in
            the workload does not wait for it.
    """

    nbytes: int
    name: str = ""
    strategy: str | AnyStrategy | Graph | GraphPair | None = None
    verb: str = "all_reduce"
    root: int = 0
    dtype: str = "float32"
    priority: int = 0
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until these calls are complete on the rank; by default, the calls before it in the workload."""

    names: tuple[str, ...] = ()


Item: TypeAlias = Compute | Call | Await
Workload: TypeAlias = Sequence[Item]


def checked(workload: Sequence[Any]) -> tuple[Item, ...]:
    """Check names.

    Raises:
        ConfigError: calls are missing, a name is used twice or belongs to no earlier call, or an item has another type.
    """
    known: set[str] = set()
    for item in workload:
        match item:
            case Call():
                _check_known(item.after, known, "after")
                if item.name in known:
                    raise ConfigError(f"workload: two calls have the name {item.name!r}; give each its own")
                if item.name:
                    known.add(item.name)
            case Await():
                _check_known(item.names, known, "wait")
            case Compute():
                pass
            case _:
                what = type(item).__name__
                raise ConfigError(f"workload: expected Compute, Call or Await, got {what}; parse_workload reads text")
    if not any(isinstance(item, Call) for item in workload):
        raise ConfigError("workload: expected at least one call, got none; a call is a size, as 4MiB")
    return tuple(workload)


def parse_workload(text: str) -> tuple[Item, ...]:
    """Parse the workload of a step, in the words of the module's docstring.

    Raises:
        ConfigError: an item is malformed, or names a call that does not come before it; the message names it.
    """
    lines = (line.partition("#")[0] for line in text.splitlines())
    words = (word.strip() for line in lines for word in line.split(","))
    return checked(tuple(_parsed(word) for word in words if word))


def load_workload(text_or_path: str) -> tuple[Item, ...]:
    """Parse a workload, or the file of one if there is a file of this name.

    Raises:
        ConfigError: as of `parse_workload`; or the file cannot be read.
    """
    path = Path(text_or_path)
    try:
        is_file = path.is_file()
    except OSError:  # a text that is too long for a path
        is_file = False
    if not is_file:
        return parse_workload(text_or_path)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"workload {text_or_path!r} cannot be read: {error}") from error
    try:
        return parse_workload(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def calls_of(workload: Workload) -> Iterator[Call]:
    """The calls, in order."""
    return (item for item in workload if isinstance(item, Call))


def _parsed(text: str) -> Item:
    first, _, rest = text.partition(" ")
    if first == "wait":
        return Await(tuple(rest.split()))
    try:
        if first == "compute":
            return Compute(parse_time_s(rest))
        match = _CALL.fullmatch(text)
        if match is None:
            raise ValueError(_HELP)
        return Call(
            parse_size(match["size"].replace(" ", "")),
            match["name"] or "",
            match["strategy"],
            match["verb"] or "all_reduce",
            priority=int(match["priority"] or 0),
            after=tuple((match["after"] or "").split()),
        )
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"workload: {text!r}: {error}") from error


def _check_known(names: Sequence[str], known: set[str], what: str) -> None:
    for name in names:
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise ConfigError(f"workload: {what} {name!r}: expected a call before it (known: {listed})")
