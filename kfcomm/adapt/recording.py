"""Record of an ``Adaptation``, for `replaying`.

A record has the metrics, changes and decisions of a run, with one line of JSON for each meeting of the ranks. The first
line, and another one whenever the ranks have changed, has the ranks and the hyperparameters. Numbers are kept to the
last bit; null is a number that was not observed. A replay calls a policy with them, whether it was in the run or not.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from kfcomm.adapt.guard import StepEvidence
from kfcomm.adapt.host import Named, PolicyHost
from kfcomm.adapt.metrics import StepMetrics
from kfcomm.adapt.policy import Decision
from kfcomm.errors import ConfigError
from kfcomm.strategies import AnyStrategy
from kfcomm.types import Layout

logger = logging.getLogger("kfcomm.adapt")

FORMAT = 1
NUMBERS = ("seconds", "busy_s", "nbytes", "counts", "waited_s")
"""Fields of ``StepMetrics`` by rank."""


class StepRecorder:
    """Writer of a record, on the first rank."""

    def __init__(self, path: str | os.PathLike[str], host: PolicyHost) -> None:
        self._path = Path(path)
        self._host = host
        self._numbers: dict[Named, int] = {runner: number for number, runner in enumerate(host.runners)}
        self._file: TextIO | None = None
        self._rounds: list[list[dict[str, Any]]] = [[]]
        self._decisions: list[list[Any]] = []
        self._judged: list[list[Any]] = []
        self._hooks: list[list[Any]] = []
        self._num_samples = 0

    def open(self) -> str | None:
        """Open the file, on the first rank; returns the reason if that is impossible."""
        if self._file is None:
            try:
                # To append: a rank that becomes the first one continues the record of its predecessor.
                self._file = self._path.open("a", encoding="utf-8")
            except OSError as error:
                return f"the steps cannot be recorded: {error}"
        return None

    def begin(self, state: Mapping[str, Any] | None) -> None:
        """Write a line for new ranks, with the state of a rank that was there before, if there is one."""
        self._forget()
        if self._file is not None and (state is None or state["num_steps"] == 0):
            self._file.truncate(0)  # the steps are counted from here on
        comm, known = self._host.comm, state or self._host.state()
        try:
            states = [] if state is None else encoded(state["policies"])
        except ConfigError:
            states = []
        layout = comm.layout
        self._write({
            "format": FORMAT,
            "begins": known["num_steps"],
            "can_change": comm.outlives,
            "layout": {"hosts": layout.hosts, "num_cpus": layout.num_cpus, "costs": layout.costs},
            "strategy": strategy_as_json(comm.strategy),
            "hyperparameters": known["hyperparameters"],
            "rest": self._host.changes.rest,
            "changes": known["changes"],
            "progress": known["progress"],
            "states": states,
            "policies": [runner.name for runner in self._host.runners],
        })  # fmt: skip

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

    def hooked(self, hook: str) -> None:
        """Note that an epoch has begun or ended."""
        progress = self._host.progress
        self._hooks.append([hook, self._host.num_steps, *progress.as_list()])

    def began(self) -> None:
        """Note the samples before a step at whose end the ranks meet."""
        self._num_samples = self._host.progress.num_samples

    def judged(self, evidence: StepEvidence, names: Sequence[str]) -> None:
        """Note the evidence by which a step was judged, and what the culprits have told."""
        batch = None if evidence.batch is None else [int(sample) for sample in evidence.batch]
        self._judged.append([evidence.step, evidence.losses, evidence.sq_norms, batch, evidence.raised, names])

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
            "samples": [self._num_samples, self._host.progress.num_samples],
            **({"judged": self._judged} if self._judged else {}),
            **({"hooks": self._hooks} if self._hooks else {}),
        })  # fmt: skip
        self._forget()

    def close(self) -> None:
        """Close the file; the end of the last epoch has a line of its own."""
        if self._hooks:
            self._write({"step": self._host.num_steps, "hooks": self._hooks, "decisions": self._decisions})
            self._forget()
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _number(self, runner: Named | None) -> int | None:
        return None if runner is None else self._numbers[runner]

    def _forget(self) -> None:
        self._rounds, self._decisions, self._judged, self._hooks = [[]], [], [], []

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


def encoded(value: Any) -> Any:
    """Encode a value for strict JSON: text for nan and infinities."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": str(value)}
        case Mapping() if all(isinstance(key, str) for key in value):
            return {key: encoded(one) for key, one in value.items()}
        case list() | tuple():
            return [encoded(one) for one in value]
    raise ConfigError(f"{type(value).__name__} cannot be recorded")


def decoded(value: Any) -> Any:
    """Decode the result of ``encoded``, except tuples, which stay lists."""
    if isinstance(value, dict):
        if value.keys() == {"float"}:
            return float(value["float"])
        return {key: decoded(one) for key, one in value.items()}
    return [decoded(one) for one in value] if isinstance(value, list) else value


def lines_of(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the lines of a record; an error names the file and the line."""
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


@dataclass
class StaticWorld:
    """Stand-in for a communicator, for policies without ranks: a replay or a simulation, as rank 0 sees it."""

    layout: Layout
    strategy: AnyStrategy
    outlives: bool = True  # the number of ranks can change
    rank: int = 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.layout.size

    async def set_strategy(self, strategy: AnyStrategy) -> None:
        """Set the strategy."""
        self.strategy = strategy

    async def propose_size(self, size: int) -> None:
        """Accept a size; the layout stays."""

    async def propose_replacement(self, rank: int) -> None:
        """Accept a replacement; the layout stays."""

    async def broadcast_object(self, value: Any, root: int, name: str) -> Any:
        """Return the value: there is one rank that speaks."""
        return value
