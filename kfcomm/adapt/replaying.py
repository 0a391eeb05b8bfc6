"""Replay of a record of an ``Adaptation``: a policy decides by its measurements, without ranks, network or clock."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kfcomm.adapt.flapping import RecentChanges
from kfcomm.adapt.guard import GuardSteps, StepEvidence
from kfcomm.adapt.guarded import outcomes
from kfcomm.adapt.host import Action, Named, PolicyHost, TrainingProgress
from kfcomm.adapt.hyperparameters import Hyperparameters
from kfcomm.adapt.meeting import MAX_ROUNDS, raised
from kfcomm.adapt.metrics import StepMetrics
from kfcomm.adapt.policy import Decision, Policy
from kfcomm.adapt.recording import NUMBERS, StaticWorld, lines_of
from kfcomm.adapt.requests import SIZE, STOP, STRATEGY, Request
from kfcomm.errors import ConfigError
from kfcomm.strategies import AnyStrategy
from kfcomm.strategies.plugins import build
from kfcomm.types import Costs, Layout, override

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
        self.comm.layout = Layout(tuple(layout["hosts"]), layout["num_cpus"], Costs.of_record(layout["costs"]))
        self.comm.outlives = line["can_change"]
        self.num_steps = line["begins"]
        self.hyperparameters = Hyperparameters.from_json(line["hyperparameters"])
        self.changes = RecentChanges(line.get("rest", 0))
        self.changes.state = line.get("changes", {})
        self.progress = TrainingProgress(*line.get("progress", ()))
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
        self._known[chosen.digest] = chosen
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

    @override
    def act(self, action: Action, samples: Sequence[int]) -> None:
        pass  # a replay has neither state nor samples

    @override
    def check_action(self, action: Action) -> None:
        pass

    def others_did(self, entry: Line, names: Sequence[str]) -> None:
        """Repeat a change that was made in the run for another policy, or undone."""
        subject = entry.get("subject")
        if not subject or "overruled" in entry:
            return
        value = entry["value"]
        if subject == STRATEGY:
            self.changes.note(subject, self.num_steps, self.comm.strategy.digest.hex(), value[1])
            self.see(value)
        elif subject == SIZE:
            self.changes.note(subject, self.num_steps, self.comm.size, value)
        elif subject == STOP:
            self.stopped = value
        else:
            self.changes.note(subject, self.num_steps, self.hyperparameters.value(subject), value)
            self.hyperparameters = self.hyperparameters.having(subject, value)
        if entry["policy"] is None:
            self.changes.forget(subject)
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
        host, runner, rounds = self._host, self._runner, line.get("rounds")
        self._judge(line.get("judged", ()))
        for hook, step, *progress in line.get("hooks", ()):
            host.num_steps, host.progress = step, TrainingProgress(*progress)
            await runner.call(hook)
        host.num_steps = line["step"]
        if not rounds:
            return
        host.progress.num_samples, num_samples = line.get("samples", (0, 0))
        host.see(line["strategy"])
        await runner.call("before_step")
        await runner.settle()
        host.metrics, host.progress.num_samples = host.measured(line), num_samples
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
            void = guard.judge(StepEvidence(step, losses, sq_norms, batch, tuple(ranks)))
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


def _tuples(evidence: Line) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in evidence.items()}
