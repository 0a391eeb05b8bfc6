"""Meetings of the ranks at the end of a step: measurements, observations, requests of policies, and what follows.

Invariants:

- A change needs all ranks. At the end of a step the ranks meet in one small all_reduce, in which each rank reports for
  each of its policies what it asks for, or that it has raised. All ranks derive the changes from the same array: all of
  them make a change, or none does.
- A rank that has a request waits for the next meeting, never for an answer from ranks that may have no request. So the
  request that a policy makes after a step is carried out at the end of the next step. When the ranks have done
  something together, all of them know it, and meet again at once.
- A policy that raises, or that asks for different things on different ranks, is switched off on all of them. If a
  change was just made for it, the state before is restored.
- Of policies that ask for the same thing at once, the first in their order wins.
- In an ``Elastic`` all surviving ranks know that a meeting lacked a rank: nothing follows from it, and before the next
  step the policies begin anew, on all ranks with the state of one of them.

The ranks of an ``Elastic`` meet in its world: whatever any rank has finished there, all surviving ranks finish, with
the same contributors, so that all know which ranks were at the meeting. Other programs meet in a group of their own,
which ends with the first lost rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from kfcomm.adapt.host import Held, PolicyHost
from kfcomm.adapt.metrics import MeetingTable, Reading, StepMetrics
from kfcomm.adapt.requests import FAILED, NOTHING, Request, overruled
from kfcomm.adapt.runner import Runner
from kfcomm.collectives.handle import Handle
from kfcomm.common.sizes import ranks_in_words
from kfcomm.errors import CollectiveMismatch, ConfigError, PeerLost
from kfcomm.world.communicator import Communicator

MEETING = "meeting"
OWN_NAMES = "kfcomm/adaptation/"
"""Prefix of calls in the world of an ``Elastic``, which surviving ranks always finish."""


class MeetingPlace:
    """Communicator in which the ranks of one ``Adaptation`` meet."""

    def __init__(self, comm: Communicator, *, is_world: bool) -> None:
        self.comm = comm
        self.is_world = is_world
        self._prefix = OWN_NAMES if is_world else ""

    @classmethod
    async def of(cls, comm: Communicator) -> MeetingPlace:
        """Make the place of all ranks, which all call it."""
        # In an open ``Elastic`` the world, whose calls survive a loss. Otherwise a group of its own, so that neither
        # the program's names nor its strategy matter.
        if comm.outlives:
            return cls(comm, is_world=True)
        return cls(await comm.group(range(comm.size), "adaptation", strategy="binary_tree"), is_world=False)

    def meet(self, mine: Any) -> Handle[Any]:
        """Sum the arrays of all ranks."""
        return self.comm.all_reduce(mine, self._prefix + MEETING)

    def all_were_there(self, meeting: Handle[Any]) -> bool:
        """Whether no rank is missing in a sum; that of a group fails without one."""
        return not self.is_world or set(meeting.contributors or ()) == set(self.comm.births)

    async def tell(self, value: Any, what: str) -> list[Any]:
        """Gather a value of each surviving rank, in the order of ranks."""
        said: list[Any] = await self.comm.all_gather_object(value, self._prefix + what)
        return said

    async def take(self, value: Any, givers: Sequence[int]) -> Any:
        """Broadcast the value of the first of ``givers`` that survives."""
        # A giver may be lost during its broadcast, which all surviving ranks see alike.
        for giver in givers:
            try:
                return await self.comm.broadcast_object(value, giver, f"{self._prefix}state/{giver}")
            except PeerLost:
                continue
        raise PeerLost(f"ranks {list(givers)}, which knew what holds, are lost", key=OWN_NAMES, rank=givers[-1])

    def refuse(self, error: BaseException) -> None:
        """Make the next meeting fail, to which this rank does not come, so that the others do not wait."""
        if self.is_world:
            self.comm.refuse(self._prefix + MEETING, error)
        else:
            self.comm._group.refuse(MEETING, error)  # without a check: a loss may have closed the group

    async def close(self) -> None:
        """End the meetings; the world is the program's."""
        if not self.is_world:
            await self.comm.close()


MAX_ROUNDS = 16
"""Meetings at the end of one step; what is asked for after that waits for the next step."""

Done: TypeAlias = Mapping[Runner, Held]
"""The policies for which a change was made, and the state before."""


class Meetings:
    """Meetings of the policies of one host, on this rank."""

    def __init__(self, host: PolicyHost, place: MeetingPlace) -> None:
        self.place = place
        self._host = host
        self._runners = host.runners
        self._meeting: Handle[Any] | None = None

    async def introduce(self, every: int, *, knows: int, wrong: str | None = None) -> list[int]:
        """Check that all ranks have the same policies and options; returns those whose state all continue with.

        Args:
            every: number of steps between meetings.
            knows: 2 if this rank has met others before, 1 if it has loaded a state, else 0. The highest ones count.
            wrong: reason for which this rank cannot begin; then no rank begins.
        """
        names, given = [runner.name for runner in self._runners], self._host.hyperparameters.as_json()
        mine = self.place.comm.rank
        said = await self.place.tell([mine, knows, wrong, names, every, given], "introduction")
        for rank, _, why, *_ in said:
            if why is not None:
                raise ConfigError(why if rank == mine else f"rank {rank}: {why}")
        most = max(knew for _, knew, *_ in said)
        knowing = [rank for rank, knew, *_ in said if knew == most > 0]
        # Hyperparameters may differ then: ranks that have joined take over the values of those that know.
        alike = [one[3:5] if knowing else one[3:] for one in said]
        other = next((place for place, one in enumerate(alike) if one != alike[0]), None)
        if other is not None:
            sides = [f"rank {said[place][0]} has {_shown(*said[place][3:])}" for place in (0, other)]
            raise CollectiveMismatch(f"the ranks adapt differently: {'; '.join(sides)}")
        return knowing

    async def meet(self, measured: Reading) -> None:
        """Meet the other ranks at the end of a step, and let policies act on its metrics."""
        host, observed = self._host, self._host.observed.take()
        table = await self._exchange(measured, observed)
        if table is None:
            return
        host.metrics = await self._metrics(table, observed)
        meter = self.place.comm._session.engine.meter
        if meter is not None:
            meter.gauges.update(host.metrics.numbers)
        # Requests of the step before come first: after_step below sees their effect.
        done = await self._follow(table, {})
        for runner in self._runners:
            await runner.call("after_step")
        for _ in range(MAX_ROUNDS):
            # What was carried out may have led to another request, which all ranks know: they meet again at once.
            table = await self._exchange(Reading.nothing(self.place.comm.size), {}) if done else None
            if table is None:
                break
            if host.recorder is not None:
                host.recorder.met()
            done = await self._follow(table, done)
        if host.recorder is not None:
            host.recorder.step(host.metrics)

    async def _exchange(self, reading: Reading, mine: Mapping[str, float]) -> MeetingTable | None:
        """Return the reports of all ranks; None, on all ranks, if one is missing."""
        for runner in self._runners:
            await runner.settle()
        place, columns, step = self.place, self._host.observed.columns, self._host.num_steps
        rank, size = place.comm.rank, place.comm.size
        signs = [runner.sign for runner in self._runners]
        row = MeetingTable.fill(
            rank, size, step, reading, signs, [mine.get(name) for name in columns],
            is_new=not mine.keys() <= set(columns),
        )  # fmt: skip
        self._meeting = place.meet(row)
        table = MeetingTable.read(await self._meeting, size, len(signs))
        if not place.all_were_there(self._meeting):
            return None
        if len(set(table.steps)) > 1:
            raise CollectiveMismatch(f"the ranks are at different steps: {list(table.steps)}", key=MEETING)
        return table

    async def _metrics(self, table: MeetingTable, observed: Mapping[str, float]) -> StepMetrics:
        """Return the measurements and observations of all ranks; new names cost one more exchange."""
        host, known = self._host, self._host.observed.columns
        shared = {name: table.observed_of(at) for at, name in enumerate(known)}
        if table.has_news:
            new = {name: value for name, value in observed.items() if name not in known}
            said: Sequence[Mapping[str, float]] = await self.place.tell(new, "observed")
            names = sorted({name for one in said for name in one})
            if len(said) == self.place.comm.size:  # else a rank is lost, and this step comes to nothing
                shared |= {name: tuple(one.get(name) for one in said) for name in names}
            host.observed.columns = (*known, *names)
        return table.metrics(host.comm.strategy, host.hyperparameters, shared)

    async def _follow(self, table: MeetingTable, before: Done) -> Done:
        """Carry out the requests of all ranks; switch off policies that have failed, or whose requests differ."""
        # ``before`` is what the previous meeting at the end of this step has done: undone for a failed policy.
        signs = {runner: table.signs_of(number) for number, runner in enumerate(self._runners)}
        # Derived from the table, which is the same on all ranks: all switch off the same policies.
        bad = [runner for runner, of_ranks in signs.items() if FAILED in of_ranks or len(set(of_ranks)) > 1]
        if bad:
            await self._switch_off(bad, signs, before)
        asking = [runner for runner, of_ranks in signs.items() if runner not in bad and of_ranks[0] != NOTHING]
        lost = overrule(self._host, asking) if len(asking) > 1 else set()
        done = {}
        for runner in asking:
            # Kept before the change: if the policy raises right after it, this is restored.
            done[runner] = Held(self._host.comm.strategy, self._host.hyperparameters)
            await runner.carry_out(lost)
        return done

    def interrupted(self, error: BaseException) -> None:
        """Stop after a cancellation. If the meeting itself was cancelled, it is cancelled on every rank already."""
        if self._meeting is None or not self._meeting.cancelled():
            self.place.refuse(error)

    async def _switch_off(self, bad: list[Runner], signs: Mapping[Runner, Sequence[int]], before: Done) -> None:
        said = await self.place.tell([runner.words for runner in bad], "reasons")
        if len(said) < self.place.comm.size:
            return  # a rank is lost: before the next step the policies begin anew
        for number, runner in enumerate(bad):
            await runner.switch_off()
            words = [of_rank[number] for of_rank in said]
            failed = [rank for rank, sign in enumerate(signs[runner]) if sign == FAILED]
            what, evidence = raised(failed, words) if failed else _disagreed(words)
            self._host.switched_off(runner, what, evidence)
        for runner in bad:
            if runner in before:
                await self._host.restore(runner, before[runner])


def overrule(host: PolicyHost, asking: Sequence[Runner]) -> set[Request[Any]]:
    """Drop and log the requests of policies that an earlier policy overrules; returns these requests."""
    lost = overruled([runner.requests for runner in asking])
    for request, winner in lost:
        host.overruled(request, winner.runner.name, winner.words)
    return {request for request, _ in lost}


def raised(ranks: Sequence[int], words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Describe that a policy has raised on these ranks, with the evidence."""
    where = "every rank" if len(ranks) == len(words) else ranks_in_words(ranks)
    return f"it raised on {where}: {words[ranks[0]]}", {"ranks": tuple(ranks), "size": len(words)}


def _disagreed(words: list[str]) -> tuple[str, dict[str, Any]]:
    unlike = tuple(rank for rank, one in enumerate(words) if one != words[0])
    other = unlike[0]
    return f"the ranks disagree: rank 0 {words[0]}, rank {other} {words[other]}", {"unlike rank 0": unlike}


def _shown(names: list[str], every: int, hyperparameters: Mapping[str, Any]) -> str:
    given = [f"{name} {value}" for name, value in hyperparameters.items() if value]
    return ", ".join([", ".join(names) or "no policies", f"every {every} steps", *given])
