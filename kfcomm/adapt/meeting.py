"""The meetings of the ranks: what they measured in a step, what their policies ask for, and what follows.

Invariants:

- Nothing happens because one rank wants it. At the end of a step the ranks meet in one small all_reduce, in which each
  says what each of its policies asks for, or that it has raised. What follows is derived from that array, which is the
  same on every rank: all ranks do it, or none.
- A rank that has something to say waits for the next meeting, never for an answer from ranks that may have nothing to
  say. So what a policy asks for after a step is done at the end of the next one. When the ranks have done something
  together, all of them know it, and meet again at once.
- A policy that raises, or that asks for different things on different ranks, is switched off on all of them. If
  something was just done for it, the strategy from before is set again.

The meetings have a group of their own: neither the program's names nor its strategy matter to them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from kfcomm.adapt.metrics import Reading, Table
from kfcomm.adapt.requests import FAILED, NOTHING
from kfcomm.adapt.runner import Runner
from kfcomm.errors import CollectiveMismatch
from kfcomm.strategies import AnyStrategy

if TYPE_CHECKING:
    from kfcomm.collectives.handle import Handle
    from kfcomm.communicator import Communicator

MEETING = "meeting"
MAX_ROUNDS = 16
"""So often the ranks meet again at the end of one step; what is asked for after that waits for the next."""

Done: TypeAlias = Mapping[Runner, AnyStrategy]
"""The policies for which something was done, and the strategy that was in force before."""

Record: TypeAlias = Callable[..., None]


class Meetings:
    """Those of one ``Adaptation``, on this rank.

    Args:
        comm: whose strategy is changed.
        group: the same ranks, for the meetings.
        runners: the policies, in the same order on every rank.
        record: called with a runner, words, a level of logging, and the evidence.
    """

    def __init__(self, comm: Communicator, group: Communicator, runners: Sequence[Runner], record: Record) -> None:
        self._comm = comm
        self._group = group
        self._runners = runners
        self._record = record
        self._meeting: Handle[Any] | None = None

    async def introduce(self, every: int) -> None:
        """See that all ranks adapt alike.

        Raises:
            CollectiveMismatch: they have different policies, or another ``every``.
        """
        said = await self._group.all_gather_object([[runner.name for runner in self._runners], every])
        other = next((rank for rank, one in enumerate(said) if one != said[0]), None)
        if other is not None:
            raise CollectiveMismatch(
                f"the ranks adapt differently: rank 0 has {_shown(*said[0])}; rank {other} has {_shown(*said[other])}"
            )

    async def exchange(self, step: int, reading: Reading | None = None) -> Table:
        """Meet; ``reading``: what this rank has measured, if it has not told it yet.

        Raises:
            CollectiveMismatch: the ranks are at different steps.
        """
        for runner in self._runners:
            await runner.settle()
        size = self._group.size
        signs = [runner.sign for runner in self._runners]
        mine = Table.fill(self._group.rank, size, step, reading or Reading.nothing(size), signs)
        self._meeting = self._group.all_reduce(mine, MEETING)
        table = Table.read(await self._meeting, size, len(signs))
        if len(set(table.steps)) > 1:
            raise CollectiveMismatch(f"the ranks are at different steps: {list(table.steps)}", key=MEETING)
        return table

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
        done = {}
        for runner, of_ranks in signs.items():
            if not runner.is_off and of_ranks[0] != NOTHING:
                done[runner] = self._comm.strategy
                await runner.carry_out(self._comm)
        return done

    async def to_the_end(self, step: int, done: Done) -> None:
        """Meet again for as long as something was done."""
        for _ in range(MAX_ROUNDS):
            if not done:
                return
            done = await self.follow(await self.exchange(step), done)

    def refuse(self, error: BaseException) -> None:
        """This rank does not come to the next meeting; the others shall not wait for it."""
        self._group._group.refuse(MEETING, error)

    def interrupted(self, error: BaseException) -> None:
        """What follows from a meeting is left off here. A meeting that was itself cancelled is so on every rank."""
        if self._meeting is None or not self._meeting.cancelled():
            self.refuse(error)

    async def close(self) -> None:
        """Meet no more."""
        await self._group.close()

    async def _switch_off(self, bad: list[Runner], signs: Mapping[Runner, Sequence[int]], before: Done) -> None:
        said = await self._group.all_gather_object([runner.words for runner in bad])
        for number, runner in enumerate(bad):
            await runner.switch_off()
            words = [of_rank[number] for of_rank in said]
            failed = [rank for rank, sign in enumerate(signs[runner]) if sign == FAILED]
            what, evidence = _raised(failed, words) if failed else _disagreed(words)
            self._record(runner, f"switched off: {what}", logging.WARNING, evidence)
        undone = [before[runner] for runner in bad if runner in before]
        if undone:
            await self._comm.set_strategy(undone[0])


def _raised(ranks: list[int], words: list[str]) -> tuple[str, dict[str, Any]]:
    where = "every rank" if len(ranks) == len(words) else f"rank {', '.join(map(str, ranks))}"
    return f"it raised on {where}: {words[ranks[0]]}", {"ranks": tuple(ranks), "size": len(words)}


def _disagreed(words: list[str]) -> tuple[str, dict[str, Any]]:
    unlike = tuple(rank for rank, one in enumerate(words) if one != words[0])
    other = unlike[0]
    return f"the ranks disagree: rank 0 {words[0]}, rank {other} {words[other]}", {"unlike rank 0": unlike}


def _shown(names: list[str], every: int) -> str:
    return f"{', '.join(names) or 'no policies'}, every {every} steps"
