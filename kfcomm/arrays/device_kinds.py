"""What a library with arrays in device memory is to the runtime, and how one is recognised.

Invariants: no library is imported here. An array is recognised by its type, whose library is then in
``sys.modules``, or by an attribute ``__kfcomm_kind__`` of its type: so do the fakes of `kfcomm.testing` join in, and so
can any other library.

The libraries with arrays in CUDA memory are in `kfcomm.arrays.cuda_kinds`, which is imported when there may be such an
array.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, Protocol

import numpy as np

from kfcomm.arrays.devices import Device, Flat, Stream

_OF_THE_HOST = (np.ndarray, np.generic, bool, int, float, complex, str, bytes, bytearray, memoryview, list, tuple)
_DLPACK_CUDA_DEVICES = (2, 13)  # memory of a device, and memory that CUDA moves to where it is used


class DeviceKind(Protocol):
    """One library's arrays in device memory.

    A *native* array is what the library of the device makes of an array: the same memory, which it keeps alive, with a
    ``shape`` and ``strides``, which can be any.
    """

    @property
    def name(self) -> str:
        """What an error message calls such an array."""
        ...

    def ordinal(self, x: Any) -> int:
        """The number of the device on which ``x`` is; -1 where it is nowhere, having no elements.

        Raises:
            ConfigError: it is on several.
        """
        ...

    def current_stream(self, x: Any) -> Stream:
        """The stream on which the calling thread works now with ``x``, by its own library."""
        ...

    def stream_of(self, given: Any, device: Device) -> Stream:
        """A stream as callers name it, or as ``current_stream`` gave it, in the form that the device takes.

        Raises:
            ConfigError: it is no stream, or not one on which this device can work.
        """
        ...

    def read(self, x: Any, stream: Stream) -> tuple[Any, np.dtype[Any]]:
        """``x`` as a native array that can be used on the stream, and the type of its elements in NumPy.

        Raises:
            ConfigError: the memory cannot be used, or the type of its elements is not supported.
        """
        ...

    def check_writable(self, out: Any) -> None:
        """Whether a result can go into ``out``.

        Raises:
            ConfigError: it can never be written to.
        """

    def written(self, out: Any) -> None:
        """The memory of ``out`` was or will be written to: whoever keeps count in its library is told."""

    def flat_view(self, native: Any) -> Flat | None:
        """The memory of a native array in one dimension, if it is contiguous and in C order."""
        ...

    def pack(self, native: Any, stream: Stream) -> Flat:
        """A copy of the elements of a native array in C order, in one dimension, made on the stream."""
        ...

    def copy_into(self, native: Any, flat: Flat, stream: Stream) -> None:
        """Copy flat memory into a native array of any strides, on the stream."""

    def restore(self, flat: Flat, shape: tuple[int, ...], stream: Stream) -> Any:
        """An array of this kind around flat memory, to be used on the stream, where its content will have been made."""
        ...

    def span(self, flat: Flat) -> tuple[int, int]:
        """Where flat memory begins and ends, as addresses of its device."""
        ...


class OnStream(NamedTuple):
    """An array, and the caller's stream as it was on the caller's thread: the blocking API reads it there.

    Attributes:
        x: the array.
        stream: as ``current_stream`` gave it, or as the caller named it.
    """

    x: Any
    stream: Any


def kind_on_device(x: Any) -> DeviceKind | None:
    """The kind of an array in device memory; None for anything else. Imports no library."""
    if isinstance(x, _OF_THE_HOST):
        return None
    own: DeviceKind | None = getattr(type(x), "__kfcomm_kind__", None)
    return own if own is not None else _cuda_kind(x)


def _cuda_kind(x: Any) -> DeviceKind | None:
    from kfcomm.arrays import cuda_kinds

    if _is_a(x, "torch", "Tensor"):
        return cuda_kinds.TORCH if x.is_cuda else None
    if _is_a(x, "cupy", "ndarray"):
        return cuda_kinds.CUPY
    if _is_a(x, "jax", "Array"):
        return None if _is_a(x, "jax.core", "Tracer") or not _is_on_gpu(x) else cuda_kinds.JAX
    if hasattr(x, "__cuda_array_interface__"):
        return cuda_kinds.InterfaceKind(type(x))
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        is_cuda = int(x.__dlpack_device__()[0]) in _DLPACK_CUDA_DEVICES
        return cuda_kinds.DlpackKind(x) if is_cuda else None
    return None


def _is_a(x: Any, module: str, name: str) -> bool:
    """Whether ``x`` is an instance of a library's type, without importing the library."""
    type_ = getattr(sys.modules.get(module), name, None)
    return type_ is not None and isinstance(x, type_)


def _is_on_gpu(x: Any) -> bool:
    return all(device.platform == "gpu" for device in x.devices())
