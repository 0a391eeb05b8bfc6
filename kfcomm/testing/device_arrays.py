"""Arrays in the memory of a fake device, and the record of streams that touch them.

Invariants: NumPy cannot read them; only work on a stream, and ``get``, reads or writes them. This module knows
nothing of that work.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from kfcomm.arrays.devices import Array, Device
from kfcomm.errors import ConfigError
from kfcomm.testing.streams import SCHEDULER, Allocation, FakeStream

if TYPE_CHECKING:
    from kfcomm.testing.devices import FakeDevice


class FakeKind:
    """Kind of a `FakeArray`: reads and makes one for `kfcomm.arrays.on_device`."""

    name = "fake array"

    def ordinal(self, x: FakeArray) -> int:
        """Stream of its device."""
        return x.device.ordinal

    def current_stream(self, x: FakeArray) -> FakeStream:
        """The stream on which the calling thread works now, on the device of the array."""
        return x.device.current_stream

    def stream_of(self, given: Any, device: Device) -> FakeStream:
        """``given`` itself.

        Raises:
            ConfigError: it is a stream of another device, or captured.
        """
        if not isinstance(given, FakeStream) or given.device is not device:
            raise ConfigError(f"expected a stream of {device}, got {given!r}")
        if given.is_capturing:
            raise ConfigError("a collective cannot be captured into a graph: call it outside of the capture")
        return given

    def repeat(self, x: FakeArray, gets: tuple[int, ...] | None, device: FakeDevice, *, in_place: bool) -> FakeRepeat:
        """Arrays of repeated calls that are like ``x``."""
        return FakeRepeat(x, gets, device, in_place=in_place)

    def read(self, x: FakeArray, stream: FakeStream) -> tuple[FakeArray, np.dtype[Any]]:
        """The array itself, and its dtype.

        Raises:
            ConfigError: it is on another device than the stream.
        """
        if x.device is not stream.device:
            raise ConfigError(f"{x!r} cannot be read on {stream}")
        return x, x.dtype

    def check_writable(self, out: FakeArray) -> None:
        """Do nothing: fake memory is always writable."""

    def written(self, out: FakeArray) -> None:
        """Count a write, as torch does."""
        out.version += 1

    def flat_view(self, native: FakeArray) -> FakeArray | None:
        """A view of one dimension, if the array is contiguous."""
        return native.reshape(-1) if native.is_contiguous else None

    def pack(self, native: FakeArray, stream: FakeStream) -> FakeArray:
        """A copy in one dimension, made on the stream."""
        flat = native.device.empty(native.size, native.dtype, stream)
        self._copy(native, flat.reshape(native.shape), stream)
        return flat

    def copy_into(self, native: FakeArray, flat: FakeArray, stream: FakeStream) -> None:
        """Copy flat memory into an array of any strides, on the stream."""
        self._copy(flat.reshape(native.shape), native, stream)

    def restore(self, flat: FakeArray, shape: tuple[int, ...], stream: FakeStream) -> FakeArray:
        """A view of ``flat``."""
        return flat.reshape(shape)

    def span(self, flat: FakeArray) -> tuple[int, int]:
        """First and last address of flat memory."""
        low, high = byte_bounds(flat.memory)
        return low, high if flat.size else low

    @staticmethod
    def _copy(source: FakeArray, target: FakeArray, stream: FakeStream) -> None:
        copy = partial(np.copyto, target.memory, source.memory)
        source.device.run(stream, copy, reads=[source], writes=[target])


class FakeRepeat:
    """Fake arrays of repeated calls; implements `kfcomm.arrays.kinds.Repeat`. Places in memory are flat arrays."""

    def __init__(self, x: FakeArray, gets: tuple[int, ...] | None, device: FakeDevice, *, in_place: bool) -> None:
        self._form = (x.dtype, x.shape)
        self._gets = gets
        self._device = device
        self._in_place = in_place

    def stream(self) -> FakeStream | None:
        """The stream on which the calling thread works now; None while it is captured."""
        stream = self._device.current_stream
        return None if stream.is_capturing else stream

    def owner(self) -> FakeStream:
        """The same stream."""
        return self._device.current_stream

    def read(self, x: Any, out: Any) -> tuple[FakeArray, FakeArray | None, FakeArray | None] | None:
        """Flat views of both, and the result."""
        if not self._is_like(x, self._form[1]):
            return None
        source = x.reshape(-1)
        if self._gets is None:
            return source, None, None
        if out is None:
            count = int(np.prod(self._gets))
            target = self._device.empty(count, x.dtype, self._device.current_stream)
            return source, target, target.reshape(self._gets)
        if out is x:
            if not self._in_place:
                return None
        elif not self._is_like(out, self._gets) or np.may_share_memory(out.memory, x.memory):
            return None
        out.version += 1
        return source, out.reshape(-1), out

    def spans(self, source: FakeArray, target: FakeArray) -> tuple[tuple[int, int], tuple[int, int]]:
        """Addresses that both take up."""
        return FakeKind().span(source), FakeKind().span(target)

    def are_at(self, arrays: Sequence[FakeArray], places: Sequence[FakeArray], *, written: bool) -> bool:
        """A fake array stays where it is."""
        for x in arrays if written else ():
            x.version += 1
        return True

    def _is_like(self, x: Any, shape: tuple[int, ...]) -> bool:
        is_here = type(x) is FakeArray and x.device is self._device
        return is_here and (x.dtype, x.shape) == (self._form[0], shape) and x.is_contiguous


class FakeArray:
    """Memory of a fake device. Made by ``FakeDevice.array`` and ``FakeDevice.empty``; slices are views.

    Attributes:
        device: of the memory.
        memory: the elements, in host memory: only for work on a stream.
        allocation: that holds the elements.
        version: how often a result was written to it, as torch's ``_version``.
        shape, dtype, ndim, strides, size, nbytes: as of a NumPy array; strides in bytes.
    """

    __kfcomm_kind__ = FakeKind()
    __array_ufunc__ = None
    __slots__ = (
        "__weakref__", "allocation", "device", "dtype", "memory", "nbytes", "ndim", "shape", "size", "strides",
        "version",
    )  # fmt: skip

    def __init__(self, device: FakeDevice, memory: Array, allocation: Allocation) -> None:
        self.device = device
        self.memory = memory
        self.allocation = allocation
        self.version = 0
        self.shape: tuple[int, ...] = memory.shape
        self.dtype: np.dtype[Any] = memory.dtype
        self.strides: tuple[int, ...] = memory.strides
        self.ndim, self.size, self.nbytes = memory.ndim, memory.size, memory.nbytes

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie side by side, in C order."""
        return self.memory.flags.c_contiguous

    @property
    def T(self) -> FakeArray:  # noqa: N802  as arrays call it
        """A view with the axes in reverse."""
        return self._like(self.memory.T)

    def __len__(self) -> int:
        return len(self.memory)

    def __getitem__(self, index: Any) -> FakeArray:
        return self._like(self.memory[index, ...] if not isinstance(index, tuple) else self.memory[(*index, ...)])

    def reshape(self, *shape: Any) -> FakeArray:
        """A view of another shape.

        Raises:
            ValueError: it would have to be a copy, or the number of elements differs.
        """
        made = self.memory.reshape(*shape)
        if made.size and not np.may_share_memory(made, self.memory):
            raise ValueError(f"{self} cannot be seen in shape {shape} without a copy")
        return self._like(made)

    def view(self, dtype: Any) -> FakeArray:
        """The same bytes as elements of another type."""
        return self._like(self.memory.view(dtype))

    def get(self) -> Array:
        """A copy in host memory, made on the stream on which the calling thread works now.

        Raises:
            RuntimeError: that stream is held back: with a real device this would wait for ever.
        """
        stream = self.device.current_stream
        with SCHEDULER.lock:
            if stream.error is not None:
                raise stream.error
            if stream.num_waiting:
                raise RuntimeError(f"{stream} still has {stream.num_waiting} items before this can be read")
            Uses((self,), ()).happen(stream)
            # A program that has read the result knows how far the stream was.
            stream.promises.tell(stream.known)
            return self.memory.copy()

    def __array__(self, *_: Any, **__: Any) -> Array:
        raise TypeError("this array is on a device: NumPy cannot read it; x.get() makes a copy in host memory")

    def __iter__(self) -> Iterator[FakeArray]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"<FakeArray of {self.dtype}, shape {self.shape}, on {self.device}>"

    def _like(self, memory: Array) -> FakeArray:
        return FakeArray(self.device, memory, self.allocation)


class Uses:
    """Memory that an item on a stream will read and write; it must still be there when its turn comes."""

    def __init__(self, reads: Sequence[FakeArray], writes: Sequence[FakeArray]) -> None:
        parts = [(x, False) for x in reads] + [(x, True) for x in writes]
        # Weak: to keep the memory alive would hide that the program has freed it too early.
        self._parts = [(weakref.ref(x.allocation), x.allocation.home, x.memory, is_written) for x, is_written in parts]

    def happen(self, stream: FakeStream) -> None:
        """Run in turn on this stream; under the lock of the scheduler."""
        for reference, home, memory, is_written in self._parts:
            allocation = reference()
            said = None
            if allocation is not None:
                said = allocation.touch(memory, stream, writes=is_written)
            # On its own stream it may be freed: as in CuPy and torch, freed memory is used again in the order of that
            # stream.
            elif home is not stream:
                said = f"memory of {home} was freed before what was on {stream} had used it"
            if said is not None:
                stream.device.violations.append(said)
