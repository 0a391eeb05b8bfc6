"""Blocking form of ``kfcomm.adapt.Adaptation``, which runs on the I/O thread of its communicator."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

from kfcomm.adapt import Adaptation as Async
from kfcomm.adapt import Decision, Hyperparameters, Policy, StepMeter, StepMetrics
from kfcomm.adapt.guarded import ElasticStep, Exchange, GuardedCall, StepGuard
from kfcomm.errors import EpochChanged, KfcommError, PeerLost, StepVoid
from kfcomm.sync.adapter import Adapter
from kfcomm.sync.communicator import Communicator
from kfcomm.sync.driver import outermost


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


class Adaptation(Adapter[Async]):
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

    @property
    def policies(self) -> tuple[Policy, ...]:
        """Policies in force: all but those that are switched off."""
        return self._inner.policies

    @property
    def decisions(self) -> list[Decision]:
        """Decisions so far, each with its evidence; the same on every rank."""
        return self._inner.decisions

    @property
    def metrics(self) -> StepMetrics | None:
        """Metrics of the latest step at whose end the ranks met; None before the first."""
        return self._inner.metrics

    @property
    def num_steps(self) -> int:
        """Steps that have ended."""
        return self._inner.num_steps

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Hyperparameters in force; the same object for as long as nothing changes."""
        return self._inner.hyperparameters

    @property
    def batch_size(self) -> int | None:
        """Samples of a step, over all ranks; None if the program gave no batch size."""
        return self._inner.batch_size

    @property
    def local_batch_size(self) -> int | None:
        """This rank's share of the batch."""
        return self._inner.local_batch_size

    @property
    def learning_rate(self) -> float | None:
        """Learning rate in force; None if the program gave no rate."""
        return self._inner.learning_rate

    @property
    def agreement(self) -> str | None:
        """Name of the algorithm by which the replicas agree; None if the program gave no name."""
        return self._inner.agreement

    @property
    def wire_dtype(self) -> str | None:
        """Dtype in which gradients travel."""
        return self._inner.wire_dtype

    @property
    def num_samples(self) -> int:
        """Samples of all steps that count. See ``kfcomm.adapt.Context.num_samples``."""
        return self._inner.num_samples

    @property
    def is_over(self) -> bool:
        """Whether a policy has asked for the end of training; the same on all ranks after each step."""
        return self._inner.is_over

    def value(self, name: str) -> Any:
        """Value of a hyperparameter by its name, also of a free one. See ``kfcomm.adapt.Adaptation.value``."""
        return self._inner.value(name)

    def state_dict(self) -> Any:
        """State for a checkpoint. See ``kfcomm.adapt.Adaptation.state_dict``."""
        return self._inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Continue with a state, from the next step on. See ``kfcomm.adapt.Adaptation.load_state_dict``."""
        self._inner.load_state_dict(state)

    @outermost
    def observe(self, /, **values: float) -> None:
        """Share values that this rank has measured with the other ranks. See ``kfcomm.adapt.Adaptation.observe``."""
        self._inner.observe(**values)

    @property
    def guard(self) -> StepGuard:
        """Guard of the steps, for algorithms that reduce gradients. See ``Step.guarded``."""
        return self._inner.guard

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
