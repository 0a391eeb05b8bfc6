"""Elastic training loop: steps with one state and one order of samples, between which ranks may join or leave."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from kfcomm.elastic.call_log import BOUNDARY
from kfcomm.elastic.checkpoint import Checkpoint
from kfcomm.elastic.communicator import ElasticCommunicator
from kfcomm.elastic.course import KEEP, ROLL_BACK, Step
from kfcomm.elastic.dispatcher import Dispatcher
from kfcomm.elastic.joining import Entrance, Handover, program_digest
from kfcomm.elastic.replicas import Replicas
from kfcomm.elastic.requests import SizeRequests
from kfcomm.elastic.sampler import ElasticSampler
from kfcomm.elastic.state import State, has_per_rank
from kfcomm.elastic.walks import Walk, Walks, following
from kfcomm.errors import ConfigError

ON_LOSS = ("finish", "raise", "restart_step")
"""Handling of a step during which a rank is lost."""


class Elastic:
    """Training that continues when a rank dies.

    ::

        state = kfcomm.elastic.State(weights=weights)
        async with kfcomm.init(elastic=True) as comm:
            async with kfcomm.elastic.Elastic(comm, state) as elastic:
                sampler = kfcomm.elastic.ElasticSampler(len(data), batch=256)
                async for step in elastic.steps(sampler):
                    gradient = await comm.all_reduce(gradient_of(state, step.indices), name="g", op="avg")
                    state.weights -= rate * gradient

    On entering, all ranks take over the state of the lowest rank. Ranks join and leave between steps only. If a rank
    dies during a step, the others wait only until they have agreed on that. What it contributed to a call is in the
    result of all ranks, or of none; the samples that it would have trained on are given again later in the pass.

    Over ``kfcomm.sync.init(elastic=True)`` it is the blocking ``kfcomm.sync.Elastic``.

    Arguments that differ between ranks are an error on all ranks, on entering.

    Args:
        comm: communicator of all ranks, made with ``elastic=True``.
        state: state that is the same on all ranks between steps.
        on_loss: handling of a call that no rank has finished when a rank is lost during the step; what any rank has
            finished, all finish. ``"finish"``: the remaining ranks repeat it, inside the same call. ``"raise"``: it
            raises ``EpochChanged`` on all, as does each later call of the step, and the samples of the step are given
            again later in the pass. ``"restart_step"``: the step is repeated with the same batch, and with the state
            at its beginning, which costs a copy of it; the body of the loop is below ``with step:``.
        checkpoint: path of a file for the loss of all ranks, which the first rank writes in the background. If the file
            exists on entering, all ranks resume from it: with its state, and each sampler at its position. If the rank
            that reads it is lost meanwhile, another one reads it. Either all ranks give a path, or none does.
        checkpoint_every: number of steps from one checkpoint to the next.
        own: local state of this rank, such as its part of an optimizer's state. Its shapes may differ between ranks. It
            is used by ``commit`` and when steps are repeated only.
        copies: number of other ranks that hold a replica of ``own`` after a ``commit``: as many may die at once without
            a loss of it.

    Raises:
        ConfigError: an argument is not valid.
    """

    def __new__(cls, comm: Any, state: State, **options: Any) -> Any:
        """Make the blocking form over a blocking communicator."""
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
        if own is not None and has_per_rank(own):
            raise ConfigError("own is of one rank, and not converted: give values without PerRank")
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
        self._requests = SizeRequests()
        self._walks: Walks | None = None

    @property
    def is_released(self) -> bool:
        """Whether a change of size has released this rank: its loop has ended, and it has to close."""
        return self._calls is not None and self._calls.recovery.is_released

    @property
    def num_changes(self) -> int:
        """Number of changes of the ranks while it was open."""
        return 0 if self._calls is None else self._calls.recovery.num_changes

    @property
    def paused_s(self) -> float:
        """Total time that calls have waited for changes of the ranks, in seconds."""
        return 0.0 if self._calls is None else self._calls.recovery.paused_s

    @property
    def is_replaying(self) -> bool:
        """Whether this rank has joined, or resumes from a checkpoint, and has not reached the steps to resume.

        Until then ``steps`` gives no step of loops that are finished. The program has to skip its work between loops
        over steps meanwhile: calls of all ranks, and changes of the state.
        """
        return self._walks is not None and self._walks.is_replaying

    async def __aenter__(self) -> Self:
        """Take over the state of the lowest rank, or of the checkpoint.

        Raises:
            ConfigError: the states of the ranks differ in more than their values, or their arguments differ; the text
                says how. Or the checkpoint cannot be read, or does not fit the state; or the ranks see different
                checkpoints; or all ranks that saw it are lost. On all ranks.
        """
        self._calls = calls = self._comm.begin(finishes=self._on_loss == ON_LOSS[0])
        self._comm.elastic = self
        if self._own is not None:
            self._replicas = Replicas(self._comm, calls, self._own, self._copies)
        network = self._comm.current._session.network
        # Only the first Elastic of a rank that has joined enters one that trains already.
        num_old, network.num_old = network.num_old, 0
        handover = Handover(self._comm, calls, self._state, self._program, self._options)
        states, restarts = (self._state, self._own), self._on_loss == "restart_step"
        self._walks = Walks(handover, self._requests, states, self._checkpoint, restarts=restarts)
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
        if self._walks is not None:
            self._walks.close()
        if self._checkpoint is not None:
            await self._checkpoint.close()

    # ---------------------------------------------------------------- rank-local state

    async def commit(self) -> bool:
        """Replicate this rank's ``own`` on other ranks; all ranks call it, at one place in their steps.

        If ranks die meanwhile, the commit is complete on all surviving ranks, with the state of the dead ones, or it is
        dropped on all, and the previous commit stands. After a loss there are fewer replicas until the next commit.

        Returns:
            Whether it is complete; the same on all ranks.

        Raises:
            ConfigError: this ``Elastic`` has no ``own``, or is not open; or the state of a rank cannot be sent, or
                read: on all ranks.

        Cost: a copy of ``own``, ``copies`` messages of it, and two small gathers. Twice that memory.
        """
        return await self._committed().commit()

    def restore(self) -> None:
        """Restore this rank's ``own`` from the last complete ``commit``.

        Raises:
            ConfigError: no commit is complete; or the arrays have other shapes by now; or as for ``commit``.
        """
        self._committed().restore()

    @property
    def heirs(self) -> dict[int, int | None]:
        """Uid of the heir of each rank that took part in the last complete ``commit`` and is lost, by its uid.

        The heir holds a replica; None where all holders are lost, too. It changes between steps only, is the same on
        all ranks that took part, and is empty after the next complete ``commit``.
        """
        return {} if self._replicas is None else self._replicas.heirs()

    @property
    def inherited(self) -> dict[int, dict[str, Any]]:
        """Committed values of ``own`` of each rank to which this rank is heir, by uid and name; NumPy arrays."""
        return {} if self._replicas is None else self._replicas.inherited()

    def _committed(self) -> Replicas:
        self._open()
        if self._replicas is None:
            raise ConfigError("nothing is this rank's own: give Elastic(..., own=State(...))")
        return self._replicas

    # ---------------------------------------------------------------- copies in memory

    def keep(self) -> None:
        """Copy the state, and the positions of samplers, in memory at the boundary after this step.

        All ranks call it in the same step, in the body of its loop; in nested loops it is done after the outer step,
        and where the loop is left, before the next one or at the end of the ``with`` block. It
        replaces the copy before. Ranks that join later get it with the state. It does not hold ``own``. In a step that
        is void because a rank was lost, the call does nothing.

        Raises:
            ConfigError: no step is under way.

        Cost: a copy of the state, and its memory.
        """
        self._walking().wish(KEEP)

    def roll_back(self) -> None:
        """Return to the copy of ``keep`` at the boundary after this step; all ranks call it in the same step.

        If the loop is left in this step, that is done before the next one, or at the end of the ``with`` block.
        Samplers return to their positions and batch sizes, so that samples used since then are used again; those that
        were set aside stay so. Numbers of steps count on. In a step that is void because a rank was lost, the call does
        nothing.

        Raises:
            ConfigError: no step is under way; or ``keep`` was not called in an earlier step.
            CollectiveMismatch: only some ranks have called it; on all ranks, at the boundary.
        """
        self._walking().wish(ROLL_BACK)

    def _walking(self) -> Walks:
        self._open()
        if self._walks is None:
            raise ConfigError("use Elastic in a with block: it is not open")
        return self._walks

    # ---------------------------------------------------------------- steps

    async def steps(
        self, sampler: ElasticSampler, *, passes: int | None = None, used_in: str | Sequence[str] | None = None
    ) -> AsyncIterator[Step]:
        """Yield the steps of one pass, or of several; all ranks go through them together.

        A program may go through several samplers, in turns or one within a step of another; each has its own position.
        Ranks join and leave, and checkpoints are written, between steps of the outermost loop.

        Args:
            sampler: sampler, at the same position on all ranks.
            passes: number of complete passes of the sampler at which the loop ends, counting those before this rank
                joined, or of a checkpoint. If left out, the loop ends with the present pass.
            used_in: name, or names, of the calls by which samples count as used; all calls of the step, if left out.
                Samples of a rank that died before it contributed to all of these calls are given again, and the samples
                of the whole step where one of these calls has failed on all ranks.

        Raises:
            ConfigError: this ``Elastic`` is not open; or the state of a rank cannot be sent; or this rank has joined
                and makes other calls than the others. On all ranks, at the end of the first step with calls that
                survive a loss: no such call has a name of ``used_in``.
            CollectiveMismatch: the ranks are at different steps, or gave other samplers or arguments; with the ranks.
        """
        walk, met = self.walk(sampler, passes=passes, used_in=used_in), None
        while (wanted := following(walk, met)) is not None:
            met = None
            if isinstance(wanted, Step):
                yield wanted
            else:
                met = await self._obtained(wanted)

    def walk(self, sampler: ElasticSampler, *, passes: int | None, used_in: str | Sequence[str] | None) -> Walk[None]:
        """Yield the steps, and the work and waits between them, which the driver carries out."""
        self._open()
        if self._walks is not None:
            yield from self._walks.through(sampler, passes=passes, used_in=used_in)

    async def _obtained(self, wanted: Any) -> Any:
        """Sum an array over all ranks, or await something."""
        if isinstance(wanted, np.ndarray):
            return await self._open().begin("all_reduce", (wanted, BOUNDARY), {})
        await wanted()
        return None

    def _open(self) -> Dispatcher:
        if self._calls is None or self._comm._calls is not self._calls:
            raise ConfigError("use Elastic in a with block: it is not open")
        return self._calls

    async def _part(self) -> None:
        """Leave together with all ranks, so that none needs another afterwards."""
        calls = self._open()
        if self._walks is not None:
            walk, met = self._walks.leave(), None
            while (wanted := following(walk, met)) is not None:
                met = await self._obtained(wanted)
        while not await calls.recovery.leave():
            await calls.recovery.settled()
