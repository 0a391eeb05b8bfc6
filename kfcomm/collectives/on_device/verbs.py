"""The verbs on device memory: arguments are checked and turned into calls of this group's path.

Invariants: a call has its place in the program at once, whatever the device is doing; the host never waits for the
device. In a group where some ranks have no device, arrays of the host come here too, since the others' may not be.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from kfcomm import arrays
from kfcomm.arrays import HostArray, OutArray, adapt, adapt_out, on_device
from kfcomm.arrays.devices import Device, Stream
from kfcomm.arrays.devices.host import HOST
from kfcomm.arrays.kinds import NUMPY, ArrayKind, host_kind_of
from kfcomm.arrays.on_device import DeviceArray, DeviceOut, adapt_device, adapt_device_out, is_on_device
from kfcomm.collectives.compiled import CompiledCall, first_of
from kfcomm.collectives.group import UNNAMED
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.on_device.calls import CallPlan, DeviceBuffers, DeviceCall, DeviceOrder
from kfcomm.collectives.on_device.through_host import Fetched, Out, OutOfHost, Returned
from kfcomm.collectives.plans import PlanKey
from kfcomm.collectives.specs import CallOptions, Shape, row_elements
from kfcomm.errors import ConfigError
from kfcomm.transports.base import Part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfcomm.collectives.on_device.calls import Paths

logger = logging.getLogger("kfcomm")

AnyArray: TypeAlias = "HostArray | DeviceArray"
AnyOut: TypeAlias = "OutArray | DeviceOut"


class Given(NamedTuple):
    """One array of a call, the shape of its result (None if this rank gets none), and where that goes, if said."""

    array: AnyArray
    shape: Shape | None
    out: AnyOut | None = None


class DeviceVerbs:
    """The device of one rank in one group, and the calls that are under way there.

    ``lack``: reason for which this rank has no device, where others have one. ``mixed``: some rank of the group has no
    device, where others do.
    """

    def __init__(self, paths: Paths, lack: str) -> None:
        self.mixed = paths.choice is not None and paths.choice.mixed
        self._group = paths.group
        self.size = paths.group.view.size
        self.reactor = paths.group.engine.reactor
        self._device = paths.device
        self._lack = lack
        self._paths = paths
        self._live: set[DeviceCall] = set()
        self._latest: dict[str, DeviceCall] = {}  # of each name in use
        self._late: BaseException | None = None
        self._is_told = False  # by a call
        self._waiters: dict[asyncio.Future[None], Callable[[DeviceCall], bool]] = {}

    def takes(self, x: Any, stream: Any) -> bool:
        """Whether this array is to come here."""
        if self.mixed or stream is not None or type(x) is DeviceArray:
            return True
        return type(x) is not np.ndarray and type(x) is not HostArray and is_on_device(x)

    def check(self, wire_dtype: Any) -> None:
        """Check the options and earlier failures, before each call.

        Raises:
            ConfigError: an option was given that is not for devices.
            CollectiveError: an earlier call has failed after its handle had resolved, and no call has raised that yet;
                the first such error, which causes the others. ``synchronize`` raises it again: later results are void
                as well.
        """
        if self._late is not None and not self._is_told:
            self._is_told = True
            raise self._late
        if wire_dtype is not None:
            raise ConfigError("wire_dtype is for arrays in host memory, in groups whose ranks all have theirs there")

    # ---------------------------------------------------------------- arrays

    def read(self, x: Any, stream: Stream | None) -> AnyArray:
        """Read the caller's array.

        Raises:
            ConfigError: it cannot be exchanged; see ``adapt`` and ``adapt_device``.
        """
        if type(x) is DeviceArray:
            return x
        if not is_on_device(x):
            if stream is not None:
                raise ConfigError("stream= is for arrays in the memory of a device")
            return adapt(x)
        return adapt_device(x, self._own_device(), stream)

    def out(self, out: Any, like: AnyArray, shape: Shape) -> AnyOut | None:
        """The caller's memory for the result, if ``out`` was given."""
        if out is None:
            return None
        place: AnyOut
        if isinstance(like, HostArray):
            place = adapt_out(out, shape, like.dtype)
            shares = arrays.overlaps(place.flat, like.flat)
        else:
            place = adapt_device_out(out, shape, like.dtype, self._device_of(like), like.stream)
            shares = on_device.overlaps(like, place)
        if shares:
            raise ConfigError("out shares some of the memory of x, but is not the same memory")
        return place

    def kind_like(self, like: Any, stream: Stream | None = None) -> ArrayKind:
        """Return the kind of ``like`` for results; NumPy's for None.

        Raises:
            ConfigError: it is on a device that this rank does not use.
        """
        if like is None:
            return NUMPY
        if not is_on_device(like):
            return host_kind_of(like)
        array = adapt_device(like, self._own_device(), stream)
        device = self._device_of(array)
        return Returned(array.kind, device, array.stream, self._paths.pool_of(device))

    def on_host(self, x: Any, stream: Stream | None) -> tuple[HostArray, Fetched | None]:
        """The caller's array in host memory, and its transfer if it comes from the device."""
        array = self.read(x, stream)
        if isinstance(array, HostArray):
            return array, None
        return self._on_host(array)

    def joined(self, parts: Sequence[Any], stream: Stream | None) -> tuple[HostArray, list[int], Fetched | None]:
        """Return the arrays of a list, end to end in host memory, their rows, and their transfer if there is one.

        Raises:
            ConfigError: they differ in more than their first dimensions, or in where they are.
        """
        read = [self.read(part, stream) for part in parts]
        first = read[0]
        for part in read:
            row_elements(part.shape)
            if part.dtype != first.dtype or part.shape[1:] != first.shape[1:]:
                raise ConfigError(
                    f"the arrays of a list may differ in their first dimension only, got {first.dtype} {first.shape} "
                    f"and {part.dtype} {part.shape}"
                )
        there = [part for part in read if isinstance(part, DeviceArray)]
        if there and len(there) != len(read):
            raise ConfigError("a list holds arrays of the host or of a device, not both")
        rows = [part.shape[0] for part in read]
        shape = (sum(rows), *first.shape[1:])
        if isinstance(first, HostArray):
            return HostArray(np.concatenate([part.flat for part in read]), shape, first.kind, False), rows, None
        array, fetched = self._on_host(self._end_to_end(there, shape))
        fetched.keep(read)
        return array, rows, fetched

    def stacked(self, read: Sequence[AnyArray]) -> AnyArray:
        """Stack arrays of one shape and dtype along a new first axis.

        Raises:
            ConfigError: some are on the device and some are not.
        """
        there = [part for part in read if isinstance(part, DeviceArray)]
        here = [part for part in read if isinstance(part, HostArray)]
        shape = (len(read), *read[0].shape)
        if not there:
            return HostArray(np.concatenate([part.flat for part in here]), shape, here[0].kind, False)
        if len(there) != len(read):
            raise ConfigError("a list holds arrays of the host or of a device, not both")
        return self._end_to_end(there, shape)

    def _end_to_end(self, parts: Sequence[DeviceArray], shape: Shape) -> DeviceArray:
        """Concatenate all of them by a copy, on the stream of the first."""
        first = parts[0]
        device = self._device_of(first)
        flat = device.empty(math.prod(shape), first.dtype, first.stream)
        at = 0
        for part in parts:
            device.wait(first.stream, device.mark(part.stream))
            device.copy(part.flat, flat[at : at + part.flat.size], first.stream)
            at += part.flat.size
        return DeviceArray(flat, shape, first.dtype, first.kind, first.stream)

    def _on_host(self, array: DeviceArray) -> tuple[HostArray, Fetched]:
        group, device = self._group, self._device_of(array)
        pool = self._paths.pool_of(device)
        fetched = Fetched(array, device, pool, group.engine, group.timeout_s)
        return HostArray(fetched.flat, array.shape, Returned(array.kind, device, array.stream, pool), False), fetched

    def out_of_host(self, out: Any, shape: Shape, dtype: np.dtype[Any], stream: Stream | None) -> Out | None:
        """The caller's memory for a result that is made in host memory, if ``out`` was given."""
        if out is None or not is_on_device(out):
            return None if out is None else adapt_out(out, shape, dtype)
        device = self._own_device()
        place = adapt_device_out(out, shape, dtype, device, stream)
        return OutOfHost(place, dtype, device, self._paths.pool_of(device))

    def _own_device(self) -> Device:
        if self._device is None:
            raise ConfigError(
                f"{self._group.view.called(self._group.view.rank)} has joined without a device: {self._lack}"
            )
        return self._device

    def _device_of(self, array: AnyArray) -> Device:
        return HOST if isinstance(array, HostArray) or self._device is None else self._device

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
            if order.alike is not None and group.may_compile():
                key = group.compiled_key(order.key or None, order.strategy)
                group.compiled[key] = CompiledCall(group, order.alike, plan, self, given[0].shape)

        group.in_order(post)
        return made

    def buffers(self, given: Sequence[Given], outcome: Callable[[list[Any]], Any]) -> DeviceBuffers:
        """Memory of a call, and its place on the caller's stream."""
        first = given[0].array
        device, dtype = self._device_of(first), first.dtype
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

    def given_again(self, x: Any, out: Any, kind: PlanKey, shape: Shape | None) -> Given | None:
        """An array for the next call under a cached name; None if it is another kind of array, or has news to raise."""
        array = self.read(x, None)
        if array.dtype != kind.dtype or array.shape != kind.shape or (self._late is not None and not self._is_told):
            return None
        return None if isinstance(array, HostArray) and not self.mixed else self.given(array, shape, out)

    def given(self, array: AnyArray, shape: Shape | None, out: Any) -> Given:
        """One array, with where its result goes if the caller says so and this rank gets one."""
        return Given(array, shape, None if shape is None else self.out(out, array, shape))

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
        if late is not None and (self._late is None or self._is_told):
            mine = self._group.view.called(self._group.view.rank)
            logger.error("%s failed on %s after its handle was done: %s", call.title, mine, late)
            self._late, self._is_told = late, False
        for waiter, counts in list(self._waiters.items()):
            if waiter.done() or not any(map(counts, self._live)):
                del self._waiters[waiter]
                if not waiter.done():
                    waiter.set_result(None)

    def _wait(self, counts: Callable[[DeviceCall], bool]) -> asyncio.Future[None] | None:
        """Future done when all calls that count are over; None if they are."""
        if not any(map(counts, self._live)):
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
        error, self._late = self._late, None
        if error is not None:
            raise error
