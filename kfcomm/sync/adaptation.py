"""The blocking form of ``kfcomm.adapt.Adaptation``: the same one, on the I/O thread of its communicator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from kfcomm.adapt import Adaptation as Async
from kfcomm.adapt import Decision, Policy, StepMeter, StepMetrics
from kfcomm.sync.communicator import Communicator
from kfcomm.sync.skin import Skin


class Adaptation(Skin[Async]):
    """Policies that watch a program's steps and change its communication. See ``kfcomm.adapt.Adaptation``.

    ::

        with kfcomm.sync.Adaptation(comm, [AutoStrategy(("ring", "star"))]) as adaptation:
            for batch in batches:
                with adaptation.step():
                    ...                              # the collectives of a step

    The policies' methods run on the I/O thread, so they must not block.
    """

    def __init__(
        self, comm: Communicator, policies: Sequence[Policy], *, every: int = 1, meter: StepMeter | None = None
    ) -> None:
        inner = comm._io.run(Async, comm._inner, policies, every=every, meter=meter)
        super().__init__(comm._driver, inner, comm._inner)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """Those that are not switched off."""
        return self._inner.policies

    @property
    def decisions(self) -> list[Decision]:
        """What was decided, with the evidence; the same on every rank."""
        return self._inner.decisions

    @property
    def metrics(self) -> StepMetrics | None:
        """Of the last step at whose end the ranks met; None before."""
        return self._inner.metrics

    @property
    def num_steps(self) -> int:
        """Steps that have ended."""
        return self._inner.num_steps

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step of the program. See ``kfcomm.adapt.Adaptation.step``."""
        self._check_open()
        begun = self._io.wait_for(self._inner.begin)
        try:
            yield
        except BaseException as error:
            self._io.run(self._inner.give_up, error)
            raise
        self._io.wait_for(lambda: self._inner.end(begun))

    def start(self) -> None:
        """Meet the other ranks, and call ``on_start``. See ``kfcomm.adapt.Adaptation.start``."""
        self._check_open()
        self._io.wait_for(self._inner.start)

    def close(self) -> None:
        """Call ``on_end``, and meet no more."""
        if not self._io.is_inherited and not self._io.is_stopped:
            self._io.wait_for(self._inner.close)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
