"""Libraries with arrays in host memory: one small class for each, which reads them as NumPy arrays and makes them.

Invariants: no library is imported here. A value of a library's type can only exist once its module is loaded, so the
module is found in ``sys.modules``. A kind reads an array without a copy where its memory allows, and never changes it.
Of dtypes only their names are known here.
"""

from __future__ import annotations

import array as stdlib_array
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np

from kfcomm.arrays.dtypes import NUMPY_NAMES, Array, dtype_of, unsupported
from kfcomm.errors import ConfigError
from kfcomm.types import override

TOO_DEEP = "it holds itself, or is nested too deeply: give it in parts"
"""Reason for refusing lists that are recursive, or nearly so."""
HOST_KINDS = (
    "NumPy, torch on the CPU, JAX on the CPU, objects with the buffer protocol or DLPack in host memory, "
    "numbers and nested lists of them"
)
DEVICE_VERBS = "all_reduce, all_reduce_many, reduce, broadcast, gather, all_gather, reduce_scatter and all_to_all"
# DLPack's device types that the host can read: CPU, and memory of the host pinned for CUDA or ROCm.
_DLPACK_HOST_DEVICES = (1, 3, 11)


class ArrayKind(Protocol):
    """One library's arrays: their conversion to NumPy arrays, and from them."""

    @property
    def name(self) -> str:
        """The name of such an array in error messages."""
        ...

    def read(self, x: Any) -> tuple[Array, bool]:
        """``x`` as a NumPy array, and whether that may be the memory of ``x`` itself.

        Raises:
            ConfigError: the memory cannot be read, or the type of its elements has no NumPy counterpart.
        """
        ...

    def write_into(self, out: Any) -> Array:
        """The memory of ``out`` as a NumPy array of its shape (writable if ``out`` is).

        Raises:
            ConfigError: such an object never can be written to, or not as it is.
        """
        ...

    def written(self, out: Any) -> None:
        """Note that ``out`` was or will be written to, for libraries that count writes."""

    def restore(self, array: Array) -> Any:
        """An array of this kind around, or with the content of, a C-contiguous ``array``."""
        ...


class HostKind:
    """Base of the kinds whose arrays are in host memory; kinds of devices do not have it."""

    def written(self, out: Any) -> None:
        """Do nothing: most libraries do not count the writes to an array."""


class NumpyKind(HostKind):
    """`numpy.ndarray`; a subclass is read, and given back, as a plain array."""

    name = "NumPy array"

    def read(self, x: Any) -> tuple[Array, bool]:
        """The array itself."""
        return self.write_into(x), True

    def write_into(self, out: Any) -> Array:
        """The array itself."""
        masked = sys.modules.get("numpy.ma")  # np.ma would import it, which takes 8 ms
        if masked is not None and isinstance(out, masked.MaskedArray):
            raise ConfigError("a masked array would lose its mask: pass x.filled(...) or x.data")
        return np.asarray(out)

    def restore(self, array: Array) -> Any:
        """The array itself."""
        return array


class ReadOnlyKind(NumpyKind):
    """Kind of results that are read-only NumPy arrays, for arrays of any kind."""

    def restore(self, array: Array) -> Array:
        """The array itself, made read-only."""
        array.flags.writeable = False
        return array


class ValueKind(HostKind):
    """Python and NumPy numbers, nested lists, and other values that `numpy.asarray` takes: results are NumPy arrays."""

    name = "number or list"

    def read(self, x: Any) -> tuple[Array, bool]:
        """A new array for numbers and lists; others may give their own memory."""
        if isinstance(x, str):
            raise ConfigError(_no_numbers("str", "np.frombuffer(x.encode(), np.uint8)"))
        if isinstance(x, Mapping):
            raise ConfigError(
                f"expected an array, got {type(x).__name__} (see all_reduce_many); supported are {HOST_KINDS}"
            )
        try:
            if isinstance(x, (list, tuple)) and _has_arrays(x):
                raise ConfigError(
                    "expected an array, got a list of arrays: give them one by one, or stack them into one"
                )
            array = np.asarray(x)
        except ConfigError:
            raise
        except RecursionError:
            raise ConfigError(f"expected an array, got {type(x).__name__}: {TOO_DEEP}") from None
        except (ValueError, TypeError, OverflowError) as error:
            raise ConfigError(
                f"expected an array, got {type(x).__name__}: {error}; supported are {HOST_KINDS}"
            ) from error
        if array.dtype == object and isinstance(x, int):
            raise ConfigError(f"expected numbers of at most 64 bits, got a larger integer; supported are {HOST_KINDS}")
        if array.dtype == object:
            raise ConfigError(f"expected an array of numbers, got {type(x).__name__}; supported are {HOST_KINDS}")
        fresh = isinstance(x, (bool, int, float, complex, list, tuple, np.generic))
        return array, not fresh

    def write_into(self, out: Any) -> Array:
        """Refused."""
        raise _immutable(out)

    def restore(self, array: Array) -> Any:
        """The array itself."""
        return array


def _has_arrays(x: Sequence[Any]) -> bool:
    """Whether there is an array anywhere in nested lists."""
    types = set(map(type, x))
    if any(map(is_array_type, types)):
        return True
    if not any(issubclass(type_, (list, tuple)) for type_ in types):
        return False
    return any(_has_arrays(one) for one in x if isinstance(one, (list, tuple)))


def count_write(tensor: Any) -> None:
    """Raise the version of a tensor of torch: autograd then refuses to go back through values that are overwritten."""
    if not tensor.is_inference():
        sys.modules["torch"].autograd.graph.increment_version(tensor)


def check_strided(tensor: Any) -> None:
    """Refuse a tensor of torch that is not dense.

    Raises:
        ConfigError: it is sparse, or of another layout.
    """
    if tensor.layout is not sys.modules["torch"].strided:
        raise ConfigError(f"a torch tensor of layout {tensor.layout} cannot be exchanged: pass x.to_dense()")


class TorchKind(HostKind):
    """Dense `torch.Tensor` on the CPU. Gradients do not flow through a collective: results do not require them."""

    name = "torch tensor"

    def read(self, x: Any) -> tuple[Array, bool]:
        """The memory of the tensor; a copy if it is lazily conjugated or negated."""
        try:
            return x.detach().numpy(), True
        except (TypeError, RuntimeError):  # some of these can still be read, for others there is a better error
            self._check(x)
            return self._view(x.detach().resolve_conj().resolve_neg()), True

    def write_into(self, out: Any) -> Array:
        """The memory of the tensor."""
        self._check(out)
        if out.is_conj() or out.is_neg():
            raise ConfigError("out cannot be a lazily conjugated or negated tensor: pass out.resolve_conj()")
        return self._view(out.detach())

    @override
    def written(self, out: Any) -> None:
        count_write(out)

    def restore(self, array: Array) -> Any:
        """A tensor around the array."""
        torch = sys.modules["torch"]
        writable = array if array.flags.writeable else array.copy()
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(writable.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(writable)

    @staticmethod
    def _check(x: Any) -> None:
        check_strided(x)
        if x.device.type != "cpu":
            raise not_readable("torch tensor", str(x.device), "x.cpu()")

    @staticmethod
    def _view(x: Any) -> Array:
        torch = sys.modules["torch"]
        name = str(x.dtype).removeprefix("torch.")
        if name != "bfloat16" and name not in NUMPY_NAMES:
            raise unsupported(str(x.dtype))
        try:
            array: Array = x.view(torch.int16).numpy() if name == "bfloat16" else x.numpy()
        except RuntimeError as error:  # inside torch.func, or a tensor without memory
            raise ConfigError(f"the memory of a torch tensor cannot be read: {error}") from None
        return array.view(dtype_of("bfloat16")) if name == "bfloat16" else array


class JaxKind(HostKind):
    """`jax.Array` on the CPU, outside of transformations.

    A result has the sharding of the array if that was set explicitly, and is on one device or of the result's shape;
    else JAX places it as any new array.
    """

    name = "JAX array"

    def __init__(self, x: Any) -> None:
        self._like = x

    def read(self, x: Any) -> tuple[Array, bool]:
        """The memory of the array, read-only; gathered from its shards if it has several."""
        if isinstance(x, sys.modules["jax"].core.Tracer):
            raise ConfigError("a collective cannot be called inside jax.jit, grad or vmap: call it outside")
        if not isinstance(x.dtype, np.dtype):
            raise unsupported(str(x.dtype))
        platforms = {device.platform for device in x.devices()}
        if platforms != {"cpu"}:
            raise not_readable("JAX array", ", ".join(sorted(platforms)), "jax.device_get(x)")
        if not x.is_fully_addressable:
            raise ConfigError("a JAX array with shards in other processes cannot be exchanged: pass its local shards")
        return np.asarray(x), True

    def write_into(self, out: Any) -> Array:
        """Refused: JAX arrays are immutable."""
        raise _immutable(out)

    def restore(self, array: Array) -> Any:
        """An array that may keep the memory of ``array``."""
        jax = sys.modules["jax"]
        sharding = self._like.sharding
        fits = len(sharding.device_set) == 1 or array.shape == self._like.shape
        return (
            jax.device_put(array, sharding)
            if getattr(self._like, "committed", True) and fits
            else jax.numpy.asarray(array)
        )


class BufferKind(HostKind):
    """Objects with the buffer protocol; a result of one axis is of the type of a standard one, else a NumPy array."""

    def __init__(self, type_: type, typecode: str) -> None:
        self.name = type_.__name__
        self._type = type_
        self._typecode = typecode

    def read(self, x: Any) -> tuple[Array, bool]:
        """The exported buffer."""
        if self._type is bytes:
            raise ConfigError(_no_numbers("bytes", "np.frombuffer(x, np.uint8)"))
        try:
            return np.asarray(memoryview(x)), True
        except (ValueError, TypeError, BufferError, NotImplementedError) as error:
            raise ConfigError(f"the buffer of a {self.name} cannot be read: {error}") from None

    def write_into(self, out: Any) -> Array:
        """The exported buffer, unless it never is writable."""
        if self._type is bytes:
            raise _immutable(out)
        return self.read(out)[0]

    def restore(self, array: Array) -> Any:
        """A copy for types that own their memory, else the array or a view of it."""
        if array.ndim == 1 and self._type is stdlib_array.array:
            return stdlib_array.array(self._typecode, array.tobytes())
        if array.ndim == 1 and self._type is bytearray:
            return bytearray(array)
        return array.data if self._type is memoryview and array.dtype.name != "bfloat16" else array


def namespace_of(x: Any) -> Any:
    """The array namespace of ``x``, if it names one that takes DLPack; else None."""
    namespace = x.__array_namespace__() if hasattr(x, "__array_namespace__") else None
    return namespace if hasattr(namespace, "from_dlpack") else None


class DlpackKind(HostKind):
    """Any object with DLPack in host memory; results are made by its array namespace if it names one, else by NumPy."""

    def __init__(self, x: Any) -> None:
        self.name = type(x).__name__
        self._namespace = namespace_of(x)

    def read(self, x: Any) -> tuple[Array, bool]:
        """The exported tensor."""
        device = int(x.__dlpack_device__()[0])
        if device not in _DLPACK_HOST_DEVICES:
            raise not_readable(self.name, f"DLPack device type {device}", "a copy in host memory")
        try:
            return np.from_dlpack(x), True
        except (ValueError, TypeError, BufferError, RuntimeError) as error:
            raise ConfigError(f"a {self.name} cannot be read through DLPack: {error}") from None

    def write_into(self, out: Any) -> Array:
        """The exported tensor: read-only if its library does not speak DLPack 1.0."""
        return self.read(out)[0]

    def restore(self, array: Array) -> Any:
        """An array of its library around the array."""
        if self._namespace is None or array.dtype.name == "bfloat16":
            return array
        return self._namespace.from_dlpack(array)


@cache
def is_array_type(type_: type) -> bool:
    """Whether values of this type are arrays; a list of other values, such as numbers, is one array."""
    if issubclass(type_, np.generic):
        return False
    if issubclass(type_, (np.ndarray, memoryview, bytearray, stdlib_array.array)):
        return True
    if type_.__module__.startswith("kfcomm.arrays"):  # one that was read on the caller's thread
        return True
    marks = ("__array__", "__dlpack__", "__cuda_array_interface__", "__kfcomm_kind__")
    return any(hasattr(type_, mark) for mark in marks)


NUMPY, READ_ONLY, VALUE, TORCH = NumpyKind(), ReadOnlyKind(), ValueKind(), TorchKind()


def not_readable(what: str, device: str, instead: str) -> ConfigError:
    """The error for an array on a device, given to a verb that reads host memory."""
    return ConfigError(
        f"a {what} on {device} cannot be exchanged by this verb, which reads memory of the host: pass {instead}; "
        f"arrays in the memory of a GPU are for {DEVICE_VERBS}"
    )


def _no_numbers(given: str, instead: str) -> str:
    say = f"pass {instead}, or use a verb for objects, such as broadcast_object"
    return f"expected an array of numbers, got {given}: {say}"


def _immutable(out: Any) -> ConfigError:
    return ConfigError(
        f"out cannot be a {type(out).__name__}, which cannot be written to; "
        "expected a NumPy array, a torch tensor, or another object with writable host memory"
    )
