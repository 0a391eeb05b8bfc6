"""Arrays of the caller in device memory: any in, flat memory of the device, an array of the same kind out.

Invariants: ``flat`` is one-dimensional and contiguous, of a supported dtype. It is the caller's own memory wherever
that is so already, else a copy in C order, made on the caller's stream. Nothing here waits for a device: data that is
not ready yet will be ready on the stream. Adapting never changes the caller's array.

For host memory see `kfcomm.arrays`; the libraries are in `kfcomm.arrays.kinds`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kfcomm.arrays.devices import Device, Flat, Stream
from kfcomm.arrays.dtypes import check_out_shape, checked
from kfcomm.arrays.kinds import DeviceKind, OnStream, is_device_kind, kind_of
from kfcomm.errors import ConfigError

__all__ = [
    "DeviceArray",
    "DeviceOut",
    "OnStream",
    "adapt_device",
    "adapt_device_out",
    "current_stream",
    "is_on_device",
    "overlaps",
]


@dataclass(slots=True, eq=False)
class DeviceArray:
    """The caller's array in device memory as the runtime sees it. Never changed after it was made."""

    flat: Flat  # the elements in C order, one-dimensional and contiguous; keeps the caller's memory alive
    shape: tuple[int, ...]  # the caller's shape; ``()`` for a number
    dtype: np.dtype[Any]  # of the elements, as NumPy has it; bfloat16 is that of ml_dtypes
    kind: DeviceKind  # of the caller's array and of the result
    # the caller's, in the form that the device takes: on it ``flat`` can be used, and the caller continues
    stream: Stream

    def span(self) -> tuple[int, int]:
        """Addresses that it takes up on its device."""
        return self.kind.span(self.flat)

    def restore(self, flat: Flat, shape: tuple[int, ...] | None = None) -> Any:
        """A result of the caller's kind around ``flat``, which belongs to the result from then on. Never copies.

        Args:
            flat: one-dimensional and contiguous, whose content has been made where ``self.stream`` is now.
            shape: of the result; the caller's own if left out.
        """
        return self.kind.restore(flat, self.shape if shape is None else shape, self.stream)


@dataclass(slots=True, eq=False)
class DeviceOut:
    """Memory for a result, for a caller that gave ``out``. Never changed after it was made."""

    flat: Flat  # one-dimensional and contiguous: the caller's memory if possible, else scratch
    original: Any  # the caller's ``out``
    target: Any | None  # the caller's memory if ``flat`` is scratch, else None
    kind: DeviceKind  # of the caller's ``out``
    stream: Stream  # the caller's

    def span(self) -> tuple[int, int]:
        """Addresses on its device that the result takes up."""
        return self.kind.span(self.flat)

    def finish(self) -> Any:
        """Copy the result to the caller's object if needed, on the stream, and return that object."""
        if self.target is not None:
            self.kind.copy_into(self.target, self.flat, self.stream)
        self.kind.written(self.original)
        return self.original


def is_on_device(x: Any) -> bool:
    """Whether ``x`` is an array in the memory of a device. Imports nothing; 0.2 µs for a NumPy array.

    An object that raises when asked counts as an array of the host: reading it there raises, and fails the call on the
    other ranks too.
    """
    try:
        return is_device_kind(kind_of(x.x if type(x) is OnStream else x))
    except Exception:  # noqa: BLE001  the caller's object may raise anything
        return False


def current_stream(x: Any) -> Stream:
    """The stream on which the calling thread works now, as the library of ``x`` has it.

    Raises:
        ConfigError: ``x`` is not in device memory, or CuPy is missing.
    """
    return x.stream if type(x) is OnStream else _kind_of(x).current_stream(x)


def adapt_device(x: Any, device: Device, stream: Any = None) -> DeviceArray:
    """``x`` as the runtime sees it.

    Takes arrays of CuPy, torch and JAX in CUDA memory, and other objects there with ``__cuda_array_interface__`` or
    DLPack; an `OnStream` of one brings its stream. Any strides; what is not contiguous is copied once, on the stream.

    Args:
        x: the array.
        device: of this rank.
        stream: the caller's stream, by number or as an object of CuPy, torch or with ``__cuda_stream__``; if left out,
            the one on which the calling thread works now.

    Raises:
        ConfigError: ``x`` is on another device or sharded over several, its dtype is not supported, it is on no device,
            the stream cannot be used, or CuPy is missing.
    """
    x, kind, own = _begin(x, device, stream)
    native, dtype = kind.read(x, own)
    dtype = checked(dtype)
    flat = kind.flat_view(native)
    if flat is None:
        flat = kind.pack(native, own)
    return DeviceArray(flat, tuple(native.shape), dtype, kind, own)


def adapt_device_out(
    out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], device: Device, stream: Any = None
) -> DeviceOut:
    """The caller's ``out``, ready to take a result of this shape and dtype.

    If it is not contiguous, the result is written to scratch memory and `DeviceOut.finish` copies it. Its shape may be
    any that `fits`.

    Raises:
        ConfigError: ``out`` has another shape or dtype, is on another device, or can never be written to; and as
            `adapt_device`.
    """
    out, kind, own = _begin(out, device, stream)
    kind.check_writable(out)
    native, found = kind.read(out, own)
    check_out_shape(tuple(native.shape), tuple(shape))
    if found != checked(dtype):
        raise ConfigError(f"out has dtype {found}, the result has {dtype}: give out of that dtype, or none")
    # Before the memory is used: writing to a broadcast array would change several of its elements at once.
    _check_own_elements(native)
    flat = kind.flat_view(native)
    if flat is not None:
        kind.written(out)  # before the call, since a failed one may also write to it
        return DeviceOut(flat, out, None, kind, own)
    return DeviceOut(device.empty(math.prod(shape), found, own), out, native, kind, own)


def overlaps(array: DeviceArray, out: DeviceOut) -> bool:
    """Whether the two share some memory without being the same memory: the result may not then be written there."""
    begin, end = array.span()
    out_begin, out_end = out.span()
    return begin < out_end and out_begin < end and (begin, end) != (out_begin, out_end)


def _begin(x: Any, device: Device, stream: Any) -> tuple[Any, DeviceKind, Stream]:
    """The array itself, which is on this device, its kind, and the caller's stream as the device takes it."""
    if type(x) is OnStream:
        x, stream = x.x, x.stream if stream is None else stream
    kind = _kind_of(x)
    ordinal = kind.ordinal(x)
    if ordinal not in (device.ordinal, -1):
        name = device.report.kind
        raise ConfigError(
            f"a {kind.name} on {name}:{ordinal} cannot be exchanged: this rank uses {name}:{device.ordinal} "
            f"({device.report.model}); move the array there, or choose the device with device='{name}:{ordinal}'"
        )
    return x, kind, kind.stream_of(kind.current_stream(x) if stream is None else stream, device)


def _kind_of(x: Any) -> DeviceKind:
    kind = kind_of(x)
    if not is_device_kind(kind):
        raise ConfigError(f"expected an array in the memory of a device, got {type(x).__name__}")
    return kind


def _check_own_elements(native: Any) -> None:
    if any(stride == 0 and length > 1 for stride, length in zip(native.strides, native.shape, strict=True)):
        raise ConfigError("out cannot be a broadcast array: some of its elements share their memory")
