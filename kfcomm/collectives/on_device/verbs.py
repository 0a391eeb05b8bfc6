"""Verbs on device memory: arguments are checked and turned into calls of this group's path.

Invariants: a call has its place in the program at once, even if the device is busy; the host never waits for the
device. In a group with and without devices, arrays of the host come here too, since others may be on devices.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kfcomm.arrays import HostArray
from kfcomm.arrays.on_device import DeviceArray, is_on_device
from kfcomm.collectives.compiled import first_of
from kfcomm.collectives.group import UNNAMED
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.on_device.calls import CallPlan, DeviceBuffers, DeviceCall, DeviceOrder
from kfcomm.collectives.on_device.given import AnyArray, AnyOut, GivenArrays
from kfcomm.collectives.plans import PlanKey
from kfcomm.collectives.specs import CallOptions, Shape
from kfcomm.errors import ConfigError
from kfcomm.transports.base import Part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfcomm.collectives.on_device.calls import Paths

logger = logging.getLogger("kfcomm")


class Given(NamedTuple):
    """One array of a call, the shape of its result (None if this rank gets none), and where that goes, if said."""

    array: AnyArray
    shape: Shape | None
    out: AnyOut | None = None


class DeviceVerbs:
    """The device of one rank in one group, and the calls that are under way there.

    ``lack``: see `GivenArrays`. ``mixed``: some rank of the group has no device, where others do.

    Attributes:
        has_news: the next call has an error of an earlier one to raise.
    """

    def __init__(self, paths: Paths, lack: str) -> None:
        self.mixed = paths.choice is not None and paths.choice.mixed
        self._group = paths.group
        self.size = paths.group.view.size
        self.reactor = paths.group.engine.reactor
        self.arrays = GivenArrays(paths, lack)
        self._paths = paths
        self._live: set[DeviceCall] = set()
        self._latest: dict[str, DeviceCall] = {}  # of each name in use
        self._late: BaseException | None = None
        self.has_news = False
        self._waiters: dict[asyncio.Future[None], Callable[[DeviceCall], bool]] = {}

    def takes(self, x: Any, stream: Any) -> bool:
        """Whether this array is to come here."""
        if self.mixed or stream is not None or type(x) is DeviceArray:
            return True
        return type(x) is not np.ndarray and type(x) is not HostArray and is_on_device(x)

    def refuse(self, what: str, xs: Iterable[Any], stream: Any) -> None:
        """Refuse arrays that are to come here, for calls that are made in host memory alone.

        Raises:
            ConfigError: one of them is on a device, or may be on another rank; ``what`` is not for these.
        """
        given = list(xs)
        if not any(self.takes(x, stream) for x in given):
            return
        text = f"{what} is for arrays in host memory"
        if self.mixed and stream is None and not any(map(is_on_device, given)):
            text += ", in groups whose ranks all have a device or all have none: here some have one, and could give"
            text += " arrays there; make a group of the ranks with a device, or of those without"
        raise ConfigError(text)

    def check(self, wire_dtype: Any) -> None:
        """Check the options and earlier failures, before each call.

        Raises:
            ConfigError: an option was given that is not for devices.
            CollectiveError: an earlier call has failed after its handle had resolved, and no call has raised that yet;
                the first such error, which causes the others. ``synchronize`` raises it again: later results are void
                as well.
        """
        if self._late is not None and self.has_news:
            self.has_news = False
            raise self._late
        if wire_dtype is not None:
            raise ConfigError("wire_dtype is for arrays in host memory, in groups whose ranks all have theirs there")

    # ---------------------------------------------------------------- calls

    def begin(
        self, order: DeviceOrder, given: Sequence[Given], outcome: Callable[[list[Any]], Any], options: CallOptions,
        handle: Handle[Any] | None = None,
    ) -> Handle[Any]:  # fmt: skip
        """Begin a call; the handle resolves when the result is ready on the caller's stream.

        Args:
            order: of the call.
            given: arrays of one memory.
            outcome: makes the caller's result of the results.
            options: of the call; its timeout and priority count here.
            handle: to be returned; a new one if left out.

        Raises:
            MemoryError: the device has no memory for the results.
            TransportError: the device has failed.
        """
        group, timeout_s = self._group, options.timeout_s
        buffers = self.buffers(given, outcome)
        made: Handle[Any] = Handle(loop=group.engine.loop) if handle is None else handle

        def post() -> None:
            seq = None if order.first is None else order.first.seq
            if made.cancelled():
                made.seq = group.refuse_now(order.key, asyncio.CancelledError(), seq=seq)
                self._paths.never_began(order.key, made.seq)
                return
            plan = self._paths.plan(order)
            call, is_free = self.add(plan, buffers, made, options.priority)
            call.post(timeout_s, overlapping=order.overlapping or is_free, seq=seq)
            if order.alike is not None and group.may_compile(call.plans):
                key = group.compiled_key(order.key or None, order.strategy)
                compiled = plan.path.batch_type if order.counts else plan.path.compiled_type
                if compiled is not None:
                    group.compiled[key] = compiled(group, order.alike, plan, self, given[0].shape)

        group.in_order(post)
        return made

    def buffers(self, given: Sequence[Given], outcome: Callable[[list[Any]], Any]) -> DeviceBuffers:
        """Memory of a call, and its place on the caller's stream."""
        first = given[0].array
        device, dtype = self.arrays.device_of(first), first.dtype
        stream = None if isinstance(first, HostArray) else first.stream
        targets: list[Any] = [
            None if shape is None else out.flat if out is not None else device.empty(math.prod(shape), dtype, stream)
            for _, shape, out in given
        ]
        parts = tuple(Part(one.array.flat, target) for one, target in zip(given, targets, strict=True))

        def results() -> Any:
            return outcome(
                [
                    None if shape is None else out.finish() if out is not None else array.restore(target, shape)
                    for (array, shape, out), target in zip(given, targets, strict=True)
                ]
            )

        return DeviceBuffers(device, stream, device.mark(stream), parts, results)

    def add(
        self, plan: CallPlan, buffers: DeviceBuffers, handle: Handle[Any], priority: int = 0
    ) -> tuple[DeviceCall, bool]:
        """A call that is to be posted now, and whether its name is free for it."""
        call = DeviceCall(self._group, plan, buffers, handle, self._ended, priority)
        # A name is free again when its handle is done, which is before the device is.
        earlier = self._latest.get(call.key)
        self._live.add(call)
        self._latest[call.key] = call
        return call, earlier is None or earlier.is_enqueued or earlier.is_over

    def known(self, plan: CallPlan, buffers: DeviceBuffers, handle: Handle[Any]) -> DeviceCall:
        """A call that was launched, or refused, as a use of a cached name."""
        call = DeviceCall(self._group, plan, buffers, handle, self._ended)
        self._live.add(call)
        self._latest.setdefault(call.key, call)
        return call

    def given_again(self, x: Any, out: Any, kind: PlanKey, shape: Shape | None) -> Given | None:
        """An array for the next call under a cached name; None if it is another kind of array, or has news to raise."""
        array = self.arrays.read(x, None)
        if array.dtype != kind.dtype or array.shape != kind.shape or self.has_news:
            return None
        return None if isinstance(array, HostArray) and not self.mixed else self.given(array, shape, out)

    def given(self, array: AnyArray, shape: Shape | None, out: Any) -> Given:
        """One array, with where its result goes if the caller says so and this rank gets one."""
        return Given(array, shape, None if shape is None else self.arrays.out(out, array, shape))

    def one(
        self, order: DeviceOrder, array: AnyArray, shape: Shape | None, options: CallOptions,
        handle: Handle[Any] | None = None,
    ) -> Handle[Any]:  # fmt: skip
        """Begin a call with one array, and a result of ``shape``, if that is given."""
        return self.begin(order, [self.given(array, shape, options.out)], first_of, options, handle)

    def refused(self, name: str | None) -> None:
        """Note a call that was refused on this rank, under its name and its next number."""
        key, group = name or UNNAMED, self._group
        group.in_order(lambda: self._paths.never_began(key, group.last_seq(key)))

    # ---------------------------------------------------------------- the end of calls

    def _ended(self, call: DeviceCall, late: BaseException | None) -> None:
        self._live.discard(call)
        if self._latest.get(call.key) is call:
            del self._latest[call.key]
        if late is not None and not self.has_news:
            mine = self._group.view.called(self._group.view.rank)
            logger.error("%s failed on %s after its handle was done: %s", call.title, mine, str(late))
            self._late, self.has_news = late, True
        self.settled()

    def settled(self) -> None:
        """Tell those who wait, if nothing that they wait for is left."""
        for waiter, counts in list(self._waiters.items()):
            if waiter.done() or not self._are_under_way(counts):
                del self._waiters[waiter]
                if not waiter.done():
                    waiter.set_result(None)

    def _are_under_way(self, counts: Callable[[DeviceCall], bool]) -> bool:
        return any(map(counts, self._live)) or self._paths.num_launched > 0

    def _wait(self, counts: Callable[[DeviceCall], bool]) -> asyncio.Future[None] | None:
        """Future done when all calls that count are over; None if they are."""
        if not self._are_under_way(counts):
            return None
        waiter: asyncio.Future[None] = self._group.engine.loop.create_future()
        self._waiters[waiter] = counts
        self._paths.hurry()
        return waiter

    def drained(self) -> asyncio.Future[None] | None:
        """Future done when the device has made every result that a handle has resolved with; None if it has."""
        return self._wait(lambda call: call.is_enqueued)

    async def synchronize(self) -> None:
        """Wait until all calls are over; raise an error that was not raised yet."""
        waiter = self._wait(lambda _: True)
        if waiter is not None:
            await waiter
        error, self._late, self.has_news = self._late, None, False
        if error is not None:
            raise error
