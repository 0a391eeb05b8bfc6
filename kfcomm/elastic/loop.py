"""Training in steps, between which the ranks may change: one state, one order of samples, whoever dies or joins."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from kfcomm.elastic.calls import BOUNDARY
from kfcomm.elastic.checkpoint import Checkpoint
from kfcomm.elastic.communicator import ElasticCommunicator
from kfcomm.elastic.dispatcher import Dispatcher
from kfcomm.elastic.joining import Entrance, Handover, program_digest
from kfcomm.elastic.replicas import Replicas
from kfcomm.elastic.requests import Requests
from kfcomm.elastic.sampler import ElasticSampler
from kfcomm.elastic.state import State
from kfcomm.elastic.steps import Step, Walk, following
from kfcomm.elastic.walks import Walks
from kfcomm.errors import ConfigError

ON_LOSS = ("finish", "raise", "restart_step")
"""What becomes of a step in whose midst a rank is lost."""


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

    Arguments that differ between ranks are told on entering, to all.

    Args:
        comm: of all ranks, made with ``elastic=True``.
        state: what the ranks have alike between steps.
        on_loss: what becomes of a call that no rank has finished when one is lost in the midst of a step. Whatever any
            rank has finished, all finish. With ``"finish"`` the others do it again among themselves, inside the same
            call. With ``"raise"`` it raises ``EpochChanged`` on all, as does each later call of the step; the samples
            of such a step come again later in the pass. With ``"restart_step"`` the step runs again, with the same
            batch and the state that it began with, of which a copy is kept: the body stands below ``with step:``.
        checkpoint: a file for the loss of all ranks, which the first rank writes in the background. If it is there on
            entering, all ranks go on from it: with its state, each sampler at its place. If the rank that reads it is
            lost meanwhile, another does. All ranks give one, or none.
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
        self._options = {
            "on_loss": on_loss, "checkpoint": "None" if checkpoint is None else "a path",
            "checkpoint_every": checkpoint_every, "own": "None" if own is None else "a State", "copies": copies,
        }  # fmt: skip
        self._copies = copies
        self._replicas: Replicas | None = None
        self._program = program_digest()
        self._calls: Dispatcher | None = None
        self._requests = Requests()
        self._walks: Walks | None = None

    @property
    def is_released(self) -> bool:
        """Whether this rank was taken away by a change of size: its loop has ended, and it is to close."""
        return self._calls is not None and self._calls.recovery.is_released

    @property
    def num_changes(self) -> int:
        """How often the ranks have changed while it was open."""
        return 0 if self._calls is None else self._calls.recovery.num_changes

    @property
    def paused_s(self) -> float:
        """For how long calls have waited for that, in seconds."""
        return 0.0 if self._calls is None else self._calls.recovery.paused_s

    @property
    def is_replaying(self) -> bool:
        """Whether this rank has joined, or all go on from a checkpoint, and it has not come to the steps to go on with.

        Until then ``steps`` through what the others have done give no step. What the program does between loops over
        steps is to be left out meanwhile: calls of all ranks, and changes of the state.
        """
        return self._walks is not None and self._walks.is_replaying

    async def __aenter__(self) -> Self:
        """Take the state of the lowest rank; or that of the checkpoint.

        Raises:
            ConfigError: the states, or arguments, of the ranks differ in more than their values; says how. Or the
                checkpoint cannot be read, or fits no state; or the ranks see different ones, or those are lost that saw
                it. On all ranks.
        """
        self._calls = calls = self._comm.begin(finishes=self._on_loss == ON_LOSS[0])
        if self._own is not None:
            self._replicas = Replicas(self._comm, calls, self._own, self._copies)
        network = self._comm.current._session.network
        num_old, network.num_old = network.num_old, 0
        handover = Handover(self._comm, calls, self._state, self._program, self._options)
        states, restarts = (self._state, self._own), self._on_loss == "restart_step"
        self._walks = Walks(self._comm, handover, self._requests, states, self._checkpoint, restarts=restarts)
        try:
            entrance = Entrance(self._comm.current, handover, self._checkpoint, self._options)
            place = await (entrance.join(num_old) if num_old else entrance.begin())
            self._walks.begin_at(place, is_joining=bool(num_old))
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

    async def _close(self) -> None:
        self._requests.close()
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
            ConfigError: there is no ``own``, or no open ``Elastic``; or what a rank has cannot be sent, or read, which
                is told to all.

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
        return {} if self._replicas is None else self._replicas.heirs()

    @property
    def inherited(self) -> dict[int, dict[str, Any]]:
        """What this rank is heir to, by birth: values of ``own`` by name as they were committed, arrays as NumPy's."""
        return {} if self._replicas is None else self._replicas.inherited()

    def _committed(self) -> Replicas:
        self._open()
        if self._replicas is None:
            raise ConfigError("nothing is this rank's own: give Elastic(..., own=State(...))")
        return self._replicas

    # ---------------------------------------------------------------- steps

    async def steps(
        self, sampler: ElasticSampler, *, passes: int | None = None, used_in: str | Sequence[str] | None = None
    ) -> AsyncIterator[Step]:
        """The steps of one pass, or of several; all ranks go through them together.

        A program may go through several samplers, in turns or one within a step of another; each has its own place.
        Ranks come and go, and checkpoints are written, between steps of the outermost loop.

        Args:
            sampler: on all ranks at the same place.
            passes: until so many are behind the sampler, whoever has gone through them: also those from which this rank
                has joined, or which a checkpoint holds. To the end of the present one, if left out.
            used_in: the name, or names, of the calls by which samples count as used; all calls of the step, if left
                out. Those of a rank that died before it had given to all of these are given again, and those of the
                whole step where one of these has failed on all ranks.

        Raises:
            ConfigError: there is no open ``Elastic``; or what the state holds cannot be sent, on any rank, or this
                rank has joined and makes other calls than the others. On all ranks, at the end of the first step with
                calls that outlive ranks: none of these has a name of ``used_in``.
            CollectiveMismatch: the ranks are not at the same step, or gave other samplers or arguments; names them.
        """
        walk, met = self.walk(sampler, passes=passes, used_in=used_in), None
        while (wanted := following(walk, met)) is not None:
            met = None
            if isinstance(wanted, Step):
                yield wanted
            else:
                met = await self._obtained(wanted)

    def walk(self, sampler: ElasticSampler, *, passes: int | None, used_in: str | Sequence[str] | None) -> Walk[None]:
        """The steps, and the work and waits between them, for the driver to carry out."""
        self._open()
        if self._walks is not None:
            yield from self._walks.through(sampler, passes=passes, used_in=used_in)

    async def _obtained(self, wanted: Any) -> Any:
        """The sums of an array over all ranks; or None, when what was to be awaited is over."""
        if isinstance(wanted, np.ndarray):
            return await self._open().begin("all_reduce", (wanted, BOUNDARY), {})
        await wanted()
        return None

    def _open(self) -> Dispatcher:
        if self._calls is None or self._comm._calls is not self._calls:
            raise ConfigError("use Elastic in a with block: it is not open")
        return self._calls

    async def _part(self) -> None:
        """All ranks leave together, or go on until they can: nobody needs another any more."""
        calls = self._open()
        if self._walks is not None:
            walk, met = self._walks.leave(), None
            while (wanted := following(walk, met)) is not None:
                met = await self._obtained(wanted)
        while not await calls.recovery.leave():
            await calls.recovery.settled()
