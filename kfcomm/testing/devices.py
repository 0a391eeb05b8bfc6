"""A device in host memory, with arrays that only it can read: a GPU for the runtime, without hardware.

Invariants: results depend on the order of the calls alone. It has no thread of its own (see `kfcomm.testing.streams`),
so ``notify`` may call at once. A use that a real device would answer with wrong numbers now and then is recorded in
``FakeDevice.violations``, every time. This module knows nothing of collectives.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from kfcomm.arrays.devices import Array, DeviceReport
from kfcomm.testing.device_arrays import FakeArray, Uses
from kfcomm.testing.device_sharing import FakeSharing
from kfcomm.testing.streams import (
    SCHEDULER,
    Alive,
    Allocation,
    FakeMark,
    FakeStream,
    Item,
    Promise,
    Promises,
    notify,
    poison,
    work,
)


def _copy(source: Array, target: Array, uses: Uses, *, crosses: bool) -> Item:
    """Copy of bytes; those to or from the host wait while copies are held."""
    given, wanted = source.view(np.uint8), target.view(np.uint8)

    def attempt(stream: FakeStream) -> bool:
        if crosses and stream.device.copies_are_held:
            return False
        if stream.error is None:
            uses.happen(stream)
            wanted[:] = given
        return True

    return attempt


class FakeDevice:
    """A device in host memory; implements `kfcomm.arrays.devices.Device`.

    ::

        device = FakeDevice()
        x = device.array(np.ones(4))
        device.hold(device.default_stream)  # from here on it is slow

    Args:
        ordinal: its number in this process.
        uuid: equal for two fakes of one device; by default another than any other's.
        backend: runs whole collectives on it, as its report says; empty for none.
        backend_version: as its report says.
        exports: other devices of this process can map its memory, see `kfcomm.testing.device_sharing`.

    Attributes:
        default_stream: of every thread that has not chosen another (see ``working_on``).
        violations: uses that a real device may answer with wrong numbers; empty in a correct test.
        copies_are_held: see ``hold_copies``.
        is_open: ``close`` has not been called.
    """

    def __init__(
        self, ordinal: int = 0, uuid: str | None = None, backend: str = "fake", backend_version: int = 1,
        exports: bool = False,
    ) -> None:  # fmt: skip
        self._ordinal = ordinal
        self._report = DeviceReport(
            kind="fake",
            uuid=secrets.token_hex(8) if uuid is None else uuid,
            model="a fake in host memory",
            backend=backend,
            backend_version=backend_version if backend else 0,
            exports=int(exports),
        )
        self.violations: list[str] = []
        self.copies_are_held = False
        self.is_open = True
        self._streams: list[FakeStream] = []
        self._promises = Promises()
        self._memory, self._pinned = Alive(), Alive()
        self._allocations_to_fail = 0
        self._chosen = threading.local()
        self._sharing = FakeSharing(self)
        self.default_stream = self.stream()

    # ---------------------------------------------------------------- as every device

    @property
    def report(self) -> DeviceReport:
        """Report for the other ranks, as fixed by the arguments."""
        return self._report

    @property
    def ordinal(self) -> int:
        """Its number in this process."""
        return self._ordinal

    def stream(self, *, urgent: bool = False) -> FakeStream:
        """Make a stream."""
        with SCHEDULER.lock:
            name = f"{self._ordinal}.{len(self._streams)}{' (urgent)' if urgent else ''}"
            made = FakeStream(self, self._promises, name, is_urgent=urgent)
            self._streams.append(made)
        return made

    def mark(self, stream: FakeStream) -> FakeMark:
        """Mark the present end of a stream."""
        self.check_stream(stream)
        mark = FakeMark(stream)
        stream.add(mark.attempt)
        return mark

    def wait(self, stream: FakeStream, mark: FakeMark) -> None:
        """Let a stream wait for a mark."""
        self.check_stream(stream)
        stream.add(mark.passed)

    def passed(self, mark: FakeMark) -> bool:
        """Implement `Device.passed`: the program knows of what was done before the mark from then on."""
        with SCHEDULER.lock:
            if not mark.is_done:
                return False
            self._promises.tell(mark.known)
        if mark.error is not None:
            raise mark.error
        return True

    def is_capturing(self, stream: FakeStream) -> bool:
        """Whether what is put on the stream now goes into a graph instead; see ``capture``."""
        self.check_stream(stream)
        return stream.is_capturing

    def notify(self, stream: FakeStream, done: Promise) -> None:
        """Implement `Device.notify`. Called in the thread that ends the last of the work, or at once."""
        self.check_stream(stream)
        with SCHEDULER.entered():
            self._promises.num_open += 1
            stream.add(notify(done))

    def sharing(self) -> FakeSharing:
        """Implement `SharingDevice.sharing`."""
        return self._sharing

    def empty(self, count: int, dtype: np.dtype[Any], stream: FakeStream) -> FakeArray:
        """Allocate flat memory for ``count`` elements; poisoned."""
        self.check_stream(stream)
        self.take("device memory", count * np.dtype(dtype).itemsize)
        made = self._made(np.empty(count, dtype), stream)
        poison(made.memory)
        stream.add(work(partial(Uses((), (made,)).happen, stream)))
        return made

    def pinned(self, nbytes: int) -> Array:
        """Allocate host memory for copies; poisoned."""
        self.take("pinned memory", nbytes)
        made = np.empty(nbytes, np.uint8)
        poison(made)
        self._pinned.add(made)
        return made

    def fetch(self, source: FakeArray, target: Array, stream: FakeStream) -> None:
        """Copy from the device to the host, on a stream."""
        self._check(source, self._on_host(target), stream)
        uses = Uses((source,), ())
        stream.add(_copy(source.memory, target, uses, crosses=True))

    def put(self, source: Array, target: FakeArray, stream: FakeStream) -> None:
        """Copy from the host to the device, on a stream."""
        self._check(target, self._on_host(source), stream)
        uses = Uses((), (target,))
        stream.add(_copy(source, target.memory, uses, crosses=True))

    def copy(self, source: FakeArray, target: FakeArray, stream: FakeStream) -> None:
        """Copy within the device, on a stream."""
        self._check(target, self._check(source, target.memory, stream), stream)
        uses = Uses((source,), (target,))
        stream.add(_copy(source.memory, target.memory, uses, crosses=False))

    def close(self) -> None:
        """Implement `Device.close`. It blocks while a stream is held back on which something was promised."""
        with SCHEDULER.lock:
            SCHEDULER.quiet.wait_for(lambda: not self._promises.num_open)
            self.is_open = False

    # ---------------------------------------------------------------- for tests

    def array(self, x: Any) -> FakeArray:
        """Return new memory with these elements, valid for every stream at once."""
        return self._made(np.array(x, order="C"), self.current_stream)

    @property
    def current_stream(self) -> FakeStream:
        """Stream on which the calling thread works now."""
        stream: FakeStream = getattr(self._chosen, "stream", self.default_stream)
        return stream

    @contextmanager
    def working_on(self, stream: FakeStream) -> Iterator[None]:
        """Let the calling thread work on this stream, as in ``with stream:`` of CuPy."""
        before = self.current_stream
        self._chosen.stream = stream
        try:
            yield
        finally:
            self._chosen.stream = before

    def run(
        self,
        stream: FakeStream,
        function: Callable[[], object],
        *,
        reads: Sequence[FakeArray] = (),
        writes: Sequence[FakeArray] = (),
    ) -> None:
        """Put a kernel of the test on a stream; it may touch ``FakeArray.memory``. If it raises, the stream fails."""
        self.check_stream(stream)
        uses = Uses(reads, writes)

        def both() -> None:
            uses.happen(stream)
            function()

        stream.add(work(both))

    @property
    def streams(self) -> tuple[FakeStream, ...]:
        """All streams, the default stream first, those made by the program included."""
        with SCHEDULER.lock:
            return tuple(self._streams)

    def hold(self, stream: FakeStream | None = None) -> None:
        """Hold back the work of this stream, as if its kernels were slow; by default of all present streams."""
        for one in self.streams if stream is None else (stream,):
            self.check_stream(one)
            one.hold(True)

    def release(self, stream: FakeStream | None = None) -> None:
        """Execute the work held back on this stream, or on all, unless it waits for other ranks."""
        for one in self.streams if stream is None else (stream,):
            self.check_stream(one)
            one.hold(False)

    def hold_copies(self) -> None:
        """Hold back copies between the device and the host on all streams."""
        with SCHEDULER.lock:
            self.copies_are_held = True

    def release_copies(self) -> None:
        """Execute the copies that were held back, before this returns."""
        with SCHEDULER.entered():
            self.copies_are_held = False
            for stream in self._streams:
                stream.wake()

    def fail_next_allocation(self, count: int = 1) -> None:
        """Refuse this number of the next requests for memory, pinned memory included."""
        with SCHEDULER.lock:
            self._allocations_to_fail = count

    @property
    def used_nbytes(self) -> int:
        """Bytes of the device that arrays are still in."""
        return self._memory.nbytes

    @property
    def pinned_nbytes(self) -> int:
        """Bytes of pinned memory that are still in use."""
        return self._pinned.nbytes

    @property
    def num_promised(self) -> int:
        """Calls promised to ``notify`` that have not come."""
        return self._promises.num_open

    @property
    def num_waiting(self) -> int:
        """Items on all streams that are not done."""
        return sum(stream.num_waiting for stream in self._streams)

    def check_stream(self, stream: Any) -> None:
        """Refuse a stream of another device.

        Raises:
            ValueError: it is one.
        """
        if not isinstance(stream, FakeStream) or stream.device is not self:
            raise ValueError(f"expected a stream of {self}, got {stream!r}")

    def __repr__(self) -> str:
        return f"<FakeDevice {self._ordinal}>"

    # ---------------------------------------------------------------- inside

    def take(self, what: str, nbytes: int) -> None:
        """Take memory, unless a test has it refused.

        Raises:
            MemoryError: it is refused.
        """
        with SCHEDULER.lock:
            if self._allocations_to_fail:
                self._allocations_to_fail -= 1
                raise MemoryError(f"{self} has no {nbytes} bytes of {what} left")

    def _made(self, memory: Array, home: FakeStream) -> FakeArray:
        allocation = Allocation(memory, home)
        self._memory.add(allocation)
        return FakeArray(self, memory, allocation)

    def _check(self, here: Any, there: Array, stream: FakeStream) -> Array:
        """Both ends of a copy: ``here`` is on this device. Gives the memory of that end."""
        self.check_stream(stream)
        if not isinstance(here, FakeArray) or here.device is not self:
            raise ValueError(f"{here!r} is not in the memory of {self}")
        for one in (here.memory, there):
            if one.ndim != 1 or not one.flags.c_contiguous:
                raise ValueError(f"copied is flat memory, not an array of shape {one.shape}, strides {one.strides}")
        if here.nbytes != there.nbytes:
            raise ValueError(f"a copy of {here.nbytes} bytes on {self} from or to {there.nbytes} bytes")
        memory: Array = here.memory
        return memory

    @staticmethod
    def _on_host(x: Any) -> Array:
        if not isinstance(x, np.ndarray):
            raise TypeError(f"{x!r} is not a NumPy array in host memory")
        return x
