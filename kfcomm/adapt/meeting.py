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

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from kfcomm.adapt.host import Held, PolicyHost
from kfcomm.adapt.metrics import MeetingTable, Reading, StepMetrics
from kfcomm.adapt.policy import FAILED, NOTHING, Request, overruled
from kfcomm.adapt.runner import Runner
from kfcomm.collectives.handle import Handle
from kfcomm.common.arguments import plain_text
from kfcomm.common.sizes import ranks_in_words
from kfcomm.errors import CollectiveMismatch, ConfigError, PeerLost
from kfcomm.types import override
from kfcomm.world.communicator import Communicator

MAX_OBSERVED = 64
"""Number of names on one rank: each is a number in every meeting."""
MAX_NAME = 100
"""Characters of a name."""


class Observed:
    """Numbers that the program of one rank has observed since the last meeting.

    A name gets a column on all ranks after one of them has observed it for the first time, by one more exchange.

    Attributes:
        columns: names that all ranks know, in the same order.
    """

    def __init__(self) -> None:
        self.columns: tuple[str, ...] = ()
        self._values: dict[str, float] = {}
        self._names: set[str] = set()

    def observe(self, values: Mapping[str, float]) -> None:
        """Keep values; the last one of a name counts.

        Raises:
            ConfigError: a value is not a number, or there are too many names.
        """
        for name, value in values.items():
            number = _number(name, value)
            if len(name) > MAX_NAME or len(self._names | {name}) > MAX_OBSERVED:
                raise ConfigError(f"a rank observes up to {MAX_OBSERVED} names of {MAX_NAME} characters: {name!r:.120}")
            self._names.add(plain_text(name))
            self._values[plain_text(name)] = number

    def take(self) -> dict[str, float]:
        """Return the values, and forget them."""
        taken, self._values = self._values, {}
        return taken

    def row(self, values: Mapping[str, float]) -> list[float]:
        """Return a rank's numbers, by column."""
        return [values.get(name, math.nan) for name in self.columns]

    def has_new(self, values: Mapping[str, float]) -> bool:
        """Whether a name has no column."""
        return not values.keys() <= set(self.columns)

    async def shared(
        self, table: MeetingTable, mine: Mapping[str, float], place: MeetingPlace
    ) -> dict[str, tuple[float, ...]]:
        """Return the values of all ranks, by name and by rank; new names cost one more exchange."""
        found = {name: tuple(table.observed[:, at].tolist()) for at, name in enumerate(self.columns)}
        if table.has_news:
            new = {name: value for name, value in mine.items() if name not in self.columns}
            said: Sequence[Mapping[str, float]] = await place.tell(new, "observed")
            names = sorted({name for one in said for name in one})
            if len(said) == place.size:  # else a rank is lost, and this step comes to nothing
                found |= {name: tuple(one.get(name, math.nan) for one in said) for name in names}
            self.columns = (*self.columns, *names)
        return found


def _number(name: str, value: Any) -> float:
    """Convert a number, or an array of one number."""
    try:
        return float(value.item() if hasattr(value, "item") else value + 0.0)
    except (TypeError, ValueError):
        raise ConfigError(f"what is observed is a number: {name} is {value!r:.60}") from None


MEETING = "meeting"
OWN_NAMES = "kfcomm/adaptation/"
"""Prefix of calls in the world of an ``Elastic``, which surviving ranks always finish."""


class MeetingPlace(ABC):
    """Communicator in which the ranks of one ``Adaptation`` meet."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    @property
    def rank(self) -> int:
        """This rank."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._comm.size

    @abstractmethod
    def meet(self, mine: Any) -> Handle[Any]:
        """Sum the arrays of all ranks."""

    @abstractmethod
    def all_were_there(self, meeting: Handle[Any]) -> bool:
        """Whether no rank is missing in a sum."""

    @abstractmethod
    async def tell(self, value: Any, what: str) -> list[Any]:
        """Gather a value of each surviving rank, in the order of ranks."""

    @abstractmethod
    async def take(self, value: Any, givers: Sequence[int]) -> Any:
        """Broadcast the value of the first of ``givers`` that survives."""

    @abstractmethod
    def refuse(self, error: BaseException) -> None:
        """Make the next meeting fail: this rank does not come."""

    @abstractmethod
    async def close(self) -> None:
        """End the meetings."""


class GroupPlace(MeetingPlace):
    """A group along a binary tree, so that neither the program's names nor its strategy matter."""

    @classmethod
    async def of(cls, comm: Communicator) -> GroupPlace:
        """Make the group of all ranks."""
        return cls(await comm.group(range(comm.size), "adaptation", strategy="binary_tree"))

    @override
    def meet(self, mine: Any) -> Handle[Any]:
        return self._comm.all_reduce(mine, MEETING)

    @override
    def all_were_there(self, meeting: Handle[Any]) -> bool:
        return True  # the sum of a group fails without one of its ranks

    @override
    async def tell(self, value: Any, what: str) -> list[Any]:
        said: list[Any] = await self._comm.all_gather_object(value, what)
        return said

    @override
    async def take(self, value: Any, givers: Sequence[int]) -> Any:
        return await self._comm.broadcast_object(value, givers[0], "state")

    @override
    def refuse(self, error: BaseException) -> None:
        self._comm._group.refuse(MEETING, error)

    @override
    async def close(self) -> None:
        await self._comm.close()


class WorldPlace(MeetingPlace):
    """The world of an open ``Elastic``, with the program's strategy."""

    @override
    def meet(self, mine: Any) -> Handle[Any]:
        return self._comm.all_reduce(mine, f"{OWN_NAMES}{MEETING}")

    @override
    def all_were_there(self, meeting: Handle[Any]) -> bool:
        return set(meeting.contributors or ()) == set(self._comm.births)

    @override
    async def tell(self, value: Any, what: str) -> list[Any]:
        said: list[Any] = await self._comm.all_gather_object(value, f"{OWN_NAMES}{what}")
        return said

    @override
    async def take(self, value: Any, givers: Sequence[int]) -> Any:
        # A giver may be lost during its broadcast, which all surviving ranks see alike.
        for giver in givers:
            try:
                return await self._comm.broadcast_object(value, giver, f"{OWN_NAMES}state/{giver}")
            except PeerLost:
                continue
        raise PeerLost(f"ranks {list(givers)}, which knew what holds, are lost", key=OWN_NAMES, rank=givers[-1])

    @override
    def refuse(self, error: BaseException) -> None:
        self._comm.refuse(f"{OWN_NAMES}{MEETING}", error)

    @override
    async def close(self) -> None:
        return  # the world is the program's


MAX_ROUNDS = 16
"""Meetings at the end of one step; what is asked for after that waits for the next step."""

Done: TypeAlias = Mapping[Runner, Held]
"""The policies for which a change was made, and the state before."""


class Meetings:
    """Meetings of one ``Adaptation``, on this rank.

    Args:
        host: state that policies share.
        place: communicator for the meetings.
        runners: policies, in the same order on every rank.
        observed: numbers that the program observes.
    """

    def __init__(self, host: PolicyHost, place: MeetingPlace, runners: Sequence[Runner], observed: Observed) -> None:
        self.place = place
        self._host = host
        self._runners = runners
        self._observed = observed
        self._meeting: Handle[Any] | None = None

    async def introduce(self, every: int, *, knows: bool, wrong: str | None = None) -> list[int]:
        """Check that all ranks have the same policies and options.

        Hyperparameters may differ if a rank has met others before: the ranks that have not take over its values.

        Args:
            every: number of steps between meetings.
            knows: this rank has met others before.
            wrong: reason for which this rank cannot begin.

        Returns:
            The ranks that have met others before.

        Raises:
            ConfigError: a rank cannot begin.
            CollectiveMismatch: the ranks have different policies, hyperparameters, or values of ``every``.
        """
        names, given = [runner.name for runner in self._runners], self._host.hyperparameters.as_json()
        said = await self.place.tell([self.place.rank, knows, wrong, names, every, given], "introduction")
        for rank, _, why, *_ in said:
            if why is not None:
                raise ConfigError(why if rank == self.place.rank else f"rank {rank}: {why}")
        knowing = [rank for rank, knew, *_ in said if knew]
        alike = [one[3:5] if knowing else one[3:] for one in said]
        other = next((place for place, one in enumerate(alike) if one != alike[0]), None)
        if other is not None:
            sides = [f"rank {said[place][0]} has {_shown(*said[place][3:])}" for place in (0, other)]
            raise CollectiveMismatch(f"the ranks adapt differently: {'; '.join(sides)}")
        return knowing

    async def exchange(
        self, step: int, reading: Reading | None = None, observed: Mapping[str, float] | None = None
    ) -> MeetingTable | None:
        """Meet the other ranks.

        Args:
            step: number of this rank's step.
            reading: its measurements, unless they were reported in this step before.
            observed: numbers that its program has observed.

        Returns:
            The reports of all ranks; None, on all ranks, if one is missing.

        Raises:
            CollectiveMismatch: the ranks are at different steps.
        """
        for runner in self._runners:
            await runner.settle()
        place, mine = self.place, observed or {}
        size = place.size
        signs = [runner.sign for runner in self._runners]
        row = MeetingTable.fill(
            place.rank, size, step, reading or Reading.nothing(size), signs, self._observed.row(mine),
            is_new=self._observed.has_new(mine),
        )  # fmt: skip
        self._meeting = place.meet(row)
        table = MeetingTable.read(await self._meeting, size, len(signs))
        if not place.all_were_there(self._meeting):
            return None
        if len(set(table.steps)) > 1:
            raise CollectiveMismatch(f"the ranks are at different steps: {list(table.steps)}", key=MEETING)
        return table

    async def metrics(self, table: MeetingTable, observed: Mapping[str, float]) -> StepMetrics:
        """Return the measurements and observations of all ranks."""
        shared = await self._observed.shared(table, observed, self.place)
        return table.metrics(self._host.comm.strategy, self._host.hyperparameters, shared)

    async def follow(self, table: MeetingTable, before: Done) -> Done:
        """Carry out the requests of all ranks; switch off policies that have failed, or whose requests differ.

        Args:
            table: reports of the meeting.
            before: result for the meeting before, at the end of the same step.
        """
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
            done[runner] = self._host.held
            await runner.carry_out(lost)
        return done

    async def to_the_end(self, step: int, done: Done) -> None:
        """Meet again as long as a request was carried out."""
        for _ in range(MAX_ROUNDS):
            if not done:
                return
            table = await self.exchange(step)
            if table is None:
                return
            if self._host.recorder is not None:
                self._host.recorder.met()
            done = await self.follow(table, done)

    def refuse(self, error: BaseException) -> None:
        """Make the next meeting fail, to which this rank does not come, so that the others do not wait."""
        self.place.refuse(error)

    def interrupted(self, error: BaseException) -> None:
        """Stop after a cancellation. If the meeting itself was cancelled, it is cancelled on every rank already."""
        if self._meeting is None or not self._meeting.cancelled():
            self.refuse(error)

    async def close(self) -> None:
        """End the meetings."""
        await self.place.close()

    async def _switch_off(self, bad: list[Runner], signs: Mapping[Runner, Sequence[int]], before: Done) -> None:
        said = await self.place.tell([runner.words for runner in bad], "reasons")
        if len(said) < self.place.size:
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
