"""Libraries with arrays in CUDA memory: one small class for each, over CuPy, whose arrays are the native ones.

Invariants: importing this module imports no library. A kind reads an array without a copy, and never changes it. All
copies and kernels run on the given stream.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from kfcomm.arrays.cuda_repeats import CupyRepeat, TorchRepeat
from kfcomm.arrays.devices import Device, Flat, Stream
from kfcomm.arrays.devices.cuda import as_stream, load_cupy, working_on
from kfcomm.arrays.dtypes import SUPPORTED_NAMES, checked, dtype_of, unsupported
from kfcomm.arrays.host_kinds import check_strided, count_write, namespace_of
from kfcomm.arrays.kinds import Repeat
from kfcomm.errors import ConfigError, KfcommError


class CudaKind:
    """Common base: arrays are read, and results made, as CuPy's."""

    name = "CUDA array"

    def whereabouts(self, x: Any) -> tuple[str, str]:
        """The device of ``x``, and what to pass instead to a verb that reads host memory."""
        return "a GPU", "a copy in host memory"

    def ordinal(self, x: Any) -> int:
        """The number of its device in CuPy."""
        return int(x.device.id)

    def current_stream(self, x: Any) -> Stream:
        """CuPy's current stream on the calling thread, which is CUDA's default stream unless another was chosen."""
        return load_cupy().cuda.get_current_stream(self.ordinal(x))

    def stream_of(self, given: Any, device: Device) -> Stream:
        """A stream of CuPy."""
        stream = as_stream(given)
        if stream.device_id not in (-1, device.ordinal):
            raise ConfigError(f"the stream is on cuda:{stream.device_id}, this rank uses cuda:{device.ordinal}")
        with working_on(device.ordinal):
            if stream.is_capturing():
                raise ConfigError("a collective cannot be captured into a CUDA graph: call it outside of the capture")
        return stream

    def read(self, x: Any, stream: Stream) -> tuple[Any, np.dtype[Any]]:
        """The array itself."""
        return x, checked(x.dtype)

    def check_writable(self, out: Any) -> None:
        """Accept all arrays."""

    def written(self, out: Any) -> None:
        """Do nothing: most libraries do not count the writes to an array."""

    def flat_view(self, native: Any) -> Flat | None:
        """A view of one dimension, if there can be one."""
        return native.reshape(-1) if native.flags.c_contiguous else None

    def pack(self, native: Any, stream: Stream) -> Flat:
        """A copy, from CuPy's pool."""
        with working_on(native.device.id, stream):
            return _with_kernel(load_cupy().ascontiguousarray, _bits(native)).view(native.dtype).reshape(-1)

    def copy_into(self, native: Any, flat: Flat, stream: Stream) -> None:
        """A copy, by a kernel of CuPy."""
        with working_on(native.device.id, stream):
            _with_kernel(load_cupy().copyto, _bits(native), _bits(flat).reshape(native.shape))

    def restore(self, flat: Flat, shape: tuple[int, ...], stream: Stream) -> Any:
        """An array of CuPy."""
        return flat.reshape(shape)

    def span(self, flat: Flat) -> tuple[int, int]:
        """Addresses of the device."""
        return flat.data.ptr, flat.data.ptr + flat.nbytes


class CupyKind(CudaKind):
    """`cupy.ndarray`."""

    name = "CuPy array"

    def whereabouts(self, x: Any) -> tuple[str, str]:
        """The device of ``x``, and what to pass instead to a verb that reads host memory."""
        return f"cuda:{x.device.id}", "x.get()"

    def repeat(self, x: Any, gets: tuple[int, ...] | None, device: Device, *, in_place: bool) -> Repeat | None:
        """Arrays like ``x``."""
        return CupyRepeat(x, gets, device, in_place=in_place) if type(x) is load_cupy().ndarray else None


class CudaTorchKind(CudaKind):
    """Dense `torch.Tensor` on CUDA. Gradients do not flow through a collective: results do not require them."""

    name = "torch tensor"

    def whereabouts(self, x: Any) -> tuple[str, str]:
        """The device of ``x``, and what to pass instead to a verb that reads host memory."""
        return str(x.device), "x.cpu()"

    def repeat(self, x: Any, gets: tuple[int, ...] | None, device: Device, *, in_place: bool) -> Repeat | None:
        """Tensors like ``x``; subclasses may mean something else by their memory."""
        torch = sys.modules["torch"]
        is_plain = type(x) in (torch.Tensor, torch.nn.Parameter)
        return TorchRepeat(x, gets, device, in_place=in_place) if is_plain else None

    def ordinal(self, x: Any) -> int:
        """The number of its device in torch."""
        return int(x.device.index)

    def current_stream(self, x: Any) -> Stream:
        """Torch's current stream on the calling thread."""
        return sys.modules["torch"].cuda.current_stream(x.device)

    def stream_of(self, given: Any, device: Device) -> Stream:
        """A stream of CuPy, after a look at the device of a stream of torch."""
        on = getattr(getattr(given, "device", None), "index", None)
        if on not in (None, device.ordinal):
            raise ConfigError(f"the stream is on cuda:{on}, this rank uses cuda:{device.ordinal}")
        return super().stream_of(given, device)

    def read(self, x: Any, stream: Stream) -> tuple[Any, np.dtype[Any]]:
        """The memory of the tensor, by its address: torch's own way through DLPack would wait for torch's stream."""
        check_strided(x)
        if x.is_conj() or x.is_neg():
            raise ConfigError("a lazily conjugated or negated tensor cannot be exchanged: pass x.resolve_conj()")
        name = str(x.dtype).removeprefix("torch.")
        if name not in SUPPORTED_NAMES:
            raise unsupported(str(x.dtype))
        try:
            address = x.data_ptr()
        except RuntimeError as error:  # inside torch.func, or a tensor without memory
            raise ConfigError(f"the memory of a torch tensor cannot be read: {error}") from None
        strides = [stride * x.element_size() for stride in x.stride()]
        return _around(address, tuple(x.shape), strides, dtype_of(name), self.ordinal(x), x), dtype_of(name)

    def written(self, out: Any) -> None:
        """Raise the tensor's version."""
        count_write(out)

    def restore(self, flat: Flat, shape: tuple[int, ...], stream: Stream) -> Any:
        """A tensor around the memory, which torch may use on its stream at once: it is the caller's."""
        torch = sys.modules["torch"]
        # bfloat16 travels as what it is stored in: not every version of CuPy hands it out.
        native = (flat.view(np.int16) if flat.dtype.name == "bfloat16" else flat).reshape(shape)
        with working_on(flat.device.id, stream):
            tensor = torch.utils.dlpack.from_dlpack(native.__dlpack__(stream=-1))  # -1: no stream has to wait
        return tensor.view(torch.bfloat16) if flat.dtype.name == "bfloat16" else tensor


class CudaJaxKind(CudaKind):
    """`jax.Array` on one GPU, outside of transformations. JAX's own streams wait, and are waited for, by themselves."""

    name = "JAX array"

    def whereabouts(self, x: Any) -> tuple[str, str]:
        """The device of ``x``, and what to pass instead to a verb that reads host memory."""
        return ", ".join(sorted({device.platform for device in x.devices()})), "jax.device_get(x)"

    def ordinal(self, x: Any) -> int:
        """The number of its device, as JAX exports it by DLPack."""
        if len(x.devices()) > 1:
            raise ConfigError("a JAX array on several devices cannot be exchanged: pass x.addressable_shards[i].data")
        return int(x.__dlpack_device__()[1])

    def read(self, x: Any, stream: Stream) -> tuple[Any, np.dtype[Any]]:
        """The memory of the array; the stream first waits for JAX, which may still be computing it."""
        if not isinstance(x.dtype, np.dtype):
            raise unsupported(str(x.dtype))
        checked(x.dtype)
        return _from_dlpack(x, self.ordinal(x), stream)

    def check_writable(self, out: Any) -> None:
        """Refused: JAX arrays are immutable."""
        raise ConfigError(
            "out cannot be a JAX array, which cannot be written to; "
            "expected a CuPy array, a torch tensor, or another object with writable memory on the device"
        )

    def restore(self, flat: Flat, shape: tuple[int, ...], stream: Stream) -> Any:
        """An array around the memory, which JAX uses after all work that is on the stream now."""
        with working_on(flat.device.id, stream):
            return sys.modules["jax"].dlpack.from_dlpack(flat.reshape(shape))


class InterfaceKind(CudaKind):
    """Any object with ``__cuda_array_interface__``; results are Numba's for its own, else CuPy's.

    Source: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
    """

    def __init__(self, type_: type) -> None:
        self.name = type_.__name__
        self._is_numba = type_.__module__.startswith("numba.")

    def ordinal(self, x: Any) -> int:
        """The device that CUDA has for the address."""
        address = x.__cuda_array_interface__["data"][0]
        return int(load_cupy().cuda.runtime.pointerGetAttributes(address).device) if address else -1

    def read(self, x: Any, stream: Stream) -> tuple[Any, np.dtype[Any]]:
        """The memory that it names; the stream first waits for the stream that it names."""
        told = x.__cuda_array_interface__
        if told.get("mask") is not None:
            raise ConfigError(f"a {self.name} with a mask would lose it")
        dtype = np.dtype(told["typestr"])
        if checked(dtype) != dtype:
            raise ConfigError(f"a {self.name} of dtype {dtype.str} is not in the byte order of the device")
        shape, strides, ordinal = tuple(told["shape"]), told.get("strides"), self.ordinal(x)
        if told.get("stream") is not None and ordinal >= 0:
            with working_on(ordinal):
                stream.wait_event(as_stream(told["stream"]).record(load_cupy().cuda.Event(disable_timing=True)))
        return _around(told["data"][0], shape, strides, dtype, ordinal, x), dtype

    def check_writable(self, out: Any) -> None:
        """Refuse an array that is marked as read-only."""
        if out.__cuda_array_interface__["data"][1]:
            raise ConfigError(f"out is read-only: expected a {self.name} that can be written to")

    def restore(self, flat: Flat, shape: tuple[int, ...], stream: Stream) -> Any:
        """An array of Numba, or else of CuPy."""
        array = flat.reshape(shape)
        return sys.modules["numba"].cuda.as_cuda_array(array, sync=False) if self._is_numba else array


class CudaDlpackKind(CudaKind):
    """Any object with DLPack in CUDA memory; results are made by its array namespace if it names one, else by CuPy."""

    def __init__(self, x: Any) -> None:
        self.name = type(x).__name__
        self._namespace = namespace_of(x)

    def whereabouts(self, x: Any) -> tuple[str, str]:
        """Its device type, as DLPack counts."""
        return f"DLPack device type {int(x.__dlpack_device__()[0])}", "a copy in host memory"

    def ordinal(self, x: Any) -> int:
        """The number of its device, as it exports it by DLPack."""
        return int(x.__dlpack_device__()[1])

    def read(self, x: Any, stream: Stream) -> tuple[Any, np.dtype[Any]]:
        """The memory of the array; the stream first waits for its library."""
        return _from_dlpack(x, self.ordinal(x), stream)

    def restore(self, flat: Flat, shape: tuple[int, ...], stream: Stream) -> Any:
        """An array of its library, which uses it after all work that is on the stream now."""
        array = flat.reshape(shape)
        if self._namespace is None:
            return array
        with working_on(flat.device.id, stream):
            return self._namespace.from_dlpack(array)


CUPY = CupyKind()
TORCH = CudaTorchKind()
JAX = CudaJaxKind()


def _around(
    address: int, shape: tuple[int, ...], strides: Sequence[int] | None, dtype: np.dtype[Any], ordinal: int, owner: Any
) -> Any:
    """Memory of CUDA as an array of CuPy, which keeps its owner alive."""
    cupy = load_cupy()
    reach = math.prod(shape) * dtype.itemsize
    if strides is not None and reach:
        reach = sum((length - 1) * abs(stride) for length, stride in zip(shape, strides, strict=True)) + dtype.itemsize
    # CuPy takes no negative device: an array without elements may be on none (-1).
    memory = cupy.cuda.UnownedMemory(address, reach, owner, max(ordinal, 0))
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


def _from_dlpack(x: Any, ordinal: int, stream: Stream) -> tuple[Any, np.dtype[Any]]:
    with working_on(ordinal, stream):
        try:
            native = load_cupy().from_dlpack(x)
        except (ValueError, TypeError, BufferError, NotImplementedError) as error:
            raise ConfigError(f"a {type(x).__name__} cannot be read through DLPack: {error}") from None
    return native, checked(native.dtype)


def _bits(array: Any) -> Any:
    """The same memory, in a dtype for which every version of CuPy has kernels."""
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def _with_kernel(work: Any, *arrays: Any) -> Any:
    """Run a function that needs a kernel, which CuPy compiles at its first use."""
    runtime_error = load_cupy().cuda.runtime.CUDARuntimeError
    try:
        return work(*arrays)
    except (KfcommError, runtime_error, MemoryError):
        raise
    except (RuntimeError, ImportError, OSError) as error:
        raise ConfigError(
            f"an array that is not contiguous needs a kernel of CuPy, which cannot be compiled here: {error}; "
            "pass a contiguous array"
        ) from error
