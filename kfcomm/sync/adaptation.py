"""Blocking form of ``kfcomm.adapt.Adaptation``, which runs on the I/O thread of its communicator."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

from kfcomm.adapt import Adaptation as Async
from kfcomm.adapt import Hyperparameters, Policy, StepMeter
from kfcomm.adapt.guarded import ElasticStep, Exchange, GuardedCall
from kfcomm.errors import EpochChanged, KfcommError, PeerLost, StepVoid
from kfcomm.sync.adapter import forward
from kfcomm.sync.communicator import Communicator
from kfcomm.sync.driver import outermost
from kfcomm.sync.members import AdaptationMembers

forward(
    AdaptationMembers, Async, "policies", "decisions", "metrics", "num_steps", "hyperparameters", "batch_size",
    "local_batch_size", "learning_rate", "agreement", "wire_dtype", "num_samples", "is_over", "value", "state_dict",
    "load_state_dict", "observe", "guard",
)  # fmt: skip


class Step:
    """One step of an ``Adaptation``: ``with``, once. See ``kfcomm.adapt.Step``."""

    def __init__(self, adaptation: Adaptation, step: ElasticStep | None) -> None:
        self._comm, self._io = adaptation._comm, adaptation._io
        self._guard = adaptation.guard
        self._inner = adaptation._inner.step(step)

    @property
    def is_void(self) -> bool:
        """Whether the step counts for nothing; the same on all ranks, once its gradients are exchanged."""
        return self._inner.is_void

    def guarded(
        self, gradients: Any, *, loss: Any = None, way: Any = None, op: Any = "avg", name: str = "guarded",
        wire_dtype: Any = None,
    ) -> Any:  # fmt: skip
        """Exchange gradients, and judge the step by those of all ranks. See ``kfcomm.adapt.Step.guarded``."""
        return self._carried(self._guard.exchange(gradients, loss, GuardedCall(way, op, name, wire_dtype)))

    def _carried(self, exchange: Exchange) -> Any:
        # In the caller's thread: its collectives execute there, without a hand-over.
        advance = partial(next, exchange)
        while True:
            try:
                begin = advance()
            except StopIteration as end:
                return end.value
            try:
                made = begin(self._comm)
                result = made.wait() if hasattr(made, "wait") else made
            except BaseException as error:  # noqa: BLE001  the exchange gets it, and raises it or another
                advance = partial(exchange.throw, error)
            else:
                advance = partial(exchange.send, result)

    def __enter__(self) -> Self:
        self._io.wait_for(self._inner.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None and self._guard.catches(error):
            try:
                self._carried(self._guard.failed(error))
            except BaseException as other:
                error = other
                if not isinstance(other, StepVoid):
                    self._end(other)
                    raise
        return self._end(error)

    def _end(self, error: BaseException | None) -> bool:
        if error is None or isinstance(error, (StepVoid, PeerLost, EpochChanged)):
            return self._io.wait_for(partial(self._inner.end, error))
        self._io.run(self._inner.give_up, error)
        return False


class Adaptation(AdaptationMembers):
    """Policies that watch a program's steps and change its communication. See ``kfcomm.adapt.Adaptation``.

    ::

        with kfcomm.sync.Adaptation(comm, [AutoStrategy(("ring", "star"))]) as adaptation:
            for batch in batches:
                with adaptation.step():
                    ...                              # the collectives of a step

    The policies' methods run on the I/O thread, so they must not block.
    """

    def __init__(
        self, comm: Communicator, policies: Sequence[Policy], *, every: int = 1, meter: StepMeter | None = None,
        hyperparameters: Hyperparameters | None = None, record: str | os.PathLike[str] | None = None,
        rest: int = 10,
    ) -> None:  # fmt: skip
        make = partial(Async, every=every, meter=meter, hyperparameters=hyperparameters, record=record, rest=rest)
        try:
            inner = comm._io.run(make, comm._inner, policies)
        except KfcommError as error:
            raise comm._driver.shown(error)
        super().__init__(comm._driver, inner, comm._inner)
        self._check_open = comm._check_open  # of each epoch, where there are several
        self._comm = comm

    def step(self, step: ElasticStep | None = None) -> Step:
        """One step of the program. See ``kfcomm.adapt.Adaptation.step``."""
        self._check_open()
        return Step(self, step)

    @contextmanager
    def epoch(self) -> Iterator[None]:
        """One epoch: ``with adaptation.epoch(): ...`` around its steps. See ``kfcomm.adapt.Adaptation.epoch``."""
        epoch = self._inner.epoch()
        self._io.wait_for(epoch.__aenter__)
        try:
            yield
        except BaseException as error:
            self._io.wait_for(partial(epoch.__aexit__, type(error), error, None))
            raise
        self._io.wait_for(partial(epoch.__aexit__, None, None, None))

    @outermost
    def start(self) -> None:
        """Meet the other ranks, and call ``on_start``. See ``kfcomm.adapt.Adaptation.start``."""
        self._check_open()
        self._io.wait_for(self._inner.start)

    @outermost
    def close(self) -> None:
        """Call ``on_end`` and end the exchange with the other ranks."""
        if not self._io.is_inherited and not self._io.is_stopped:
            self._io.wait_for(self._inner.close)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._io.is_inherited and not self._io.is_stopped:
            self._io.wait_for(partial(self._inner.__aexit__, kind, error, trace))
