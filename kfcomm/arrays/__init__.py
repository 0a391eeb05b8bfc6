"""Arrays of the caller: any array in, flat NumPy memory for the runtime, an array of the same kind out.

Invariants: ``flat`` is one-dimensional, C-contiguous and of a supported dtype in native byte order. It is the
caller's own memory wherever that memory already is so (``is_view``), else a packed copy in C order. Adapting never
changes the caller's array.

This module must not know what is done with the bytes. The libraries, and how their arrays are read and made, are in
`kfcomm.arrays.kinds`; the supported dtypes are in `kfcomm.arrays.dtypes`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
from numpy.lib.array_utils import byte_bounds

from kfcomm.arrays.dtypes import Array, check_out_shape, checked, dtype_called, dtype_name, dtype_of
from kfcomm.arrays.kinds import NUMPY, ArrayKind, OnStream, host_kind_of, is_array_type
from kfcomm.errors import ConfigError

__all__ = [
    "HostArray", "OutArray", "OutList", "adapt", "adapt_out", "address_of", "dtype_name", "dtype_of", "form_of",
    "holds_arrays", "is_list", "overlaps", "same_memory",
]  # fmt: skip


MAX_NBYTES = 1 << 62
"""Size limit of an array: more than any processor addresses."""


def form_of(shape: int | Sequence[int], dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of an array to be made, as the caller names them.

    Raises:
        ConfigError: shape or dtype is not valid, or kfcomm does not exchange the dtype.
    """
    asked = dtype_called(dtype)
    try:
        form = (index(shape),) if isinstance(shape, SupportsIndex) else tuple(map(index, shape))
    except TypeError:
        raise ConfigError(f"expected an integer or a sequence of integers as shape, got {shape!r}") from None
    if min(form, default=0) < 0:
        raise ConfigError(f"shape {form} has a negative dimension")
    if max(math.prod(form) * asked.itemsize, *form, 0) > MAX_NBYTES:
        raise ConfigError(f"shape {form!r:.80} is of more than 2**62 bytes")
    return form, checked(asked)


Span: TypeAlias = tuple[int, int]
"""Address of the first byte of an array, and the one after its last."""


@dataclass(slots=True, eq=False)
class HostArray:
    """The caller's array as the runtime sees it. Never changed, but not frozen: that would cost 0.5 µs a call."""

    flat: Array  # the elements in C order, one-dimensional and contiguous; read-only where the caller's memory is
    shape: tuple[int, ...]  # the caller's shape; ``()`` for a number
    kind: ArrayKind  # of the caller's array and of the result
    is_view: bool  # ``flat`` may be the caller's memory, and so must not be written to

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the elements, in native byte order."""
        return self.flat.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.flat.nbytes

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.flat.size

    def span(self) -> Span:
        """Addresses that it takes up."""
        return span_of(self.flat)

    def copied(self) -> HostArray:
        """Return the same with memory of its own."""
        return HostArray(self.flat.copy(), self.shape, self.kind, False)

    def restore(self, flat: Array, shape: tuple[int, ...] | None = None) -> Any:
        """A result of the caller's kind around ``flat``, which belongs to the result from then on.

        Args:
            flat: one-dimensional and contiguous, any supported dtype; not to be written to afterwards.
            shape: of the result; the caller's own if left out.

        Returns:
            A NumPy array for NumPy arrays, scalars, numbers and lists (zero-dimensional for a number); a tensor for
            torch, an array on the same device for JAX; ``bytearray``, ``memoryview`` and ``array.array`` for their
            like if the result has one axis. No copy, except for JAX, ``bytearray`` and ``array.array``, whose memory
            cannot be made from outside.
        """
        if shape is None:
            shape = self.shape
        return self.kind.restore(flat if flat.shape == shape else flat.reshape(shape))


@dataclass(frozen=True, slots=True, eq=False)
class OutArray:
    """Memory for a result, for a caller that gave ``out``."""

    flat: Array  # one-dimensional, contiguous and writable: the caller's memory if possible, else scratch
    original: Any  # the caller's ``out``
    kind: ArrayKind  # of the caller's ``out``
    target: Array | None = None  # the caller's memory if ``flat`` is scratch, else None

    def span(self) -> Span:
        """Addresses that the caller's memory takes up."""
        return span_of(self.flat if self.target is None else self.target)

    def finish(self) -> Any:
        """Copy the result to the caller's object if needed, and return that object."""
        if self.target is not None:
            np.copyto(self.target, self.flat.reshape(self.target.shape))
        self.kind.written(self.original)
        return self.original


class OutList:
    """A list of arrays into which a result goes part by part; the interface of `OutArray`."""

    __slots__ = ("_parts", "flat", "original")

    def __init__(self, parts: list[OutArray], original: Any, dtype: np.dtype[Any]) -> None:
        self._parts = parts
        self.original = original  # the caller's list
        self.flat: Array = np.empty(sum(part.flat.size for part in parts), dtype)  # scratch for the whole result

    @classmethod
    def of(cls, outs: Sequence[Any], shapes: Sequence[tuple[int, ...]], dtype: np.dtype[Any]) -> OutList:
        """The caller's list, whose arrays must have these shapes and this dtype.

        Raises:
            ConfigError: there are more or fewer, or one does not fit.
        """
        if len(outs) != len(shapes):
            raise ConfigError(f"out is a list of {len(outs)} arrays, the result has {len(shapes)} parts")
        return cls([adapt_out(out, shape, dtype) for out, shape in zip(outs, shapes, strict=True)], outs, dtype)

    def finish(self) -> Any:
        """Copy the parts of the result to the caller's arrays, and return the caller's list."""
        at = 0
        for part in self._parts:
            end = at + part.flat.size
            part.flat[:] = self.flat[at:end]
            part.finish()
            at = end
        return self.original


def adapt(x: Any) -> HostArray:
    """``x`` as the runtime sees it.

    Takes NumPy arrays and scalars, torch tensors and JAX arrays in host memory, objects with the buffer protocol
    (``bytearray``, ``memoryview``, ``array.array``) or DLPack in host memory, Python numbers and nested lists of
    them; a `HostArray` is given back as it is. Any strides and byte order; what is not contiguous and native is copied
    once.

    Cost: about 1 µs for a contiguous NumPy array, whatever its size.

    Raises:
        ConfigError: the dtype is not supported, the array is on a device, or ``x`` is not an array.
    """
    if type(x) is np.ndarray:
        if x.ndim == 1 and x.flags.c_contiguous and x.dtype is checked(x.dtype):  # usual: 0.4 µs less than below
            return HostArray(x, x.shape, NUMPY, True)
        return _packed(x, NUMPY, shared=True)
    if type(x) is HostArray:
        return x
    kind = host_kind_of(x)
    array, shared = kind.read(x)
    return _packed(array, kind, shared=shared)


def _packed(array: Array, kind: ArrayKind, *, shared: bool) -> HostArray:
    # A foreign byte order is converted by the copy: every rank has to send the same bytes for the same number.
    native = checked(array.dtype)
    if array.flags.c_contiguous and array.dtype == native:
        return HostArray(array.reshape(-1), array.shape, kind, shared)
    return HostArray(np.array(array, dtype=native, order="C").reshape(-1), array.shape, kind, False)


def is_list(x: Any) -> bool:
    """Whether ``x`` is a list or a tuple of the caller's."""
    return isinstance(x, (list, tuple)) and type(x) is not OnStream


def holds_arrays(x: Sequence[Any]) -> bool:
    """Whether a list holds arrays; a nested list of numbers does not, and is one array itself."""
    return any(map(is_array_type, set(map(type, x))))


def adapt_out(out: Any, like_shape: tuple[int, ...], like_dtype: np.dtype[Any]) -> OutArray:
    """The caller's ``out``, ready to take a result of ``like_shape`` and ``like_dtype``.

    The caller's array may have any strides and byte order; if it is not contiguous and native, the result is written
    to scratch memory and `OutArray.finish` copies it. Its shape may be any that `fits`.

    Raises:
        ConfigError: ``out`` has another shape or dtype, cannot be written to, or is of a kind that never can.
    """
    kind = host_kind_of(out)
    array = kind.write_into(out)
    _check_like(array, tuple(like_shape), checked(like_dtype))
    if array.flags.c_contiguous and array.dtype.isnative:
        kind.written(out)  # before the call, since a failed one may also write to it
        return OutArray(array.reshape(-1), out, kind)
    if any(stride == 0 and length > 1 for stride, length in zip(array.strides, array.shape, strict=True)):
        raise ConfigError("out cannot be a broadcast array: some of its elements share their memory")
    return OutArray(np.empty(array.size, checked(array.dtype)), out, kind, array)


def _check_like(out: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    check_out_shape(out.shape, shape)
    if checked(out.dtype) != dtype:
        raise ConfigError(f"out has dtype {out.dtype}, the result has {dtype}: give out of that dtype, or none")
    if not out.flags.writeable:
        raise ConfigError(f"out is read-only: expected writable memory of shape {shape}, dtype {dtype}")


def same_memory(a: Array, b: Array) -> bool:
    """Whether two arrays are the same bytes in the same order (true for an array and itself, unless empty)."""
    if not np.may_share_memory(a, b):
        return False
    return a is b or (a.nbytes == b.nbytes and a.strides == b.strides and address_of(a) == address_of(b))


def overlaps(a: Array, b: Array) -> bool:
    """Whether two arrays share some memory without being the same memory: neither may then be written to.

    Exact for contiguous arrays, whose bounds are compared; others are solved exactly by NumPy, which can be slow.
    """
    if not np.may_share_memory(a, b) or same_memory(a, b):
        return False
    return (a.flags.c_contiguous and b.flags.c_contiguous) or np.shares_memory(a, b)


def span_of(array: Array) -> Span:
    """The span of an array of any strides; of an empty one it is empty. 2 µs."""
    begin, end = byte_bounds(array)
    return begin, end if array.size else begin


def overwritten(inputs: Iterable[Span | None], results: Iterable[Span | None]) -> list[int]:
    """Return the places of inputs whose memory is also that of a result at another place, at least in part.

    ``None`` is an input that may be overwritten, or the lack of a result. Cost: O(n log n).
    """
    spans = sorted((*span, place) for place, span in enumerate(results) if span is not None and span[0] < span[1])
    begins = [begin for begin, _, _ in spans]
    # Of the results up to each, in the order of their addresses: the two that reach furthest, as end and place.
    furthest: list[tuple[Span, Span]] = []
    first = second = (0, -1)
    for _, end, place in spans:
        if end > first[0]:
            first, second = (end, place), first
        elif end > second[0]:
            second = (end, place)
        furthest.append((first, second))
    found = []
    for place, span in enumerate(inputs):
        if span is None:
            continue
        begin, end = span
        before = bisect_left(begins, end)
        if before and any(reach > begin and other != place for reach, other in furthest[before - 1]):
            found.append(place)
    return found


def address_of(array: Array) -> int:
    """Address of its first element."""
    return int(array.__array_interface__["data"][0])
