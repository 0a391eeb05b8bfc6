"""The meetings of the ranks: what they measured in a step, what their policies ask for, and what follows.

Invariants:

- Nothing happens because one rank wants it. At the end of a step the ranks meet in one small all_reduce, in which each
  says what each of its policies asks for, or that it has raised. What follows is derived from that array, which is the
  same on every rank: all ranks do it, or none.
- A rank that has something to say waits for the next meeting, never for an answer from ranks that may have nothing to
  say. So what a policy asks for after a step is done at the end of the next one. When the ranks have done something
  together, all of them know it, and meet again at once.
- A policy that raises, or that asks for different things on different ranks, is switched off on all of them. If
  something was just done for it, what held before holds again.
- Of policies that ask for the same thing at once, the first in their order has its way.
- In a world that changes a meeting that lacks a rank is known as such to all that live: nothing follows from it, and
  before the next step the policies begin anew, on all of them with what one of them knew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from kfcomm.adapt.host import Held, Host
from kfcomm.adapt.metrics import Reading, StepMetrics, Table
from kfcomm.adapt.observed import Observed
from kfcomm.adapt.place import MEETING, Place
from kfcomm.adapt.requests import FAILED, NOTHING, Request, overruled
from kfcomm.adapt.runner import Runner
from kfcomm.common.sizes import ranks_in_words
from kfcomm.errors import CollectiveMismatch, ConfigError

if TYPE_CHECKING:
    from kfcomm.collectives.handle import Handle

MAX_ROUNDS = 16
"""So often the ranks meet again at the end of one step; what is asked for after that waits for the next."""

Done: TypeAlias = Mapping[Runner, Held]
"""The policies for which something was done, and what held before."""


class Meetings:
    """Those of one ``Adaptation``, on this rank.

    Args:
        host: what is changed.
        place: where the ranks meet.
        runners: the policies, in the same order on every rank.
        observed: what the program observes.
    """

    def __init__(self, host: Host, place: Place, runners: Sequence[Runner], observed: Observed) -> None:
        self.place = place
        self._host = host
        self._runners = runners
        self._observed = observed
        self._meeting: Handle[Any] | None = None

    async def introduce(self, every: int, *, knows: bool, wrong: str | None = None) -> list[int]:
        """See that all ranks adapt alike. What holds may differ where some know better than others.

        Args:
            every: steps between meetings.
            knows: whether this rank has met others before, and knows what holds.
            wrong: why this rank cannot begin.

        Returns:
            Those that have.

        Raises:
            ConfigError: a rank cannot begin.
            CollectiveMismatch: they have different policies, other hyperparameters, or another ``every``.
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
    ) -> Table | None:
        """Meet.

        Args:
            step: at which this rank is.
            reading: what it has measured, if it has not told it yet.
            observed: what its program has.

        Returns:
            What all say; None if a rank is missing, which all know then.

        Raises:
            CollectiveMismatch: the ranks are at different steps.
        """
        for runner in self._runners:
            await runner.settle()
        place, mine = self.place, observed or {}
        size = place.size
        signs = [runner.sign for runner in self._runners]
        row = Table.fill(
            place.rank, size, step, reading or Reading.nothing(size), signs, self._observed.row(mine),
            is_new=self._observed.has_new(mine),
        )  # fmt: skip
        self._meeting = place.meet(row)
        table = Table.read(await self._meeting, size, len(signs))
        if not place.all_were_there(self._meeting):
            return None
        if len(set(table.steps)) > 1:
            raise CollectiveMismatch(f"the ranks are at different steps: {list(table.steps)}", key=MEETING)
        return table

    async def metrics(self, table: Table, observed: Mapping[str, float]) -> StepMetrics:
        """What the ranks have measured and observed."""
        shared = await self._observed.shared(table, observed, self.place)
        return table.metrics(self._host.strategy, self._host.hyperparameters, shared)

    async def follow(self, table: Table, before: Done) -> Done:
        """Do what all ranks ask for; switch off what has failed, or what they do not all ask for.

        Args:
            table: of the meeting.
            before: what followed from the meeting before, at the end of the same step.
        """
        signs = {runner: table.signs_of(number) for number, runner in enumerate(self._runners)}
        bad = [runner for runner, of_ranks in signs.items() if FAILED in of_ranks or len(set(of_ranks)) > 1]
        if bad:
            await self._switch_off(bad, signs, before)
        asking = [runner for runner, of_ranks in signs.items() if runner not in bad and of_ranks[0] != NOTHING]
        lost = overrule(self._host, asking) if len(asking) > 1 else set()
        done = {}
        for runner in asking:
            done[runner] = self._host.held
            await runner.carry_out(lost)
        return done

    async def to_the_end(self, step: int, done: Done) -> None:
        """Meet again for as long as something was done."""
        for _ in range(MAX_ROUNDS):
            if not done:
                return
            table = await self.exchange(step)
            if table is None:
                return
            self._host.met_again()
            done = await self.follow(table, done)

    def refuse(self, error: BaseException) -> None:
        """This rank does not come to the next meeting; the others shall not wait for it."""
        self.place.refuse(error)

    def interrupted(self, error: BaseException) -> None:
        """What follows from a meeting is left off here. A meeting that was itself cancelled is so on every rank."""
        if self._meeting is None or not self._meeting.cancelled():
            self.refuse(error)

    async def close(self) -> None:
        """Meet no more."""
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


def overrule(host: Host, asking: Sequence[Runner]) -> set[Request[Any]]:
    """Of policies that ask for the same thing the first has its way, which is logged; returns what is not done."""
    lost = overruled([runner.requests for runner in asking])
    for request, winner in lost:
        host.overruled(request, winner.runner.name, winner.words)
    return {request for request, _ in lost}


def raised(ranks: Sequence[int], words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """That a policy has raised on these ranks, in words, and the evidence."""
    where = "every rank" if len(ranks) == len(words) else ranks_in_words(ranks)
    return f"it raised on {where}: {words[ranks[0]]}", {"ranks": tuple(ranks), "size": len(words)}


def _disagreed(words: list[str]) -> tuple[str, dict[str, Any]]:
    unlike = tuple(rank for rank, one in enumerate(words) if one != words[0])
    other = unlike[0]
    return f"the ranks disagree: rank 0 {words[0]}, rank {other} {words[other]}", {"unlike rank 0": unlike}


def _shown(names: list[str], every: int, hyperparameters: Mapping[str, Any]) -> str:
    given = [f"{name} {value}" for name, value in hyperparameters.items() if value]
    return ", ".join([", ".join(names) or "no policies", f"every {every} steps", *given])
