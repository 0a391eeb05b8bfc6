"""Training in steps, between which the ranks may change: one state, one order of samples, whoever dies or joins."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

import msgpack
import numpy as np

from kfcomm.elastic.asked import Asked
from kfcomm.elastic.buddies import Buddies
from kfcomm.elastic.checkpoint import Checkpoint
from kfcomm.elastic.communicator import ElasticCommunicator
from kfcomm.elastic.entry import BOUNDARY, Births
from kfcomm.elastic.handover import Handover, program_digest
from kfcomm.elastic.ledger import Ledger
from kfcomm.elastic.sampler import ElasticSampler, Indices, share
from kfcomm.elastic.state import Kept, State
from kfcomm.epochs import NO_PLAN, Plan
from kfcomm.errors import CollectiveMismatch, ConfigError, EpochChanged, PeerLost

T = TypeVar("T")

NOTHING: Indices = np.empty(0, np.int64)
ON_LOSS = ("finish", "raise", "restart_step")
"""What becomes of a step in whose midst a rank is lost."""


class Step:
    """One step of training.

    Of an ``Elastic`` that restarts steps, the body of the loop stands below ``with step:``, which ends it quietly when
    ranks are lost in its midst.

    Attributes:
        number: counted from 0 while the ``Elastic`` is open, by those that join on, too; also of one that runs again.
        indices: of the samples that this rank trains on.
        batch: of those of all ranks.
        is_void: it has ended because ranks were lost, and is to be run again.
    """

    __slots__ = ("_restarts", "batch", "indices", "is_void", "number")

    def __init__(self, number: int, indices: Indices, batch: Indices, *, restarts: bool = False) -> None:
        self.number = number
        self.indices = indices
        self.batch = batch
        self.is_void = False
        self._restarts = restarts

    def __repr__(self) -> str:
        return f"<Step {self.number}: {len(self.indices)} of {len(self.batch)} samples>"

    def __enter__(self) -> Self:
        if not self._restarts:
            raise ConfigError('with step: is for Elastic(..., on_loss="restart_step")')
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.is_void = isinstance(error, (EpochChanged, PeerLost))
        return self.is_void


Wanted: TypeAlias = Step | np.ndarray[Any, np.dtype[Any]] | Callable[[], Awaitable[None]]
Walk: TypeAlias = Generator[Wanted, Any, T]
"""See ``Elastic.walk``."""


class Elastic:
    """Training that goes on when a rank dies.

    ::

        state = kfcomm.elastic.State(weights=weights)
        async with kfcomm.init(elastic=True) as comm:
            async with kfcomm.elastic.Elastic(comm, state) as elastic:
                sampler = kfcomm.elastic.ElasticSampler(len(data), batch=256)
                async for step in elastic.steps(sampler):
                    gradient = await comm.all_reduce(gradient_of(state, step.indices), name="g", op="avg")
                    state.weights -= rate * gradient

    On entering all ranks take the state of the lowest. Between two steps the ranks meet; within one they do not change.
    A rank that dies in the midst of a step holds up nobody for longer than it takes to agree on that: what it had given
    is in a result for all, or for none, and what it would have trained on is given again later in the pass.

    Over ``kfcomm.sync.init(elastic=True)`` it is the blocking ``kfcomm.sync.Elastic``.

    Args:
        comm: of all ranks, made with ``elastic=True``.
        state: what the ranks have alike between steps.
        on_loss: what becomes of a call that no rank has finished when one is lost in the midst of a step. Whatever any
            rank has finished, all finish. With ``"finish"`` the others do it again among themselves, inside the same
            call. With ``"raise"`` it raises ``EpochChanged`` on all, as does each later call of the step; the samples
            of such a step come again later in the pass. With ``"restart_step"`` the step runs again, with the same
            batch and the state that it began with, of which a copy is kept: the body stands below ``with step:``.
        checkpoint: a file for the loss of all ranks, which the first rank writes in the background. If it is there on
            entering, all ranks go on from it: with its state, at its place in the pass.
        checkpoint_every: so many steps lie between two of them.
        own: what is this rank's alone: its part of an optimizer's state, say. Ranks may have other shapes in it.
            Nothing is done with it but by ``commit``, and where steps run again.
        copies: so many other ranks keep a copy of it after a ``commit``: as many may die at once, and it is not lost.

    Raises:
        ConfigError: one of them is something else, or cannot be.
    """

    def __new__(cls, comm: Any, state: State, **options: Any) -> Any:
        """The blocking one over a blocking communicator."""
        over = getattr(comm, "elastic_over", None)
        return super().__new__(cls) if over is None else over(state, **options)

    def __init__(
        self, comm: ElasticCommunicator, state: State, *, on_loss: str = "finish",
        checkpoint: str | os.PathLike[str] | None = None, checkpoint_every: int = 100, own: State | None = None,
        copies: int = 1,
    ) -> None:  # fmt: skip
        if not isinstance(comm, ElasticCommunicator):
            raise ConfigError(f"Elastic works on what kfcomm.init(elastic=True) returns, not on {comm!r}")
        if not isinstance(state, State):
            raise ConfigError(f"Elastic keeps a kfcomm.elastic.State, not {type(state).__name__}")
        if own is not None and not isinstance(own, State):
            raise ConfigError(f"own is a kfcomm.elastic.State, not {type(own).__name__}")
        if type(copies) is not int or copies < 1:
            raise ConfigError(f"copies is a number of ranks from 1 on, not {copies!r}")
        if on_loss not in ON_LOSS:
            raise ConfigError(f"on_loss is one of {', '.join(ON_LOSS)}, not {on_loss!r}")
        self._comm = comm
        self._state = state
        self._on_loss = on_loss
        self._checkpoint = None if checkpoint is None else Checkpoint(checkpoint, checkpoint_every, state)
        self._own = own
        self._copies = copies
        self._buddies: Buddies | None = None
        self._program = program_digest()
        self._ledger: Ledger | None = None
        self._asked = Asked()
        self._admitted: dict[str, Any] | None = None
        self._earlier = 0

    @property
    def is_released(self) -> bool:
        """Whether this rank was taken away by a change of size: its loop has ended, and it is to close."""
        return self._ledger is not None and self._ledger.is_released

    @property
    def num_changes(self) -> int:
        """How often the ranks have changed while it was open."""
        return 0 if self._ledger is None else self._ledger.num_changes

    @property
    def paused_s(self) -> float:
        """For how long calls have waited for that, in seconds."""
        return 0.0 if self._ledger is None else self._ledger.paused_s

    async def __aenter__(self) -> Self:
        """Take the state of the lowest rank.

        Raises:
            ConfigError: the states of the ranks differ in more than their values; says how.
        """
        self._ledger = self._comm.begin(finishes=self._on_loss == ON_LOSS[0])
        if self._own is not None:
            self._buddies = Buddies(self._comm, self._ledger, self._own, self._copies)
        network = self._comm.current._session.network
        num_old, network.num_old = network.num_old, 0
        try:
            place, wrong = await self._read() if not num_old and self._comm.rank == 0 else ([0, None], None)
            having = self._comm.births[:num_old] or None
            self._earlier, self._admitted = await self._handover().carry_out(place, having, wrong=wrong)
        except BaseException:
            await self._close()
            await self._comm.end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and not self.is_released:
                await self._part()
        finally:
            await self._close()
            await self._comm.end()

    def _handover(self) -> Handover:
        return Handover(self._comm, self._open(), self._state, self._program)

    async def _read(self) -> tuple[list[Any], str | None]:
        """The place of the checkpoint, whose state is taken over; and what is wrong with it."""
        try:
            place = None if self._checkpoint is None else await self._checkpoint.read()
        except ConfigError as error:
            return [0, None], str(error)
        return place or [0, None], None

    async def _close(self) -> None:
        self._asked.close()
        if self._checkpoint is not None:
            await self._checkpoint.close()

    # ---------------------------------------------------------------- what is a rank's own

    async def commit(self) -> bool:
        """Let other ranks keep a copy of this rank's ``own``; all ranks call it, at one place in their steps.

        It is all or nothing: if ranks die in its midst it is complete on all ranks that live, with what the dead had,
        or on none, and then the one before it stands. After ranks were lost there are fewer copies, until the next one.

        Returns:
            Whether it is complete; the same on all ranks.

        Raises:
            ConfigError: there is no ``own``, or no open ``Elastic``.

        Cost: a copy of ``own``, ``copies`` messages of it, and two small gathers. Twice that memory.
        """
        return await self._committed().commit()

    def restore(self) -> None:
        """This rank's ``own`` is again as it was at the last complete ``commit``.

        Raises:
            ConfigError: there was none; or its arrays have other shapes by now; or see ``commit``.
        """
        self._committed().restore()

    @property
    def heirs(self) -> dict[int, int | None]:
        """Who has what those had who took part in the last complete ``commit`` and are gone: births, by births.

        None where all that held it are gone, too. It changes between steps, is the same on all ranks that took part,
        and empty after the next complete ``commit``.
        """
        return {} if self._buddies is None else self._buddies.heirs()

    @property
    def inherited(self) -> dict[int, dict[str, Any]]:
        """What this rank is heir to, by birth: values of ``own`` by name as they were committed, arrays as NumPy's."""
        return {} if self._buddies is None else self._buddies.inherited()

    def _committed(self) -> Buddies:
        self._open()
        if self._buddies is None:
            raise ConfigError("nothing is this rank's own: give Elastic(..., own=State(...))")
        return self._buddies

    # ---------------------------------------------------------------- steps

    async def steps(
        self, sampler: ElasticSampler, *, passes: int | None = None, used_in: str | Sequence[str] | None = None
    ) -> AsyncIterator[Step]:
        """The steps of one pass, or of several; all ranks go through them together.

        Args:
            sampler: on all ranks at the same place.
            passes: until so many are behind the sampler, whoever has gone through them: also those from which this rank
                has joined, or which a checkpoint holds. To the end of the present one, if left out.
            used_in: the name, or names, of the calls by which samples count as used; all calls of the step, if left
                out. Those of a rank that died before it had given to all of these are given again.

        Raises:
            ConfigError: there is no open ``Elastic``, or the samplers differ.
            CollectiveMismatch: the ranks are not at the same step.
        """
        walk, met = self.walk(sampler, passes=passes, used_in=used_in), None
        while (wanted := following(walk, met)) is not None:
            met = None
            if isinstance(wanted, Step):
                yield wanted
            elif isinstance(wanted, np.ndarray):
                met = await self._open().begin("all_reduce", (wanted, BOUNDARY), {})
            else:
                await wanted()

    def walk(self, sampler: ElasticSampler, *, passes: int | None, used_in: str | Sequence[str] | None) -> Walk[None]:
        """The steps, and what has to be done or waited for between them, by whoever takes the next one.

        It gives a `Step`; or an array, of which the sums over all ranks under the name ``BOUNDARY`` are sent back; or
        what is to be called and awaited. Runs where the engine does.
        """
        ledger = self._open()
        if self.is_released:
            return
        names = [used_in] if isinstance(used_in, str) else used_in
        restarts = self._on_loss == "restart_step"
        step, births, until = Step(-1, NOTHING, NOTHING), self._comm.births, passes
        kept = [Kept(one) for one in (self._state, self._own) if restarts and one is not None]
        while True:
            if ledger.unfinished():
                yield partial(self._finish_calls, ledger)
            if self._admitted is not None:
                sampler.load_state_dict(self._admitted)
                self._admitted, births = None, self._comm.births
            else:
                births = yield from self._pass_boundary(ledger, sampler, step, births, names, kept)
                if ledger.is_released:
                    return
            if self._checkpoint is not None and self._comm.rank == 0:
                self._checkpoint.look(self._number(), [self._number() + 1, sampler.state_dict()])
            for one in kept:
                one.keep(sampler.state_dict())
            until = sampler.passes + 1 if until is None else until
            batch = sampler.take_until(until)
            if not len(batch):
                return
            mine = share(batch, births.index(self._me()), len(births))
            step = Step(self._number(), mine, batch, restarts=restarts)
            yield step

    def _open(self) -> Ledger:
        if self._ledger is None or self._comm._ledger is not self._ledger:
            raise ConfigError("use Elastic in a with block: it is not open")
        return self._ledger

    def _number(self) -> int:
        """Of the step that begins: the first boundary begins step 0."""
        return self._earlier + self._open().step - 1

    def _me(self) -> int:
        return self._comm.current.births[self._comm.current.rank]

    async def _finish_calls(self, ledger: Ledger) -> None:
        """What was begun in the step and not waited for; its errors are for whoever holds the handle."""
        while unfinished := ledger.unfinished():
            await asyncio.wait(unfinished)

    def _pass_boundary(
        self, ledger: Ledger, sampler: ElasticSampler, step: Step, births: Births, names: Sequence[str] | None,
        kept: Sequence[Kept],
    ) -> Walk[Births]:  # fmt: skip
        """What lies between a step and the next one; returns who takes part in that."""
        used = ledger.outcome(names)
        is_void = step.is_void or ledger.is_void(names)
        births_now, is_wanted, is_void = yield from self._meet(ledger, sampler, is_void=is_void)
        if is_void and kept:
            for one in kept:
                one.restore()
            sampler.load_state_dict(kept[0].place)
        else:
            counted = () if is_void else births_now if used is None else used
            for rank, birth in enumerate(births):
                if birth not in counted:
                    sampler.give_back(share(step.batch, rank, len(births)))
        if not (is_wanted and sampler.left):
            return births_now
        yield partial(self._change, ledger, sampler)
        return self._comm.births

    def _meet(self, ledger: Ledger, sampler: ElasticSampler, *, is_void: bool) -> Walk[tuple[Births, bool, bool]]:
        """The boundary between two steps.

        Returns:
            Who takes part in the next one, whether the first has a plan, and whether the last one ``is_void`` anywhere.
        """
        where = _number_of([ledger.step, sampler.state_dict()])
        self._asked.look(self._comm.current)
        is_wanted = self._asked.is_wanted(self._comm.current)
        mine = np.array([1, where >> 16, where & 0xFFFF, is_wanted, is_void], np.int64)
        count, high, low, wanted, void = (yield mine).tolist()
        if ledger.is_changing:
            yield ledger.settled
        contributors = ledger.end_step()
        if (high, low) != (count * int(mine[1]), count * int(mine[2])):
            raise CollectiveMismatch(
                f"the ranks are not at one place: this one begins step {self._number()} with {sampler!r}, another does"
                " not; all ranks make the same calls with equal samplers", key=BOUNDARY,
            )  # fmt: skip
        return contributors, wanted > 0, void > 0

    async def _change(self, ledger: Ledger, sampler: ElasticSampler) -> None:
        """Carry out what the first rank has found to be wanted: all know of it, or none does."""
        comm = self._comm
        mine = self._asked.plan(comm.current) if comm.rank == 0 else NO_PLAN
        try:
            plan = Plan.of(await comm.broadcast_object(mine, 0, "kfcomm/plan"))
        except PeerLost:
            return
        if plan == NO_PLAN:
            return
        steps = ledger.step
        try:
            await ledger.change(plan)
        except EpochChanged:
            if not ledger.is_released:
                raise
            return
        self._earlier += steps  # the ledger counts from 0 now, as that of newcomers does
        self._asked.done(plan)
        if plan.joiners:
            having = tuple(birth for birth in comm.births if birth not in {one.birth for one in plan.joiners})
            await self._handover().carry_out([self._earlier, sampler.state_dict()], having)

    async def _part(self) -> None:
        """All ranks leave together, or go on until they can: nobody needs another any more."""
        ledger = self._open()
        await self._finish_calls(ledger)
        while not await ledger.part():
            await ledger.settled()


def following(walk: Walk[None], met: Any) -> Wanted | None:
    """What comes next, given the sums that were asked for; None at the end."""
    try:
        return walk.send(met)
    except StopIteration:
        return None


def _number_of(value: Any) -> int:
    """32 bits that stand for it."""
    return int.from_bytes(hashlib.blake2b(msgpack.packb(value), digest_size=4).digest(), "little")
