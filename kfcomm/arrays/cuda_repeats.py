"""Arrays of CuPy and torch in repeated calls: as few steps as their libraries allow, since each call takes them all.

What is checked here was checked in full for the first call of a name; anything else is left to that check.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kfcomm.arrays.devices import Device, Stream
from kfcomm.arrays.devices.cuda import load_cupy

_PER_THREAD_STREAM = 2


class _ByAddress:
    """Memory of known sizes, by address."""

    __slots__ = ("_nbytes",)

    _nbytes: tuple[int, int]  # of the input and of the result

    def spans(self, source: int, target: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Addresses that both take up."""
        from_nbytes, to_nbytes = self._nbytes
        return (source, source + from_nbytes), (target, target + to_nbytes)


class CupyRepeat(_ByAddress):
    """Implements `kfcomm.arrays.kinds.Repeat` for `cupy.ndarray`; places are addresses, streams CUDA's numbers."""

    __slots__ = (
        "_current", "_device_now", "_dtype", "_gets", "_in_place", "_is_capturing", "_make", "_ordinal",
        "_shape", "_type",
    )  # fmt: skip

    def __init__(self, x: Any, gets: tuple[int, ...] | None, device: Device, *, in_place: bool) -> None:
        cupy = load_cupy()
        self._type, self._dtype, self._shape = type(x), x.dtype, x.shape
        self._gets = gets
        self._ordinal = device.ordinal
        self._in_place = in_place
        self._nbytes = x.nbytes, 0 if gets is None else int(np.prod(gets)) * x.dtype.itemsize
        self._make: Callable[..., Any] = cupy.ndarray
        self._current: Callable[[int], Any] = cupy.cuda.get_current_stream
        self._is_capturing: Callable[[int], bool] = cupy.cuda.runtime.streamIsCapturing
        self._device_now: Callable[[], int] | None = None  # None: there is one device
        if cupy.cuda.runtime.getDeviceCount() > 1:
            self._device_now = cupy.cuda.runtime.getDevice

    def stream(self) -> int | None:
        """CuPy's current stream of this thread, on this device."""
        if self._device_now is not None and self._device_now() != self._ordinal:
            return None
        pointer: int = self._current(self._ordinal).ptr
        return None if pointer == _PER_THREAD_STREAM or self._is_capturing(pointer) else pointer

    def owner(self) -> Stream:
        """The same as an object of CuPy."""
        return self._current(self._ordinal)

    def read(self, x: Any, out: Any) -> tuple[int, int, Any] | None:
        """Addresses of both, and the result."""
        dtype, shape = self._dtype, self._shape
        if type(x) is not self._type or x.dtype is not dtype or x.shape != shape or not x.flags.c_contiguous:
            return None
        data = x.data
        if data.device_id != self._ordinal:
            return None
        source: int = data.ptr
        gets = self._gets
        if gets is None:
            return source, 0, None
        if out is None:
            made = self._make(gets, dtype)
            return source, made.data.ptr, made
        if out is x:
            return (source, source, x) if self._in_place else None
        if type(out) is not self._type or out.dtype is not dtype or out.shape != gets or not out.flags.c_contiguous:
            return None
        data = out.data
        target: int = data.ptr
        from_nbytes, to_nbytes = self._nbytes
        if data.device_id != self._ordinal or (target < source + from_nbytes and source < target + to_nbytes):
            return None
        return source, target, out

    def are_at(self, arrays: Sequence[Any], places: Sequence[int], *, written: bool) -> bool:
        """An array of CuPy stays where it is."""
        return True


class TorchRepeat(_ByAddress):
    """Implements `kfcomm.arrays.kinds.Repeat` for `torch.Tensor` and `torch.nn.Parameter`; results are torch's own."""

    __slots__ = ("_current", "_device_now", "_dtype", "_gets", "_in_place", "_is_capturing", "_ordinal",
                 "_shape", "_types", "_written")  # fmt: skip

    def __init__(self, x: Any, gets: tuple[int, ...] | None, device: Device, *, in_place: bool) -> None:
        torch = sys.modules["torch"]
        self._types = (torch.Tensor, torch.nn.Parameter)
        self._dtype, self._shape = x.dtype, x.shape
        self._gets = gets
        self._ordinal = device.ordinal
        self._in_place = in_place
        item_nbytes = x.element_size()
        self._nbytes = x.numel() * item_nbytes, 0 if gets is None else int(np.prod(gets)) * item_nbytes
        self._current: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing
        self._written: Callable[[Any], None] = torch.autograd.graph.increment_version
        self._device_now: Callable[[], int] | None = None
        if torch.cuda.device_count() > 1:
            self._device_now = torch.cuda.current_device

    def stream(self) -> int | None:
        """Torch's current stream of this thread, on this device."""
        if self._device_now is not None and self._device_now() != self._ordinal:
            return None
        pointer = self._current(self._ordinal)
        return None if pointer == _PER_THREAD_STREAM or self._is_capturing() else pointer

    def owner(self) -> Stream:
        """The same: torch keeps its streams."""
        return self._current(self._ordinal)

    def read(self, x: Any, out: Any) -> tuple[int, int, Any] | None:
        """Addresses of both, and the result."""
        if not self._is_like(x, self._shape):
            return None
        source: int = x.data_ptr()
        gets = self._gets
        if gets is None:
            return source, 0, None
        if out is None:
            made = x.new_empty(gets)
            return source, made.data_ptr(), made
        if out is x:
            if not self._in_place:
                return None
            target = source
        else:
            if not self._is_like(out, gets):
                return None
            target = out.data_ptr()
            from_nbytes, to_nbytes = self._nbytes
            if target < source + from_nbytes and source < target + to_nbytes:
                return None
        if not out.is_inference():
            self._written(out)
        return source, target, out

    def are_at(self, arrays: Sequence[Any], places: Sequence[int], *, written: bool) -> bool:
        """Whether no tensor was given other memory."""
        if [x.data_ptr() for x in arrays] != places:
            return False
        if written:
            for x in arrays:
                if not x.is_inference():
                    self._written(x)
        return True

    def _is_like(self, x: Any, shape: tuple[int, ...]) -> bool:
        # A lazily negated tensor is of another value than its memory; so is a lazily conjugated one.
        return (
            type(x) in self._types and x.dtype is self._dtype and x.shape == shape and x.is_contiguous()
            and x.get_device() == self._ordinal and not x.is_neg() and not x.is_conj()
        )  # fmt: skip
