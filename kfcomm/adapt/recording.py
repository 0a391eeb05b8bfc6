"""Record of an ``Adaptation``, and its replay.

A record has the metrics, changes and decisions of a run, with one line of JSON for each meeting of the ranks. The first
line, and another one whenever the ranks have changed, has the ranks and the hyperparameters. Numbers are kept to the
last bit; null is a number that was not observed. A replay calls a policy with them, whether it was in the run or not.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO, TypeVar

from kfcomm.adapt.guard import GuardSteps, StepEvidence
from kfcomm.adapt.guarded import outcomes
from kfcomm.adapt.host import Named, PolicyHost
from kfcomm.adapt.hyperparameters import Hyperparameters
from kfcomm.adapt.meeting import MAX_ROUNDS, raised
from kfcomm.adapt.metrics import StepMetrics
from kfcomm.adapt.policy import SIZE, STRATEGY, Decision, Policy, Request
from kfcomm.errors import ConfigError
from kfcomm.strategies import AnyStrategy
from kfcomm.strategies.plugins import build
from kfcomm.types import Costs, Layout, override

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
        if self._file is not None and state is None:
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

    def judged(self, evidence: StepEvidence, names: Sequence[str]) -> None:
        """Note the evidence by which a step was judged, and what the culprits have told."""
        # False for a number that is not there: null is nan.
        losses, sq_norms = ([False if x is None else x for x in xs] for xs in (evidence.losses, evidence.sq_norms))
        batch = None if evidence.batch is None else [int(sample) for sample in evidence.batch]
        self._judged.append([evidence.step, losses, sq_norms, batch, evidence.raised, list(names)])

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
            **({"judged": self._judged} if self._judged else {}),
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
        self._rounds, self._decisions, self._judged = [[]], [], []

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


T = TypeVar("T")
Line = Mapping[str, Any]


def replay(policy: Policy, record: str | os.PathLike[str]) -> list[Decision]:
    """Run a policy on the record of ``Adaptation(..., record=...)``.

    A policy that was in the run, made with the same arguments, makes the same decisions. Another policy decides by the
    same measurements: its requests count as carried out, and do not change the measurements.

    Args:
        policy: a new policy.
        record: path of the file.

    Returns:
        The policy's decisions.

    Raises:
        ConfigError: the file is not a record; or it has no result for an action that the policy does together.
        OSError: the file cannot be read.
    """
    return asyncio.run(_Replay(policy, lines_of(record)).run())


@dataclass(frozen=True, slots=True)
class _Other:
    """Policy of the run other than the replayed one."""

    name: str


@dataclass(frozen=True, slots=True)
class _Unknown:
    """Strategy that is known by its name and digest only."""

    name: str
    digest: bytes


class _ReplayHost(PolicyHost):
    """State of the policies in the run, as the record has it."""

    comm: StaticWorld

    def __init__(self, policy: Policy) -> None:
        layout = Layout.even(1)
        super().__init__(StaticWorld(layout, build("star", layout)), Hyperparameters(), [policy])
        self.results: list[Line] = []
        self.lacking: ConfigError | None = None
        self._known: dict[bytes, AnyStrategy] = {}

    def start(self, line: Line) -> None:
        """Take over the ranks and hyperparameters of a line that begins a record."""
        layout = line["layout"]
        self.comm.layout = Layout(tuple(layout["hosts"]), layout["num_cpus"], Costs(*layout["costs"]))
        self.comm.outlives = line["can_change"]
        self.num_steps = line["begins"]
        self.hyperparameters = Hyperparameters.from_json(line["hyperparameters"])
        self.see(line["strategy"])

    def see(self, strategy: Sequence[str]) -> None:
        """Take over the strategy in force."""
        self.comm.strategy = self._strategy_of(strategy)

    def measured(self, line: Line) -> StepMetrics:
        """Measurements of a step."""
        return StepMetrics(
            step=line["step"],
            strategy=self._strategy_of(line["strategy"]),
            **{name: tuple(line[name]) for name in NUMBERS},
            hyperparameters=self.hyperparameters,
            observed={name: tuple(values) for name, values in line["observed"].items()},
        )

    @override
    async def change_strategy(self, chosen: AnyStrategy, runner: Named | None) -> None:
        self._known[chosen.digest] = self.comm.strategy = chosen
        await super().change_strategy(chosen, runner)

    @override
    async def together(self, what: str, call: Callable[[Any], Awaitable[T]], runner: Named) -> T:
        found = next((one for one in self.results if one["together"] == what), None)
        if found is None or "lacks" in found:
            why = "" if found is None else f": {found['lacks']}"
            self.lacking = ConfigError(f"the record has no result of {what!r} for {runner.name}{why}")
            raise self.lacking
        self.results.remove(found)
        result: T = found["result"]
        return result

    def others_did(self, entry: Line, names: Sequence[str]) -> None:
        """Repeat a change that was made in the run for another policy, or undone."""
        subject = entry.get("subject")
        if not subject or "overruled" in entry:
            return
        if subject == STRATEGY:
            self.see(entry["value"])
        elif subject != SIZE:
            self.hyperparameters = self.hyperparameters.having(subject, entry["value"])
        number = entry["policy"]
        self.held_by(subject, None if number is None else _Other(names[number]))

    def _strategy_of(self, recorded: Sequence[str]) -> AnyStrategy:
        name, digest = recorded[0], bytes.fromhex(recorded[1])
        if digest not in self._known:
            try:
                made: Any = build(name, self.comm.layout)
            except ConfigError:
                made = None
            self._known[digest] = made if made is not None and made.digest == digest else _Unknown(name, digest)  # type: ignore[assignment]
        return self._known[digest]


class _Replay:
    """Replay of one policy on the lines of a record."""

    def __init__(self, policy: Policy, lines: Sequence[Line]) -> None:
        self._lines = lines
        self._host = _ReplayHost(policy)
        (self._runner,) = self._host.runners
        self._names: Sequence[str] = lines[0]["policies"]
        self._number = self._names.index(policy.name) if policy.name in self._names else len(self._names)

    async def run(self) -> list[Decision]:
        for line in self._lines:
            if "format" in line:
                await self._start(line)
            else:
                await self._step(line)
            if self._host.lacking is not None:
                await self._runner.end()
                raise self._host.lacking
        await self._runner.end()
        return self._host.decisions

    async def _start(self, line: Line) -> None:
        state = None if line is self._lines[0] else self._runner.state()
        self._host.start(line)
        if state is None and self._number < len(line["states"]):
            state = line["states"][self._number]
        if state is None:
            await self._runner.call("on_start")
        else:
            await self._runner.begin_anew(state)

    async def _step(self, line: Line) -> None:
        host, runner, rounds = self._host, self._runner, line["rounds"]
        self._judge(line.get("judged", ()))
        host.num_steps = line["step"]
        host.see(line["strategy"])
        await runner.call("before_step")
        await runner.settle()
        host.metrics = host.measured(line)
        was_done = await self._round(rounds[0])
        await runner.call("after_step")
        for number in range(1, MAX_ROUNDS + 1):
            if number >= len(rounds) and not was_done:
                break
            was_done = await self._round(rounds[number] if number < len(rounds) else [])
        host.num_steps += 1

    def _judge(self, judged: Sequence[Sequence[Any]]) -> None:
        """Let a guard judge the steps since the last meeting, by the same evidence."""
        guard = self._runner.policy
        if not isinstance(guard, GuardSteps):
            return
        for step, losses, sq_norms, batch, ranks, names in judged:
            self._host.num_steps = step
            void = guard.judge(StepEvidence(step, _by_rank(losses), _by_rank(sq_norms), batch, tuple(ranks)))
            told = None if void is None else replace(void, names=tuple(names))
            for what, evidence in outcomes(told, guard.actions):
                self._host.decide(self._runner, what, evidence)

    async def _round(self, entries: Sequence[Line]) -> bool:
        """Carry out one meeting; returns whether a request of the policy was carried out."""
        await self._runner.settle()
        places = [-1 if entry["policy"] is None else entry["policy"] for entry in entries]
        for entry, place in zip(entries, places, strict=True):
            if place < self._number:
                self._host.others_did(entry, self._names)
        was_done = await self._own([entry for entry in entries if entry["policy"] == self._number])
        for entry, place in zip(entries, places, strict=True):
            if place > self._number:
                self._host.others_did(entry, self._names)
        return was_done

    async def _own(self, entries: Sequence[Line]) -> bool:
        host, runner = self._host, self._runner
        off = next((entry for entry in entries if "off" in entry), None)
        if runner.is_off:
            return False
        if off is not None or runner.failure:
            words = [runner.words] * host.comm.size
            what, evidence = (
                raised(range(host.comm.size), words) if off is None else (off["off"], _tuples(off["evidence"]))
            )
            await runner.switch_off()
            host.switched_off(runner, what, evidence)
            return False
        host.results = [entry for entry in entries if "together" in entry]
        lost = self._overruled([entry for entry in entries if "overruled" in entry])
        was_done = bool(runner.requests)
        await runner.carry_out(lost)
        return was_done

    def _overruled(self, entries: Sequence[Line]) -> set[Request[Any]]:
        """Requests of the policy that were overruled in the run; it may make the same one twice."""
        lost: set[Request[Any]] = set()
        for entry in entries:
            asked = [one for one in self._runner.requests if one.words == entry["words"] and one not in lost]
            if asked:
                lost.add(asked[0])
                self._host.overruled(asked[0], entry["by"], entry["overruled"])
        return lost


def _by_rank(values: Sequence[Any]) -> list[float | None]:
    return [None if x is False else math.nan if x is None else x for x in values]


def _tuples(evidence: Line) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in evidence.items()}


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
