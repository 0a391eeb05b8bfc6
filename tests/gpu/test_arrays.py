"""Arrays of CuPy, torch and JAX in CUDA memory: the same memory in, the same kind out, on the caller's stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kfcomm.arrays import adapt, dtype_of
from kfcomm.arrays.devices import cuda
from kfcomm.arrays.dtypes import SUPPORTED_NAMES
from kfcomm.arrays.on_device import OnStream, adapt_device, adapt_device_out, current_stream, is_on_device, overlaps
from kfcomm.errors import ConfigError

pytestmark = pytest.mark.gpu

SHAPES = [(), (0,), (5,), (3, 4), (2, 0, 3)]
# JAX has the wide types only where they are switched on.
OF_JAX = [name for name in SUPPORTED_NAMES if name not in ("int64", "uint64", "float64", "complex128")]


# The libraries are loaded before anything is watched: what they open when they first use a device stays open.


@pytest.fixture(scope="module", autouse=True)
def cupy() -> Any:
    found = pytest.importorskip("cupy")
    found.arange(4)[::2].copy().sum().get()
    return found


@pytest.fixture(scope="module")
def torch() -> Any:
    found = pytest.importorskip("torch")
    if not found.cuda.is_available():
        pytest.skip("torch was built without CUDA")
    found.ones(2, device="cuda:0").sum().item()
    return found


@pytest.fixture(scope="module")
def jax() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else it takes the memory of all others
        found = pytest.importorskip("jax")
        if found.default_backend() != "gpu":
            pytest.skip("JAX was built without CUDA")
        found.numpy.ones(2).sum().block_until_ready()
        yield found


@pytest.fixture
def device() -> Iterator[cuda.CudaDevice]:
    made = cuda.CudaDevice(0)
    yield made
    made.close()


class Elsewhere:
    """A device of this process that is another than the one the arrays are on."""

    def __init__(self, device: cuda.CudaDevice) -> None:
        self.report = device.report
        self.ordinal = 7


def values(name: str, *shape: int) -> np.ndarray:
    return (np.arange(np.prod(shape, dtype=int)) % 2).astype(dtype_of(name)).reshape(shape)


def on_host(flat: Any, stream: Any) -> np.ndarray:
    """The elements of flat memory, once the stream is done."""
    return flat.get(stream=stream)


# --- CuPy -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SUPPORTED_NAMES)
def test_cupy(cupy: Any, device: cuda.CudaDevice, name: str, shape: tuple[int, ...]) -> None:
    x = cupy.asarray(values(name, *shape))
    assert is_on_device(x)
    array = adapt_device(x, device)
    assert (array.shape, array.dtype, array.flat.shape) == (shape, dtype_of(name), (x.size,))
    assert array.flat.data.ptr == x.data.ptr
    back = array.restore(array.flat)
    assert type(back) is cupy.ndarray
    assert (back.shape, back.dtype, back.data.ptr) == (shape, x.dtype, x.data.ptr)


LAYOUTS = {
    "transposed": lambda a: a.T,
    "strided": lambda a: a[:, ::2],
    "reversed": lambda a: a[::-1],
    "column": lambda a: a[:, 1],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("name", ["float32", "bfloat16", "bool", "complex128"])
def test_cupy_in_any_layout(cupy: Any, device: cuda.CudaDevice, name: str, layout: Any) -> None:
    host = values(name, 6, 4)
    x = layout(cupy.asarray(host))
    stream = device.stream()
    stream.wait_event(cupy.cuda.get_current_stream().record())
    array = adapt_device(x, device, stream)
    assert array.dtype == dtype_of(name)
    assert np.array_equal(on_host(array.flat, stream), layout(host).flatten())

    like = np.ones_like(layout(host))
    made = adapt_device_out(x, like.shape, array.dtype, device, stream)
    assert made.target is not None
    device.put(like.reshape(-1), made.flat, stream)
    assert made.finish() is x
    stream.synchronize()
    assert np.array_equal(x.get(), like)


def test_cupy_out_in_place(cupy: Any, device: cuda.CudaDevice) -> None:
    out = cupy.zeros((3, 4), np.float32)
    made = adapt_device_out(out, (3, 4), np.dtype(np.float32), device)
    assert made.target is None
    assert made.flat.data.ptr == out.data.ptr
    assert made.finish() is out
    assert adapt_device_out(out, (12,), np.dtype(np.float32), device).flat.data.ptr == out.data.ptr
    with pytest.raises(ConfigError, match=r"out has shape \(3, 4\), the result has \(4, 3\)"):
        adapt_device_out(out, (4, 3), np.dtype(np.float32), device)
    with pytest.raises(ConfigError, match="out has dtype float32, the result has int32"):
        adapt_device_out(out, (3, 4), np.dtype(np.int32), device)
    with pytest.raises(ConfigError, match="share their memory"):
        adapt_device_out(cupy.broadcast_to(out[:, :1], (3, 4)), (3, 4), np.dtype(np.float32), device)


def test_overlaps(cupy: Any, device: cuda.CudaDevice) -> None:
    x = cupy.zeros(8, np.float32)
    array = adapt_device(x, device)
    for out, expected in ((x, False), (x[1:5], True), (cupy.zeros(8, np.float32), False)):
        assert overlaps(array, adapt_device_out(out, out.shape, array.dtype, device)) == expected


def test_the_stream_of_cupy(cupy: Any, device: cuda.CudaDevice) -> None:
    x = cupy.zeros(8, np.float32)
    assert adapt_device(x, device).stream == cupy.cuda.Stream.null
    with cupy.cuda.Stream(non_blocking=True) as stream:
        assert current_stream(x) == stream
        assert adapt_device(x, device).stream == stream
        seen = OnStream(x, current_stream(x))
    assert adapt_device(seen, device).stream == stream
    assert adapt_device(x, device, stream.ptr).stream == stream
    assert adapt_device(x, device, stream).stream is stream


def test_streams_that_cannot_be_used(cupy: Any, device: cuda.CudaDevice) -> None:
    x = cupy.zeros(8, np.float32)
    with pytest.raises(ConfigError, match="default stream of a thread"):
        adapt_device(x, device, cupy.cuda.Stream.ptds)
    with pytest.raises(ConfigError, match="stream= takes"):
        adapt_device(x, device, "stream")
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        try:
            with pytest.raises(ConfigError, match="captured into a CUDA graph"):
                adapt_device(x, device)
        finally:
            stream.end_capture()


def test_another_device(cupy: Any, device: cuda.CudaDevice) -> None:
    with pytest.raises(ConfigError, match=r"a CuPy array on cuda:0 .*: this rank uses cuda:7 \(.*device='cuda:0'"):
        adapt_device(cupy.zeros(2), Elsewhere(device))  # type: ignore[arg-type]


def test_verbs_of_the_host_say_what_to_pass(cupy: Any) -> None:
    with pytest.raises(ConfigError, match=r"a CuPy array on cuda:0 .*: pass x.get\(\)"):
        adapt(cupy.zeros(2))


# --- torch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SUPPORTED_NAMES)
def test_torch(torch: Any, device: cuda.CudaDevice, name: str, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape).to(getattr(torch, name)).to("cuda:0")
    assert is_on_device(x)
    assert not is_on_device(x.cpu())
    array = adapt_device(x, device)
    assert (array.shape, array.dtype) == (shape, dtype_of(name))
    assert array.flat.data.ptr == x.data_ptr()
    torch.cuda.synchronize()
    assert np.array_equal(on_host(array.flat, array.stream), np.ones(x.numel(), dtype_of(name)))

    result = device.empty(x.numel(), array.dtype, array.stream)
    device.copy(array.flat, result, array.stream)
    back = array.restore(result)
    assert type(back) is torch.Tensor
    assert (back.shape, back.dtype, back.device) == (x.shape, x.dtype, x.device)
    assert back.data_ptr() == result.data.ptr
    assert torch.equal(back.cpu(), x.cpu())


def test_a_result_of_torch_keeps_its_memory(torch: Any, device: cuda.CudaDevice) -> None:
    x = torch.arange(1 << 16, dtype=torch.float32, device="cuda:0")
    array = adapt_device(x, device)
    flat = device.empty(x.numel(), array.dtype, array.stream)
    device.copy(array.flat, flat, array.stream)
    back = array.restore(flat)
    del flat
    for _ in range(8):
        device.empty(x.numel(), array.dtype, array.stream).fill(-1)
    assert torch.equal(back, x)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_torch_in_any_layout(torch: Any, device: cuda.CudaDevice, name: str) -> None:
    whole = torch.arange(12, device="cuda:0").reshape(3, 4).to(getattr(torch, name))
    for x in (whole.T, whole[:, ::2], whole[:, 1], whole[:, :1].expand(3, 5)):
        array = adapt_device(x, device)
        flat = on_host(array.flat, array.stream)
        assert flat.astype(np.float32).tolist() == x.float().cpu().flatten().tolist()
    out = whole[:, ::2]
    made = adapt_device_out(out, (3, 2), dtype_of(name), device)
    made.flat.view(np.int16 if name == "bfloat16" else np.int32)[...] = 0
    assert made.finish() is out
    torch.cuda.synchronize()
    assert whole.float().cpu().tolist() == [[0, 1, 0, 3], [0, 5, 0, 7], [0, 9, 0, 11]]


def test_the_stream_of_torch(torch: Any, device: cuda.CudaDevice) -> None:
    x = torch.ones(4, device="cuda:0")
    assert adapt_device(x, device).stream.ptr == torch.cuda.current_stream().cuda_stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        array = adapt_device(x, device)
    assert array.stream.ptr == stream.cuda_stream
    assert adapt_device(x, device, stream).stream.ptr == stream.cuda_stream
    assert adapt_device(OnStream(x, stream), device).stream.ptr == stream.cuda_stream


def test_tensors_with_a_gradient(torch: Any, device: cuda.CudaDevice) -> None:
    x = torch.ones(4, device="cuda:0", requires_grad=True)
    array = adapt_device(x, device)
    assert not array.restore(array.flat.copy()).requires_grad


def test_tensors_that_cannot_be_exchanged(torch: Any, device: cuda.CudaDevice) -> None:
    with pytest.raises(ConfigError, match=r"pass x.to_dense\(\)"):
        adapt_device(torch.zeros(2, 2, device="cuda:0").to_sparse(), device)
    with pytest.raises(ConfigError, match=r"pass x.resolve_conj\(\)"):
        adapt_device(torch.zeros(2, dtype=torch.complex64, device="cuda:0").conj(), device)
    with pytest.raises(ConfigError, match=r"torch.float8_e4m3fn is not supported"):
        adapt_device(torch.zeros(2, device="cuda:0").to(torch.float8_e4m3fn), device)
    with pytest.raises(ConfigError, match=r"a torch tensor on cuda:0 .*: pass x.cpu\(\)"):
        adapt(torch.zeros(2, device="cuda:0"))


# --- JAX --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OF_JAX)
def test_jax(jax: Any, device: cuda.CudaDevice, name: str, shape: tuple[int, ...]) -> None:
    x = jax.numpy.ones(shape, name)
    assert is_on_device(x)
    array = adapt_device(x, device)
    assert (array.shape, array.dtype) == (shape, dtype_of(name))
    if x.size:
        assert array.flat.data.ptr == x.unsafe_buffer_pointer()
    assert np.array_equal(on_host(array.flat, array.stream), np.ones(x.size, dtype_of(name)))

    result = device.empty(x.size, array.dtype, array.stream)
    device.copy(array.flat, result, array.stream)
    back = array.restore(result)
    assert isinstance(back, jax.Array)
    assert (back.shape, back.dtype, back.devices()) == (shape, x.dtype, x.devices())
    assert bool((back == x).all())


def test_jax_arrays_that_cannot_be_exchanged(jax: Any, device: cuda.CudaDevice) -> None:
    with pytest.raises(ConfigError, match="out cannot be a JAX array"):
        adapt_device_out(jax.numpy.ones(2), (2,), np.dtype(np.float32), device)
    with pytest.raises(ConfigError, match=r"pass jax.device_get\(x\)"):
        adapt(jax.numpy.ones(2))


# --- others -----------------------------------------------------------------------------------------------------------


class ByInterface:
    """An array of an unknown library, by ``__cuda_array_interface__`` alone."""

    def __init__(self, array: Any, *, is_read_only: bool = False, stream: int | None = None) -> None:
        self._array = array
        self.__cuda_array_interface__ = {
            **array.__cuda_array_interface__,
            "data": (array.data.ptr, is_read_only),
            "stream": stream,
        }


class ByDlpack:
    """An array of an unknown library, by DLPack alone."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("kind", [ByInterface, ByDlpack])
def test_any_other_library(cupy: Any, device: cuda.CudaDevice, kind: Any) -> None:
    host = np.arange(12, dtype=np.float32).reshape(3, 4)
    x = cupy.asarray(host)
    for given, expected in ((x, host), (x.T, host.T), (x[:, ::2], host[:, ::2]), (x[:0], host[:0])):
        array = adapt_device(kind(given), device)
        assert (array.shape, array.dtype) == (expected.shape, host.dtype)
        assert np.array_equal(on_host(array.flat, array.stream), expected.flatten())
        assert type(array.restore(array.flat)) is cupy.ndarray
    assert adapt_device(kind(x), device).flat.data.ptr == x.data.ptr


def test_an_interface_that_names_a_stream(cupy: Any, device: cuda.CudaDevice) -> None:
    theirs, ours = cupy.cuda.Stream(non_blocking=True), device.stream()
    with theirs:
        x = cupy.full(1 << 20, 3, np.float32)
    array = adapt_device(ByInterface(x, stream=theirs.ptr), device, ours)
    assert (on_host(array.flat, ours) == 3).all()


def test_an_interface_that_is_read_only(cupy: Any, device: cuda.CudaDevice) -> None:
    x = cupy.zeros(4, np.float32)
    assert adapt_device_out(ByInterface(x), (4,), x.dtype, device).flat.data.ptr == x.data.ptr
    with pytest.raises(ConfigError, match="out is read-only"):
        adapt_device_out(ByInterface(x, is_read_only=True), (4,), x.dtype, device)
