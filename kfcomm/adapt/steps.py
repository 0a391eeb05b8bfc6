"""One step of a program with policies."""

from __future__ import annotations

from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kfcomm.adapt.guarded import ElasticStep, Exchange, GuardedCall
from kfcomm.adapt.metrics import Reading
from kfcomm.errors import ConfigError, StepVoid

if TYPE_CHECKING:
    from kfcomm.adapt.adaptation import Adaptation


class Step:
    """One step of an ``Adaptation``: ``async with``, once."""

    def __init__(self, adaptation: Adaptation, step: ElasticStep | None = None) -> None:
        self._adaptation = adaptation
        self._step = step
        self._begun: Reading | None = None

    @property
    def is_void(self) -> bool:
        """Whether the step counts for nothing; the same on all ranks, once its gradients are exchanged."""
        return self._adaptation.guard.void is not None

    async def guarded(
        self, gradients: Any, *, loss: Any = None, way: Any = None, op: Any = "avg", name: str = "guarded",
        wire_dtype: Any = None,
    ) -> Any:  # fmt: skip
        """Exchange gradients; if `GuardSteps` is among the policies, judge the step by those of all ranks before.

        All ranks call it, once in a step. A void step ends here on all ranks: the rest of the block is skipped, and the
        program continues after it, with ``is_void``. In an ``Elastic`` (``adaptation.step(step)``) the samples are
        given again. An error of ``GuardSteps(catch=...)`` that the block raises before makes the step void, too.

        Args:
            gradients: a tree of arrays in host memory, of this rank.
            loss: of this rank: a number, or an array of one; None to judge by gradients only.
            way: algorithm of ``kfcomm.train``, whose ``gradients`` is used; None for ``all_reduce_many``.
            op: of ``all_reduce_many``: ``"avg"``, ``"sum"`` or ``"adasum"``.
            name: of the calls, for ``used_in``.
            wire_dtype: of ``all_reduce_many``.

        Returns:
            A tree like ``gradients``, to apply.

        Raises:
            ConfigError: gradients of this step were exchanged already; or an argument is not valid.
            GuardFailed: no good step for long; see `GuardSteps`.
            CollectiveMismatch: the ranks have unlike options of `GuardSteps`, or give unlike arrays.
            CollectiveError: an exchange failed.

        Cost: a pass over the gradients; ``20 n`` bytes in a collective that is made anyway. With a ``wire_dtype``, or
        an algorithm other than ``SynchronousSGD``, a small ``all_reduce`` before. A void step, and the first step of
        new ranks, cost one small gather.
        """
        call = GuardedCall(way, op, name, wire_dtype)
        return await self._carried(self._adaptation.guard.exchange(gradients, loss, call))

    async def _carried(self, exchange: Exchange) -> Any:
        advance = partial(next, exchange)
        while True:
            try:
                begin = advance()
            except StopIteration as end:
                return end.value
            try:
                result = await begin(self._adaptation.comm)
            except BaseException as error:  # noqa: BLE001  the exchange gets it, and raises it or another
                advance = partial(exchange.throw, error)
            else:
                advance = partial(exchange.send, result)

    async def __aenter__(self) -> Self:
        if self._begun is not None:
            raise ConfigError("a step is entered once: call step() for each")
        self._begun = await self._adaptation.begin(self._step)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._begun is None:
            return False
        if error is not None and self._adaptation.guard.catches(error):
            try:
                await self._carried(self._adaptation.guard.failed(error))
            except BaseException as other:
                error = other
                if not isinstance(other, StepVoid):
                    await self.end(other)
                    raise
        return await self.end(error)

    async def end(self, error: BaseException | None) -> bool:
        """End the step after its block; returns whether its error is a void step, which the block ends silently."""
        if self._begun is None:
            return False
        if error is None or (isinstance(error, StepVoid) and self.is_void):
            await self._adaptation.end(self._begun)
        else:
            await self._adaptation.end_badly(self._begun, error)
        return isinstance(error, StepVoid) and self.is_void

    def give_up(self, error: BaseException) -> None:
        """End a step that has failed on this rank, without waiting."""
        if self._begun is not None:
            self._adaptation.give_up(error)
