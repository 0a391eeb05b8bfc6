"""Record of an ``Adaptation``: metrics, changes and decisions, with one line of JSON for each meeting of the ranks.

The first line, and another one whenever the ranks have changed, has the ranks and the hyperparameters. Numbers are kept
to the last bit; null is nan.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from kfcomm.adapt.host import Decision
from kfcomm.adapt.metrics import StepMetrics
from kfcomm.errors import ConfigError
from kfcomm.strategies import AnyStrategy
from kfcomm.types import Layout

if TYPE_CHECKING:
    from kfcomm.adapt.host import Named
    from kfcomm.adapt.runner import Runner

logger = logging.getLogger("kfcomm.adapt")

FORMAT = 1
NUMBERS = ("seconds", "busy_s", "nbytes", "counts", "waited_s")
"""Fields of ``StepMetrics`` by rank."""


class StepRecorder:
    """Writer of a record, on the first rank.

    Args:
        path: path of the file.
        runners: policies, in their order.
    """

    def __init__(self, path: str | os.PathLike[str], runners: Sequence[Runner]) -> None:
        self._path = Path(path)
        self._numbers: dict[Named, int] = {runner: number for number, runner in enumerate(runners)}
        self._names = [runner.name for runner in runners]
        self._file: TextIO | None = None
        self._rounds: list[list[dict[str, Any]]] = [[]]
        self._decisions: list[list[Any]] = []

    def open(self) -> str | None:
        """Open the file, on the first rank; returns the reason if that is impossible."""
        if self._file is None:
            try:
                self._file = self._path.open("a", encoding="utf-8")
            except OSError as error:
                return f"the steps cannot be recorded: {error}"
        return None

    def begin(self, start: Mapping[str, Any], *, is_new: bool) -> None:
        """Write a line for new ranks.

        Args:
            start: the ranks, and the hyperparameters.
            is_new: the steps are counted from here on, so that the file begins again.
        """
        self._forget()
        if self._file is not None and is_new:
            self._file.truncate(0)
        self._write({"format": FORMAT, **start, "policies": self._names})

    def changed(self, subject: str, runner: Named | None, what: Mapping[str, Any]) -> None:
        """Note a change for a policy, or (None) its undo."""
        self._rounds[-1].append({"policy": self._number(runner), "subject": subject, **what})

    def done_together(self, runner: Named, what: str, result: Any) -> None:
        """Note the result of an action of all ranks together."""
        try:
            told = {"result": encoded(result)}
        except ConfigError as error:
            told = {"lacks": str(error)}
        self._rounds[-1].append({"policy": self._number(runner), "together": what, **told})

    def decided(self, decision: Decision) -> None:
        """Note a decision."""
        self._decisions.append([decision.policy, decision.what, decision.why])

    def met(self) -> None:
        """Begin another meeting at the end of the same step."""
        self._rounds.append([])

    def step(self, metrics: StepMetrics) -> None:
        """Write the line of a step, at its end."""
        self._write({
            "step": metrics.step,
            **{name: getattr(metrics, name) for name in NUMBERS},
            "observed": metrics.observed,
            "strategy": strategy_as_json(metrics.strategy),
            "rounds": self._rounds,
            "decisions": self._decisions,
        })  # fmt: skip
        self._forget()

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _number(self, runner: Named | None) -> int | None:
        return None if runner is None else self._numbers[runner]

    def _forget(self) -> None:
        self._rounds, self._decisions = [[]], []

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(encoded(line), allow_nan=False, separators=(",", ":")) + "\n")
            # A killed job leaves all complete lines.
            self._file.flush()
        except OSError as error:
            logger.warning("no more steps are recorded: %s", error)
            self.close()


def strategy_as_json(strategy: AnyStrategy) -> list[str]:
    """Encode a strategy: its name and its digest."""
    return [strategy.name, strategy.digest.hex()]


def layout_as_json(layout: Layout) -> dict[str, Any]:
    """Encode a layout: hosts of the ranks, their processors and costs."""
    return {"hosts": layout.hosts, "num_cpus": layout.num_cpus, "costs": layout.costs}


def encoded(value: Any) -> Any:
    """Encode a value for strict JSON: null for nan, text for infinities.

    Raises:
        ConfigError: JSON cannot carry it.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return None if math.isnan(value) else value if math.isfinite(value) else {"float": str(value)}
        case Mapping() if all(isinstance(key, str) for key in value):
            return {key: encoded(one) for key, one in value.items()}
        case list() | tuple():
            return [encoded(one) for one in value]
    raise ConfigError(f"{type(value).__name__} cannot be recorded")


def decoded(value: Any) -> Any:
    """Decode the result of ``encoded``, except nan, which stays None, and tuples, which stay lists."""
    if isinstance(value, dict):
        if value.keys() == {"float"}:
            return float(value["float"])
        return {key: decoded(one) for key, one in value.items()}
    return [decoded(one) for one in value] if isinstance(value, list) else value


def numbers(values: Sequence[Any]) -> tuple[Any, ...]:
    """Decode numbers by rank."""
    return tuple(math.nan if one is None else one for one in values)


def lines_of(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the lines of a record.

    Raises:
        ConfigError: the file is not a record; the message names the file and the line.
        OSError: the file cannot be read.
    """
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = decoded(json.loads(text))
        except ValueError as error:
            raise ConfigError(f"{os.fspath(path)}, line {number}: {error}") from error
        if not isinstance(line, dict) or not {"format", "step"} & line.keys():
            raise ConfigError(f"{os.fspath(path)}, line {number}: this is not a record of an Adaptation")
        if line.get("format", FORMAT) != FORMAT:
            raise ConfigError(f"{os.fspath(path)}, line {number}: format {line['format']}; {FORMAT} is known")
        lines.append(line)
    if not lines or "format" not in lines[0]:
        raise ConfigError(f"{os.fspath(path)}: this is not a record of an Adaptation")
    return lines
