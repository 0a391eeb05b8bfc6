"""The host's collective that carries a segment of a device call, in place in a block of host memory.

Its plan is cached by the call's name and the number of elements, as for arrays of the host: from the second use on it
begins as one of those does, most often in a slot of shared memory, if nothing is unusual.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kfcomm.collectives.compiled import NO_ARRAY, Begun, Compiled, CompiledUse
from kfcomm.collectives.specs import SPECS, Arguments
from kfcomm.core.collective import shown
from kfcomm.core.deadlines import NEVER
from kfcomm.engine.memory import COPIED_NBYTES
from kfcomm.errors import InternalError
from kfcomm.types import override

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfcomm.collectives.group import Group
    from kfcomm.collectives.handle import Handle
    from kfcomm.collectives.on_device.calls import DeviceCall
    from kfcomm.collectives.on_device.segments import Segment
    from kfcomm.collectives.on_device.staged import StagedPath
    from kfcomm.collectives.plans import Plan, Plans
    from kfcomm.core.collective import GroupView
    from kfcomm.transports.reactor import Reactor

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class Carried:
    """In place of the future of an operation: calls back from the reactor, once, with the error or None."""

    __slots__ = ("_reactor", "_then", "operation")

    def __init__(self, reactor: Reactor, then: Callable[[BaseException | None], None]) -> None:
        self._reactor = reactor
        self._then: Callable[[BaseException | None], None] | None = then
        self.operation: Any = None

    def done(self) -> bool:
        """Whether it is over."""
        return self._then is None

    def set_result(self, _: Any) -> None:
        """Handle the completion of the operation."""
        self._over(None)

    def set_exception(self, error: BaseException) -> None:
        """Handle the failure of the operation; ignored if it is over."""
        self._over(error)

    def cancel(self) -> None:
        """End the operation everywhere."""
        if self.operation is not None:
            self.operation.cancel()

    def _over(self, error: BaseException | None) -> None:
        then, self._then = self._then, None
        if then is not None:
            self._reactor.call_soon(then, error)


class CarriedPlan:
    """The plan of the segments of one name that have so many elements.

    Its signature is that of the whole call, so that ranks that differ in the call notice, even if segments are alike.
    """

    def __init__(self, path: StagedPath, call: DeviceCall, count: int) -> None:
        kind = call.kind._replace(shape=(count,)) if SPECS[call.kind.verb].is_elementwise else call.kind
        plan, whole = call.plans.of(kind, call.key), call.signature
        signature = plan.signature._replace(shape=whole.shape, counts=whole.counts, memory=whole.memory)
        self._path = path
        self._plan = replace(plan, signature=signature)
        self._nbytes = count * call.kind.dtype.itemsize
        self._cached: _CachedFirst | None = None

    def post(self, carried: Carried, call: DeviceCall, segment: Segment, memory: Array) -> None:
        """Begin the collective of a segment whose turn has come; ``memory`` is its block."""
        path, plan = self._path, self._plan
        source = NO_ARRAY if segment.source is None else memory[segment.source]
        result = NO_ARRAY if segment.result is None else memory[segment.result]
        view, seq = path.number(call.head.seq, segment.index)
        is_usual = not (segment.index or call.priority) and call.plans is path.group.plans
        cached = self._cached
        if is_usual and cached is not None and cached.series.key.next_seq == seq:
            begun = cached.begin(carried, source, result, None)  # type: ignore[arg-type]
            if begun is not None:
                if not begun.is_over:
                    carried.operation = begun
                return
        if seq < path.engine.router.num_uses(view.id, call.key):
            raise InternalError(f"use {call.head.seq} of {shown(call.key)} began after a later one")
        operation = plan.operation(carried, source, result, plan.work, priority=call.priority)
        path.engine.post(plan.post(view, call.key, call.plans.generation, True, seq), operation, None)
        if not operation.is_over:
            carried.operation = operation
        if is_usual:
            self._cached = _CachedFirst(_Firsts(path.group, view), call.key, plan, self._nbytes)


class _Firsts:
    """The group of first segments, as far as cached plans ask for it: a part of a call has no deadline of its own."""

    __slots__ = ("_group", "engine", "timeout_s", "view")

    def __init__(self, group: Group, view: GroupView) -> None:
        self.engine = group.engine
        self.timeout_s = NEVER
        self.view = view
        self._group = group

    @property
    def plans(self) -> Plans:
        """Plans in force."""
        return self._group.plans


class _CachedFirst(Compiled):
    """Cached plan of first segments, which are begun by ``begin`` alone."""

    __slots__ = ()

    def __init__(self, group: Any, key: str, plan: Plan, nbytes: int) -> None:
        super().__init__(group, key, (), plan)
        self.nbytes = nbytes
        self.is_small = plan.program.num_slots == 1 and 0 < nbytes <= COPIED_NBYTES

    @override
    def start(self, x: Any, arguments: Arguments, out: Any, handle: Handle[Any] | None) -> Begun | None:
        return None

    @override
    def is_like(self, x: Any, arguments: Arguments, out: Any) -> bool:
        return False

    @override
    def use(self, x: Any, arguments: Arguments, out: Any) -> CompiledUse | None:
        return None
