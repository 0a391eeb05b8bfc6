"""Per-name cached call plans.

A group caches one for each name in use. A call like the first one skips its checks, plan, names, signature and
deadlines. Any other call, and any unusual state, takes the full path, which alone reports what is wrong. Each cache
belongs to one strategy, and is found again when that strategy is set again.

Plans are compiled for verbs whose shapes every rank knows without messages, in calls with NumPy arrays and without a
wire dtype of their own. If calls of one name name different strategies, each strategy has its own plan. A plan has a
copy with the timeout and the priority of the latest call that gave one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from copy import copy
from functools import lru_cache, partial
from time import monotonic
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeAlias

import numpy as np

from kfcomm.arrays import address_of
from kfcomm.arrays.dtypes import fits
from kfcomm.collectives.slot_use import Over, SlotUse
from kfcomm.collectives.specs import SPECS, Arguments, Shape
from kfcomm.core.deadlines import first_due_s
from kfcomm.engine.memory import COPIED_NBYTES, Array
from kfcomm.engine.observer import BATCH
from kfcomm.engine.operation import Operation
from kfcomm.types import override

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfcomm.collectives.group import Group
    from kfcomm.collectives.handle import Handle
    from kfcomm.collectives.on_device.calls import CallPlan
    from kfcomm.collectives.on_device.repeated import Launched
    from kfcomm.collectives.on_device.verbs import DeviceVerbs
    from kfcomm.collectives.plans import Plan
    from kfcomm.collectives.specs import CallOptions

Begun: TypeAlias = "Operation | SlotUse | Over | Launched"
CompiledKey: TypeAlias = "str | tuple[str | None, str, bytes] | tuple[str, ...] | None"
"""Name of the calls of a cached plan; with name and digest of their strategy, if they have one of their own. Of a
mapping without a name, the names of its arrays."""
NO_ARRAY: Final = np.empty(0, np.uint8)
"""In place of the array of a verb that takes none."""

NOT_ALIKE: Final = object()
"""In place of a result: the call is not like the one before it, and nothing has begun."""

MAX_NAMES = 1 << 14
"""Cached names of a group, half a KiB each; with more, most are used once."""


class Compiled(ABC):
    """Cached plan of the calls under one name; ``arguments`` and ``plan`` are those of the first use.

    ``is_on_device``: for arrays on devices.
    """

    is_on_device: ClassVar = False
    __slots__ = (
        "_arguments", "_limited", "engine", "first_s", "group", "is_small", "is_whole", "nbytes", "operation",
        "priority", "series", "timeout_s", "work",
    )  # fmt: skip

    def __init__(self, group: Group, name: str | None, arguments: Arguments, plan: Plan) -> None:
        self.engine = group.engine
        self.group = group
        self.series = group.engine.router.series(group.view, name or "", plan.signature, plan.program, plan.sizes)
        self.work = plan.work
        self.timeout_s = group.timeout_s
        self.first_s = first_due_s(group.timeout_s, group.engine.deadlines.stall_after_s)
        self.is_small = False
        self.nbytes = 0
        self.is_whole = plan.program.num_slots == 1 and plan.work.is_partial_shared
        self.operation: Any = plan.operation.again
        self.priority = 0
        self._limited: tuple[tuple[float | None, int], Self] | None = None
        self._arguments = _shared(arguments)

    def limited(self, options: CallOptions) -> Self | None:
        """Return this plan with the timeout and the priority of a call; None if they need all checks.

        That of the latest call is kept: mostly all calls of a name have the same.
        """
        wanted = options.timeout_s, options.priority
        if self._limited is not None and self._limited[0] == wanted:
            return self._limited[1]
        self._limited = None  # which the copy would keep
        made = copy(self)
        made.priority = options.priority
        if wanted[0] is not None:
            made.timeout_s = wanted[0]
            made.first_s = first_due_s(wanted[0], self.engine.deadlines.stall_after_s)
        if made.priority and not self.engine.links.is_low_latency:
            self.engine.links.set_low_latency()
        self._limited = wanted, made
        return made

    def begin(self, handle: Handle[Any] | None, source: Array, result: Array, value: Any) -> Begun | None:
        """Begin a use; return None, with nothing begun, if anything is unusual. For the arguments see ``Operation``.

        Without a handle the caller has to poll the slot: see ``SlotUse``.
        """
        series = self.series
        slot = series.slot
        if slot is not None and not slot.is_dead:
            engine, key = self.engine, series.key
            # Any other use of the name, and any loss, needs the tables of the router, which report what is wrong.
            if not (key.begun or key.live or key.early or engine.unusual or engine.router.dead):
                seq = key.next_seq
                key.next_seq = seq + 1
                posted_s = monotonic()
                word = self.group.plans.first_word + seq * slot.num_words
                if slot.post(source, word):
                    engine.slots.wake(slot)
                if handle is not None:
                    use = SlotUse(self, slot, (seq, word, posted_s), handle, source, result, value)
                    use.begin()
                    return use
                if engine.observers is not None:
                    return SlotUse(self, slot, (seq, word, posted_s), None, source, result, value)
                # The first look of a blocking caller, written out: without a ``SlotUse``, which half of the calls need,
                # a call costs 110 of 500 bytecodes less.
                try:
                    is_over = slot.look(word, result)
                except Exception as error:  # noqa: BLE001  it ends this collective alone
                    use = SlotUse(self, slot, (seq, word, posted_s), None, source, result, value)
                    engine.failures.broke(use.enter().collective, error)
                    return use
                if not is_over:
                    return SlotUse(self, slot, (seq, word, posted_s), None, source, result, value)
                if slot.has_news:
                    engine.slots.wake(slot)
                slot.num_uses += 1
                if slot.outcome is not None:
                    value = slot.take_outcome(value)
                ended = engine.recorder.ended
                ended.append((series, seq, posted_s, monotonic(), self.nbytes))
                if len(ended) >= BATCH:
                    engine.recorder.settle()
                return Over((value,))
        operation = self.operation(self, handle, source, result, value)
        return operation if self.engine.post_again(series, self.group.plans.stamp, operation) else None

    @abstractmethod
    def start(self, x: Any, arguments: Arguments, out: Any, handle: Handle[Any] | None) -> Begun | None:
        """Begin a use with these arrays; return None, with nothing begun, if it is not like the first one.

        Without a handle the caller waits for the returned use.
        """

    @abstractmethod
    def is_like(self, x: Any, arguments: Arguments, out: Any) -> bool:
        """Whether a use with these arrays is like the first one, so that no check of the verb would refuse it."""

    @abstractmethod
    def use(self, x: Any, arguments: Arguments, out: Any) -> CompiledUse | None:
        """Return a plan bound to these arrays, or None if they are not like the first ones."""


class CompiledBarrier(Compiled):
    """Cached plan of a name without arrays."""

    __slots__ = ()

    @override
    def start(self, x: Any, arguments: Arguments, out: Any, handle: Handle[Any] | None) -> Begun | None:
        return self.begin(handle, NO_ARRAY, NO_ARRAY, None) if arguments == self._arguments else None

    @override
    def is_like(self, x: Any, arguments: Arguments, out: Any) -> bool:
        return arguments == self._arguments

    @override
    def use(self, x: Any, arguments: Arguments, out: Any) -> CompiledUse | None:
        return CompiledUse(self, None) if arguments == self._arguments else None


class CompiledName(Compiled):
    """Cached plan of a name with arrays.

    ``form``: dtype and shape of this rank's array in the first use, and shape of its result; None if it gets none.
    """

    __slots__ = ("_dtype", "_gets", "_input_at", "_is_flat", "_is_in_place", "_maker", "_shape")

    def __init__(
        self, group: Group, name: str | None, arguments: Arguments, plan: Plan,
        form: tuple[np.dtype[Any], Shape, Shape | None],
    ) -> None:  # fmt: skip
        super().__init__(group, name, arguments, plan)
        dtype, shape, gets = form
        nbytes = dtype.itemsize * math.prod(shape)
        self.nbytes = nbytes if gets is None else dtype.itemsize * math.prod(gets) or nbytes
        self.is_small = plan.program.num_slots == 1 and 0 < nbytes <= COPIED_NBYTES
        self._dtype = dtype
        self._shape = shape
        self._gets = gets
        self._is_flat = len(shape) == 1 and (gets is None or len(gets) == 1)
        spec = SPECS[arguments[0]]
        self._is_in_place = gets is not None and spec.in_place
        at = spec.input_at(group.view.rank, nbytes) if gets is not None and spec.is_stacked else None
        self._input_at = at  # in bytes, see `Posting`, where a result is larger than the input
        # One call either way, of something that is not Python: no test, no look-up of what is known.
        self._maker: Callable[[], Any] = NoneType if gets is None else _maker(gets, dtype)

    @override
    def start(self, x: Any, arguments: Arguments, out: Any, handle: Handle[Any] | None) -> Begun | None:
        if (
            arguments != self._arguments
            or x.dtype is not self._dtype
            or x.shape != self._shape
            or not x.flags.c_contiguous
        ):
            return None
        if out is None:
            try:
                value = self._maker()
            except MemoryError:  # the other ranks have to be told
                return None
        elif out is x and self._is_in_place and x.flags.writeable:
            value = x
        elif self._takes(x, out):
            value = None if self._gets is None else out
            if value is not None and value.ndim != 1:
                return self.begin(handle, x.reshape(-1), value.reshape(-1), value)
        else:
            return None
        if self._is_flat:
            return self.begin(handle, x, NO_ARRAY if value is None else value, value)
        return self.begin(handle, x.reshape(-1), NO_ARRAY if value is None else value.reshape(-1), value)

    @override
    def is_like(self, x: Any, arguments: Arguments, out: Any) -> bool:
        if arguments != self._arguments or x.dtype is not self._dtype or x.shape != self._shape:
            return False
        if not x.flags.c_contiguous:
            return False
        return out is None or (out is x and self._is_in_place and x.flags.writeable) or self._takes(x, out)

    @override
    def use(self, x: Any, arguments: Arguments, out: Any) -> CompiledUse | None:
        if not self.is_like(x, arguments, out):
            return None
        if self._gets is None:
            return CompiledUse(self, x)
        return CompiledUse(self, x, make=self._maker) if out is None else CompiledUse(self, x, out)

    def _takes(self, x: Array, out: Any) -> bool:
        """Whether a result can be made in ``out``, which is ignored where this rank gets none."""
        if self._gets is None:
            return True
        if type(out) is not np.ndarray or out.dtype is not self._dtype:
            return False
        if out.shape != self._gets and not fits(out.shape, self._gets):
            return False
        if not (out.flags.c_contiguous and out.flags.writeable):
            return False
        # Two contiguous arrays share memory if their bounds do.
        return not np.may_share_memory(x, out) or self._input_at == address_of(x) - address_of(out)


class CompiledCall(Compiled):
    """Cached plan of a name with arrays on devices; ``devices`` begins its calls.

    ``gets`` is the shape of this rank's result; None if it gets none.
    """

    is_on_device = True
    __slots__ = ("_gets", "_plan", "devices")

    def __init__(
        self, group: Group, arguments: Arguments, plan: CallPlan, devices: DeviceVerbs, gets: Shape | None
    ) -> None:
        super().__init__(group, plan.order.key or None, arguments, plan.plan)
        self._plan = plan
        self.devices = devices
        self._gets = gets

    def call(self, x: Any, arguments: Arguments, out: Any, handle: Handle[Any]) -> bool:
        """Begin a use with these arrays; return False, with nothing begun, if it is not like the first one."""
        if arguments != self._arguments:
            return False
        devices, order = self.devices, self._plan.order
        try:
            given = devices.given_again(x, out, order.kind, self._gets)
            if given is None:
                return False
            buffers = devices.buffers((given,), first_of)
        except Exception:  # noqa: BLE001  all checks find the same again, and tell the other ranks
            return False
        call, is_free = devices.add(self._plan, buffers, handle)
        # The device may not be done with the call before, whose handle is: that is not unusual.
        if not call.post_again(self):
            call.post(None, overlapping=order.overlapping or is_free)
        return True

    @override
    def start(self, x: Any, arguments: Arguments, out: Any, handle: Handle[Any] | None) -> Begun | None:
        return None  # an array in host memory

    @override
    def is_like(self, x: Any, arguments: Arguments, out: Any) -> bool:
        return False  # while a strategy is being agreed, each call is checked in full

    @override
    def use(self, x: Any, arguments: Arguments, out: Any) -> CompiledUse | None:
        return None  # a start of a persistent collective calls the verb, which finds this plan

    @override
    def limited(self, options: CallOptions) -> None:
        return None


def first_of(results: list[Any]) -> Any:
    """The result of a call with one array."""
    return results[0]


class CompiledUse:
    """Cached plan together with its arrays, for starts that check nothing and look nothing up.

    ``value`` is the caller's result: None where this rank gets no result, or where ``make`` creates an array for each.
    """

    __slots__ = ("_maker", "_name", "_result", "_source", "_value")

    def __init__(
        self, name: Compiled, x: Array | None, value: Array | None = None, *, make: Callable[[], Array] | None = None
    ) -> None:
        self._name = name
        self._source = NO_ARRAY if x is None else x.reshape(-1)
        self._value = value
        self._result = NO_ARRAY if value is None else value.reshape(-1)
        self._maker = make

    def start(self, handle: Handle[Any] | None) -> Begun | None:
        """Begin a use; return None, with nothing begun, if anything is unusual."""
        if self._maker is None:
            return self._name.begin(handle, self._source, self._result, self._value)
        try:
            value = self._maker()
        except MemoryError:  # the other ranks have to be told
            return None
        return self._name.begin(handle, self._source, value.reshape(-1), value)


# Of ten thousand names most are of a few kinds: what they have in common is one object, for the garbage collector too.


@lru_cache(256)
def _shared(arguments: Arguments) -> Arguments:
    return arguments


@lru_cache(4096)
def _maker(shape: Shape, dtype: np.dtype[Any]) -> Callable[[], Any]:
    return partial(np.empty, shape, dtype)
