"""The kind of an array: which library it is of, and whether it is in host memory or on a device.

Invariants: no library is imported here. An array is recognised by its type, whose library is then in ``sys.modules``,
or by an attribute ``__kfcomm_kind__`` of its type, by which any other library can join in, as the fakes of
`kfcomm.testing` do.

The libraries are in `kfcomm.arrays.host_kinds` and, for CUDA memory, in `kfcomm.arrays.cuda_kinds`, which is imported
when there may be such an array.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard, cast

import numpy as np

from kfcomm.arrays.devices import Device, Flat, Stream
from kfcomm.arrays.host_kinds import (
    NUMPY,
    READ_ONLY,
    TOO_DEEP,
    TORCH,
    VALUE,
    ArrayKind,
    BufferKind,
    DlpackKind,
    HostKind,
    JaxKind,
    is_array_type,
    not_readable,
)  # fmt: skip

__all__ = [
    "NUMPY", "READ_ONLY", "TOO_DEEP", "ArrayKind", "DeviceKind", "OnStream", "host_kind_of", "is_array_type", "kind_of",
]  # fmt: skip

_VALUES = (bool, int, float, complex, list, tuple, str, np.generic)
_BUFFERS = (bytes, bytearray, memoryview)
_DLPACK_CUDA_DEVICES = (2, 13)  # memory of a device, and memory that CUDA moves to where it is used


class DeviceKind(Protocol):
    """One library's arrays in device memory.

    A *native* array is an array of the device's own library over the same memory, which it keeps alive. It has a
    ``shape`` and any ``strides``.
    """

    @property
    def name(self) -> str:
        """The name of such an array in error messages."""
        ...

    def ordinal(self, x: Any) -> int:
        """The number of the device of ``x``; -1 for an array without elements that is on no device.

        Raises:
            ConfigError: it is on several devices.
        """
        ...

    def current_stream(self, x: Any) -> Stream:
        """The current stream of the calling thread in the library of ``x``."""
        ...

    def stream_of(self, given: Any, device: Device) -> Stream:
        """A stream as callers name it, or as ``current_stream`` gave it, in the form that the device takes.

        Raises:
            ConfigError: it is not a stream, or one of another device.
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
            ConfigError: such an array is never writable.
        """

    def written(self, out: Any) -> None:
        """Note that ``out`` was or will be written to, for libraries that count writes."""

    def flat_view(self, native: Any) -> Flat | None:
        """The memory of a native array in one dimension, if it is contiguous and in C order."""
        ...

    def pack(self, native: Any, stream: Stream) -> Flat:
        """A copy of the elements of a native array in C order, in one dimension, made on the stream."""
        ...

    def copy_into(self, native: Any, flat: Flat, stream: Stream) -> None:
        """Copy flat memory into a native array of any strides, on the stream."""

    def restore(self, flat: Flat, shape: tuple[int, ...], stream: Stream) -> Any:
        """An array of this kind around flat memory, to be used on the stream, on which its content is made."""
        ...

    def span(self, flat: Flat) -> tuple[int, int]:
        """Addresses on its device at which flat memory begins and ends."""
        ...


class Repeat(Protocol):
    """Arrays of repeated calls that are like those of the first: read in one step, without a check that can be spared.

    A kind may have ``repeat(x, gets, device, in_place)``, which makes one, or returns None: ``x`` is an array that was
    read before, ``gets`` the shape of this rank's result (None if it gets none), ``in_place`` whether ``x`` itself may
    take the result. Places in memory are in the form that ``transports.base.CollectiveBackend.prepared`` takes. Both
    methods may raise anything: then all checks are to be made.
    """

    def stream(self) -> Any:
        """Number of the stream on which the calling thread works now; None if a capture or a thread owns it."""
        ...

    def owner(self) -> Stream:
        """The same stream in the form that the device takes, which keeps it alive."""
        ...

    def read(self, x: Any, out: Any) -> tuple[Any, Any, Any] | None:
        """Places of the input and of the result, and the result, new unless ``out`` is given; None if not alike.

        A new result is for the current stream.
        """
        ...

    def spans(self, source: Any, target: Any) -> tuple[tuple[int, int], tuple[int, int]]:
        """Addresses at which the input and the result at these places begin and end."""
        ...

    def are_at(self, arrays: Sequence[Any], places: Sequence[Any], *, written: bool) -> bool:
        """Whether arrays that were read before are where they were; ``written``: results are made there now."""
        ...


class OnStream(NamedTuple):
    """An array with the caller's stream, which the blocking API reads on the caller's thread."""

    x: Any
    stream: Any  # from ``current_stream``, or named by the caller


def kind_of(x: Any) -> ArrayKind | DeviceKind:
    """The kind of ``x``, in host memory or on a device. Imports no library."""
    # The most frequent kinds first: the tests below look into other libraries.
    if isinstance(x, np.ndarray):
        return NUMPY
    if isinstance(x, _VALUES):
        return VALUE
    if isinstance(x, _BUFFERS):
        return BufferKind(type(x), "")
    own: DeviceKind | None = getattr(type(x), "__kfcomm_kind__", None)
    if own is not None:
        return own
    # Libraries first: their arrays have the protocols too, which lose what only the library knows.
    return _library_kind(x) or _protocol_kind(x)


def host_kind_of(x: Any) -> ArrayKind:
    """The kind of an array that can be read in host memory.

    Raises:
        ConfigError: ``x`` is an array in the memory of a device.
    """
    kind = kind_of(x)
    if is_device_kind(kind):
        # A library that joins in by ``__kfcomm_kind__`` need not say more than ``DeviceKind`` asks of it.
        device, instead = kind.whereabouts(x) if hasattr(kind, "whereabouts") else ("a device", "a copy in host memory")
        raise not_readable(kind.name, device, instead)
    return cast("ArrayKind", kind)


def is_device_kind(kind: ArrayKind | DeviceKind) -> TypeGuard[DeviceKind]:
    """Whether arrays of this kind are in the memory of a device."""
    return not isinstance(kind, HostKind)


def _library_kind(x: Any) -> ArrayKind | DeviceKind | None:
    """The kind of an array of torch, JAX or CuPy; None for others."""
    if _is_a(x, "torch", "Tensor"):
        return _cuda_kinds().TORCH if x.is_cuda else TORCH
    if _is_a(x, "jax", "Array"):
        is_on_gpu = not _is_a(x, "jax.core", "Tracer") and all(device.platform == "gpu" for device in x.devices())
        return _cuda_kinds().JAX if is_on_gpu else JaxKind(x)
    return _cuda_kinds().CUPY if _is_a(x, "cupy", "ndarray") else None


def _protocol_kind(x: Any) -> ArrayKind | DeviceKind:
    """The kind of an array of another library, by what it can do."""
    if hasattr(x, "__cuda_array_interface__"):
        kind: DeviceKind = _cuda_kinds().InterfaceKind(type(x))
        return kind
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        is_on_cuda = int(x.__dlpack_device__()[0]) in _DLPACK_CUDA_DEVICES
        return _cuda_kinds().CudaDlpackKind(x) if is_on_cuda else DlpackKind(x)
    try:
        with memoryview(x):
            return BufferKind(type(x), getattr(x, "typecode", ""))
    except (TypeError, BufferError):
        return VALUE


def _cuda_kinds() -> Any:
    from kfcomm.arrays import cuda_kinds

    return cuda_kinds


def _is_a(x: Any, module: str, name: str) -> bool:
    """Whether ``x`` is an instance of a library's type, without importing the library."""
    type_ = getattr(sys.modules.get(module), name, None)
    return type_ is not None and isinstance(x, type_)
