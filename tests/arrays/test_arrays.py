"""Every kind, layout and type of array in, and the same kind out."""

from __future__ import annotations

import array
import ctypes
import mmap
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kfcomm.arrays import adapt, adapt_out, dtype_name, dtype_of, overlaps, same_memory
from kfcomm.arrays.dtypes import NUMPY_NAMES, SUPPORTED_NAMES
from kfcomm.errors import ConfigError

MATRIX = np.arange(12, dtype=np.float32).reshape(3, 4)


class Dlpack:
    """An array of an unknown library that speaks DLPack."""

    def __init__(self, values: np.ndarray, device: int = 1) -> None:
        self.values = values
        self.device = device

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0


class Standard(Dlpack):
    """An array of an unknown library that follows the array API standard."""

    def __array_namespace__(self) -> type[Standard]:
        return Standard

    @classmethod
    def from_dlpack(cls, values: np.ndarray) -> Standard:
        return cls(values)


class OnGpu:
    """Array with the CUDA interface, as of CuPy and Numba."""

    __cuda_array_interface__ = {"shape": (2,), "typestr": "<f4", "version": 3}  # noqa: RUF012


class WithArray:
    """An object that NumPy can read."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.values


# --- dtypes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SUPPORTED_NAMES)
def test_names_of_dtypes(name: str) -> None:
    dtype = dtype_of(name)
    assert dtype.isnative
    assert dtype_name(dtype) == name
    if name in NUMPY_NAMES:
        assert dtype == np.dtype(name)
        assert dtype_name(dtype.newbyteorder()) == name


@pytest.mark.parametrize(
    "dtype", ["O", "U3", "S3", "M8[s]", "m8[s]", "V4", [("a", "i4")], np.longdouble, np.clongdouble]
)
def test_other_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(ConfigError, match=r"not supported; supported are bool, int8, .*complex128, bfloat16"):
        dtype_name(np.dtype(dtype))


def test_float8_is_refused() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(ConfigError, match="float8_e4m3fn is not supported"):
        adapt(np.zeros(2, ml_dtypes.float8_e4m3fn))


@pytest.mark.parametrize("name", ["", "float", "i4", "object", "float128", "bfloat17"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="supported are"):
        dtype_of(name)


def test_bfloat16_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    dtype_of.cache_clear()
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ConfigError, match=r'pip install "kfcomm\[bfloat16\]"'):
        dtype_of("bfloat16")
    monkeypatch.undo()
    assert dtype_of("bfloat16").itemsize == 2


def test_no_optional_package_is_imported() -> None:
    code = (
        "import sys, numpy as np\n"
        "from kfcomm import arrays\nfrom kfcomm.arrays import reduce\n"
        "h = arrays.adapt(np.ones(3, np.float32)); h.restore(h.flat); arrays.adapt([1, 2])\n"
        "reduce.kernel('sum', h.dtype).fold(h.flat, h.flat, h.flat)\n"
        "print([name for name in ('torch', 'jax', 'ml_dtypes', 'cupy') if name in sys.modules])\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- NumPy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 0, 3), (2, 3, 4)])
@pytest.mark.parametrize("name", SUPPORTED_NAMES)
def test_contiguous_arrays_are_not_copied(name: str, shape: tuple[int, ...]) -> None:
    x = np.ones(shape, dtype_of(name))
    host = adapt(x)
    assert (host.shape, host.dtype, host.size, host.nbytes) == (shape, x.dtype, x.size, x.nbytes)
    assert host.flat.shape == (x.size,)
    assert host.is_view
    assert same_memory(host.flat, x.reshape(-1)) == (x.size > 0)
    result = np.zeros_like(host.flat)
    back = host.restore(result)
    assert type(back) is np.ndarray
    assert (back.shape, back.dtype) == (shape, x.dtype)
    assert np.shares_memory(back, result) == (x.size > 0)


@pytest.mark.parametrize(
    "x",
    [
        MATRIX.T,
        np.asfortranarray(MATRIX),
        MATRIX[:, ::2],
        MATRIX[::-1],
        MATRIX[:, 1:3],
        np.broadcast_to(np.float32(3), (2, 3)),
        MATRIX.astype(">f4"),
        MATRIX.astype("<f4"),
        MATRIX.astype(">f4").T,
        np.array(7, ">i2"),
        np.arange(6, dtype=">c8").reshape(2, 3)[::-1, ::-1],
    ],
    ids=lambda x: f"{x.dtype.str}{x.shape}{x.strides}",
)
def test_any_layout_is_read_in_c_order(x: np.ndarray) -> None:
    before = x.copy()
    host = adapt(x)
    assert host.flat.flags.c_contiguous
    assert host.dtype.isnative
    assert np.array_equal(host.flat, x.flatten(order="C"))
    assert host.is_view == (x.flags.c_contiguous and x.dtype.isnative)
    assert host.is_view == np.shares_memory(host.flat, x)
    assert np.array_equal(host.restore(host.flat), before)
    assert np.array_equal(x, before)


def test_bfloat16_in_any_layout() -> None:
    x = MATRIX.astype(dtype_of("bfloat16"))
    assert np.array_equal(adapt(x.T).flat, x.T.flatten())
    assert np.array_equal(adapt(x[::-1]).flat, x[::-1].flatten())


def test_another_shape_for_the_result() -> None:
    stacked = adapt(np.zeros((2, 3))).restore(np.arange(12.0), (2, 2, 3))
    assert stacked.shape == (2, 2, 3)
    assert adapt(np.float64(1)).restore(np.arange(4.0), (4,)).shape == (4,)


def test_read_only_input() -> None:
    x = np.arange(4)
    x.flags.writeable = False
    assert not adapt(x).flat.flags.writeable


def test_subclasses_are_read_as_plain_arrays(tmp_path: Path) -> None:
    on_disk = np.memmap(tmp_path / "x", np.int32, "w+", shape=(2, 2))
    for x in (on_disk, np.ones(2).view(type("Mine", (np.ndarray,), {}))):
        host = adapt(x)
        assert type(host.flat) is np.ndarray
        assert np.shares_memory(host.flat, x)
        assert type(host.restore(host.flat)) is np.ndarray


def test_masked_arrays_are_refused() -> None:
    with pytest.raises(ConfigError, match="would lose its mask"):
        adapt(np.ma.array([1.0, 2.0], mask=[0, 1]))
    with pytest.raises(ConfigError, match="would lose its mask"):
        adapt_out(np.ma.array([1.0, 2.0], mask=[0, 1]), (2,), np.dtype(float))


# --- numbers, lists, buffers and others -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "name", "shape"),
    [
        (3, "int64", ()),
        (2.5, "float64", ()),
        (True, "bool", ()),
        (1j, "complex128", ()),
        (np.float16(2), "float16", ()),
        (np.uint8(2), "uint8", ()),
        ([1, 2], "int64", (2,)),
        ([[1.0, 2], (3, 4)], "float64", (2, 2)),
        ((), "float64", (0,)),
        ([np.float32(1), np.float32(2)], "float32", (2,)),
    ],
)
def test_numbers_and_lists_become_arrays(x: Any, name: str, shape: tuple[int, ...]) -> None:
    host = adapt(x)
    assert (dtype_name(host.dtype), host.shape, host.is_view) == (name, shape, False)
    back = host.restore(host.flat)
    assert type(back) is np.ndarray
    assert back.shape == shape
    assert back.tolist() == np.asarray(x).tolist()


def test_a_bfloat16_number() -> None:
    back = adapt(dtype_of("bfloat16").type(1.5))
    assert dtype_name(back.dtype) == "bfloat16"
    assert back.restore(back.flat).shape == ()


@pytest.mark.parametrize("x", [None, {}, object(), [1, "a"], [None], Decimal(1), 2**100, b"".join, {1, 2}])
def test_values_that_are_not_arrays_are_refused(x: Any) -> None:
    with pytest.raises(ConfigError, match="supported are"):
        adapt(x)


def test_ragged_lists_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected an array, got list"):
        adapt([[1], [2, 3]])


@pytest.mark.parametrize("typecode", "bBhHiIlLqQfd")
@pytest.mark.parametrize("count", [0, 3])
def test_standard_arrays(typecode: str, count: int) -> None:
    x = array.array(typecode, range(count))
    host = adapt(x)
    assert (host.shape, host.nbytes, host.is_view) == ((count,), count * x.itemsize, True)
    back = host.restore(host.flat + 1)
    assert type(back) is array.array
    assert back == array.array(typecode, range(1, count + 1))
    assert isinstance(host.restore(np.zeros(2 * count, host.dtype), (2, count)), np.ndarray)


@pytest.mark.parametrize(("x", "words"), [(b"abc", "got bytes"), ("abc", "got str")])
def test_text_is_no_array(x: Any, words: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"expected an array of numbers, {words}: pass np.frombuffer\(.*, or use a verb for objects"
    ):
        adapt(x)


def test_bytes_that_can_be_written_to() -> None:
    host = adapt(bytearray(b"\x01\x02"))
    assert (dtype_name(host.dtype), host.shape, host.is_view) == ("uint8", (2,), True)
    back = host.restore(host.flat + host.flat)
    assert type(back) is bytearray
    assert back == b"\x02\x04"


def test_memoryviews() -> None:
    host = adapt(memoryview(MATRIX))
    assert (dtype_name(host.dtype), host.shape, host.is_view) == ("float32", (3, 4), True)
    back = host.restore(host.flat * 2)
    assert type(back) is memoryview
    assert (back.format, back.shape) == ("f", (3, 4))
    strided = adapt(memoryview(b"abcd")[::-2])
    assert strided.flat.tobytes() == b"db"
    assert not strided.is_view


def test_other_buffers_give_numpy_arrays() -> None:
    with mmap.mmap(-1, 16) as memory:
        host = adapt(memory)
        assert (host.size, host.is_view, type(host.restore(host.flat.copy()))) == (16, True, np.ndarray)
        del host
    numbers = adapt((ctypes.c_double * 3)(1, 2, 3))
    assert numbers.flat.tolist() == [1, 2, 3]
    assert numbers.is_view


@pytest.mark.parametrize("x", [memoryview(b"ab").cast("c"), array.array("u", "ab")], ids=["characters", "unicode"])
@pytest.mark.filterwarnings("ignore:The 'u' type code:DeprecationWarning")
def test_buffers_without_numbers_are_refused(x: Any) -> None:
    with pytest.raises(ConfigError):
        adapt(x)


def test_dlpack() -> None:
    host = adapt(Dlpack(MATRIX))
    assert np.shares_memory(host.flat, MATRIX)
    assert host.is_view
    assert type(host.restore(host.flat.copy())) is np.ndarray
    assert np.array_equal(adapt(Dlpack(MATRIX.T)).flat, MATRIX.T.flatten())


def test_the_array_api_standard() -> None:
    host = adapt(Standard(MATRIX))
    back = host.restore(host.flat.copy())
    assert type(back) is Standard
    assert np.array_equal(back.values, MATRIX)


def test_dlpack_that_cannot_be_read() -> None:
    with pytest.raises(ConfigError, match="a Dlpack cannot be read through DLPack"):
        adapt(Dlpack(np.array([1, 2], ">i4")))


@pytest.mark.parametrize("x", [OnGpu(), Dlpack(MATRIX, device=2)])
def test_devices_are_refused(x: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=r"cannot be exchanged by this verb, .*: pass a copy in host memory; .* GPU are for all_reduce, ",
    ):
        adapt(x)


def test_objects_that_numpy_reads() -> None:
    host = adapt(WithArray(MATRIX))
    assert np.shares_memory(host.flat, MATRIX)
    assert host.is_view
    assert type(host.restore(host.flat.copy())) is np.ndarray


# --- out ------------------------------------------------------------------------------------------------------------


def fill(out: Any, shape: tuple[int, ...], name: str) -> Any:
    """Write a result to ``out`` as the runtime does."""
    dtype = dtype_of(name)
    place = adapt_out(out, shape, dtype)
    assert place.flat.flags.c_contiguous
    assert place.flat.flags.writeable
    assert place.flat.dtype == dtype
    place.flat[:] = np.arange(1, place.flat.size + 1).astype(dtype)
    return place.finish()


@pytest.mark.parametrize("name", SUPPORTED_NAMES)
@pytest.mark.parametrize(
    "view",
    [lambda x: x, lambda x: x.T, lambda x: x[:, ::2], lambda x: x[::-1], lambda x: x[1, 1, ...], lambda x: x[:0]],
    ids=["contiguous", "fortran", "strided", "backwards", "number", "empty"],
)
def test_out_of_any_layout(name: str, view: Any) -> None:
    out = view(np.zeros((3, 4), dtype_of(name)))
    assert fill(out, out.shape, name) is out
    expected = np.arange(1, out.size + 1).astype(out.dtype).reshape(out.shape)
    assert np.array_equal(out, expected)


def test_out_is_written_in_place_where_possible() -> None:
    out = np.zeros((2, 3))
    assert same_memory(adapt_out(out, (2, 3), out.dtype).flat, out.reshape(-1))
    assert not np.shares_memory(adapt_out(out.T, (3, 2), out.dtype).flat, out)


def test_out_of_another_byte_order() -> None:
    out = np.zeros(3, ">i4")
    assert fill(out, (3,), "int32") is out
    assert out.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "out", [array.array("i", [0, 0]), memoryview(bytearray(8)).cast("i"), bytearray(8), (ctypes.c_int * 2)()]
)
def test_out_of_other_kinds(out: Any) -> None:
    size = len(memoryview(out))
    name = dtype_name(adapt(out).dtype)
    assert fill(out, (size,), name) is out
    assert adapt(out).flat.tolist() == list(range(1, size + 1))


def test_dlpack_out() -> None:
    out = Dlpack(np.zeros(3))
    assert fill(out, (3,), "float64") is out
    assert out.values.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (np.zeros((2, 2)), r"out has shape \(2, 2\), the result has \(3,\)"),
        (np.zeros(3, np.float32), "out has dtype float32, the result has float64"),
        (np.zeros(3, object), "dtype object is not supported"),
        (np.broadcast_to(0.0, 3), "out is read-only"),
        (memoryview(bytes(24)).cast("d"), "out is read-only"),
        (bytes(24), "out cannot be a bytes, which cannot be written to; expected a NumPy array"),
        ([0.0, 0.0, 0.0], "out cannot be a list"),
        (np.float64(0), "out cannot be a float64"),
        (None, "out cannot be a NoneType"),
        (OnGpu(), "cannot be exchanged"),
        (np.lib.stride_tricks.as_strided(np.zeros(1), (3,), (0,)), "share their memory"),
    ],
)
def test_bad_out(out: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adapt_out(out, (3,), np.dtype("float64"))


# --- aliasing -------------------------------------------------------------------------------------------------------


def test_overlap_and_identity() -> None:
    x = np.arange(10.0)
    assert same_memory(x, x)
    assert same_memory(adapt(x).flat, adapt(x).flat)
    assert not overlaps(x, x[:])
    assert overlaps(x[:6], x[4:])
    assert overlaps(x, x[:5])
    assert not overlaps(x[:5], x[5:])
    assert not same_memory(x[:5], x[5:])
    assert overlaps(x, x.view(np.uint8)[8:])
    assert not same_memory(x[:0], x[:0])
    assert not overlaps(x[:0], x)


def test_overlap_of_strided_arrays() -> None:
    x = np.arange(10.0)
    assert not overlaps(x[::2], x[1::2])
    assert overlaps(x[::2], x[:5])
    assert overlaps(x, x[::-1])
    assert not same_memory(x, x[::-1])


@pytest.mark.parametrize("wrap", [lambda x: [x, x], lambda x: (x,), lambda x: [[1.0], [x]], lambda x: [[[x]]]])
@pytest.mark.parametrize("x", [np.ones(2), np.array(1.0), memoryview(b"ab"), array.array("d", [1.0])])
def test_a_list_of_arrays_is_no_array(wrap: Any, x: Any) -> None:
    with pytest.raises(ConfigError, match="expected an array, got a list of arrays"):
        adapt(wrap(x))
