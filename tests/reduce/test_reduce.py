"""Every op on every dtype against NumPy, and the same bits however a buffer is cut."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfcomm.arrays.dtypes import SUPPORTED_NAMES, dtype_of
from kfcomm.arrays.reduce import Kernel, float16, kernel, supports
from kfcomm.arrays.reduce.kernels import BLOCK, divide
from kfcomm.errors import ConfigError
from kfcomm.types import Op

INTEGERS = {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
HALVES = {"float16", "bfloat16"}
FLOATS = HALVES | {"float32", "float64"}
COMPLEX = {"complex64", "complex128"}
ALLOWED = {
    Op.SUM: INTEGERS | FLOATS | COMPLEX,
    Op.AVG: FLOATS | COMPLEX,
    Op.PROD: INTEGERS | FLOATS | COMPLEX,
    Op.MIN: INTEGERS | FLOATS | {"bool"},
    Op.MAX: INTEGERS | FLOATS | {"bool"},
    Op.AND: INTEGERS | {"bool"},
    Op.OR: INTEGERS | {"bool"},
    Op.XOR: INTEGERS | {"bool"},
}
PRODUCT = [(op, name) for op in Op for name in SUPPORTED_NAMES]
SUPPORTED = [(op, name) for op, name in PRODUCT if name in ALLOWED[op]]
REFUSED = [(op, name) for op, name in PRODUCT if name not in ALLOWED[op]]
SIZE = 3  # ranks


def numbers(name: str, count: int, seed: int) -> np.ndarray:
    """Finite numbers of every magnitude; integers and bool of all bit patterns."""
    rng = np.random.default_rng(seed)
    if name == "bool":
        return rng.integers(0, 2, count).astype(bool)
    if name in INTEGERS:
        return rng.integers(0, 256, count * np.dtype(name).itemsize, dtype=np.uint8).view(name)
    if name in COMPLEX:
        return rng.standard_normal(2 * count).astype(np.dtype(name).type(0).real.dtype).view(name)
    return (rng.standard_normal(count) * 2.0 ** rng.integers(-14, 8, count)).astype(dtype_of(name))


def oracle(op: Op, inputs: list[np.ndarray]) -> np.ndarray:
    """The reduction written out with NumPy's operators, elements as they should be rounded."""
    dtype = inputs[0].dtype
    if dtype.name in HALVES:
        inputs = [x.astype(np.float32) for x in inputs]
    acc = inputs[0]
    with np.errstate(all="ignore"):
        for x in inputs[1:]:
            match op:
                case Op.SUM | Op.AVG:
                    acc = acc + x
                case Op.PROD if dtype.kind == "c":
                    product = np.empty_like(acc)
                    product.real = acc.real * x.real - acc.imag * x.imag
                    product.imag = acc.real * x.imag + acc.imag * x.real
                    acc = product
                case Op.PROD:
                    acc = acc * x
                case Op.MIN:
                    acc = (
                        np.where(np.isnan(acc) | (acc < x), acc, x)
                        if acc.dtype.kind == "f"
                        else np.where(acc < x, acc, x)
                    )
                case Op.MAX:
                    acc = (
                        np.where(np.isnan(acc) | (acc > x), acc, x)
                        if acc.dtype.kind == "f"
                        else np.where(acc > x, acc, x)
                    )
                case Op.AND:
                    acc = acc & x
                case Op.OR:
                    acc = acc | x
                case Op.XOR:
                    acc = acc ^ x
        if op is Op.AVG:
            acc = (acc.view(acc.real.dtype) / acc.real.dtype.type(len(inputs))).view(acc.dtype)
        return acc.astype(dtype)


def reduce_all(k: Kernel, inputs: list[np.ndarray], cuts: tuple[int, ...] = ()) -> np.ndarray:
    """Reduce with a kernel as the runtime does, chunk by chunk."""
    result = np.empty_like(inputs[0])
    bounds = [0, *cuts, len(result)]
    for start, end in zip(bounds, bounds[1:], strict=False):
        acc = np.empty(end - start, k.accumulate_dtype)
        k.fold(inputs[0][start:end], inputs[1][start:end], acc)
        for x in inputs[2:]:
            k.fold(acc, x[start:end], acc)
        k.finish(acc, result[start:end], len(inputs))
    return result


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("count", [0, 1, 8, 1000, BLOCK + float16.SHORT + 5])
@pytest.mark.parametrize(("op", "name"), SUPPORTED)
def test_reduction_is_numpys(op: Op, name: str, count: int) -> None:
    inputs = [numbers(name, count, seed) for seed in range(SIZE)]
    assert same_bits(reduce_all(kernel(op, dtype_of(name)), inputs), oracle(op, inputs))


@pytest.mark.parametrize(("op", "name"), SUPPORTED)
def test_out_may_be_either_operand_and_operands_of_either_dtype(op: Op, name: str) -> None:
    k = kernel(op, dtype_of(name))
    for count in (7, float16.SHORT + 3):
        a, b = (numbers(name, count, seed) for seed in (1, 2))
        wide_a, wide_b = (x.astype(k.accumulate_dtype) for x in (a, b))
        expected = np.empty(count, k.accumulate_dtype)
        k.fold(a, b, expected)
        for left, right in ((a, wide_b), (wide_a, b), (wide_a, wide_b)):
            out = np.empty(count, k.accumulate_dtype)
            k.fold(left, right, out)
            assert same_bits(out, expected)
        into_a, into_b = wide_a.copy(), wide_b.copy()
        k.fold(into_a, b, into_a)
        k.fold(a, into_b, into_b)
        assert same_bits(into_a, expected)
        assert same_bits(into_b, expected)


@st.composite
def any_bits(draw: st.DrawFn, name: str) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Two operands, and where to cut them. No two NaN meet: which of them wins is up to the processor."""
    dtype = dtype_of(name)
    count = draw(st.sampled_from([1, 17, 300, 2 * float16.SHORT + 100]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if name == "bool":
        a, b = rng.integers(0, 2, (2, count)).astype(bool)
    else:
        a, b = (rng.integers(0, 256, count * dtype.itemsize, dtype=np.uint8).view(dtype) for _ in range(2))
    if name in COMPLEX:
        part = a.real.dtype
        a, b = (np.nan_to_num(x.view(part)).view(dtype) for x in (a, b))
    elif name in FLOATS:
        with np.errstate(invalid="ignore"):
            b = np.where(np.isnan(b), dtype.type(0), b)
    cuts = tuple(sorted(draw(st.lists(st.integers(0, count), max_size=6))))
    return a, b, cuts


@pytest.mark.parametrize(("op", "name"), SUPPORTED)
@settings(max_examples=15)
@given(data=st.data())
def test_bits_do_not_depend_on_cuts(op: Op, name: str, data: st.DataObject) -> None:
    a, b, cuts = data.draw(any_bits(name))
    k = kernel(op, dtype_of(name))
    assert same_bits(reduce_all(k, [a, b], cuts), reduce_all(k, [a, b]))
    whole = np.empty(len(a), k.accumulate_dtype)
    k.fold(a, b, whole)
    with np.errstate(invalid="ignore"):
        in_place = a.astype(k.accumulate_dtype)
    for start, end in zip((0, *cuts), (*cuts, len(a)), strict=True):
        k.fold(in_place[start:end], b[start:end], in_place[start:end])
    assert same_bits(in_place, whole)


@pytest.mark.parametrize("name", sorted(COMPLEX))
def test_complex_product_is_a_product(name: str) -> None:
    a, b = numbers(name, 20000, 1), numbers(name, 20000, 2)
    tolerance = 8 * np.finfo(name).eps
    assert np.all(
        np.abs(reduce_all(kernel("prod", np.dtype(name)), [a, b]) - a * b) <= tolerance * np.abs(a) * np.abs(b)
    )


@pytest.mark.parametrize("name", sorted(FLOATS))
@pytest.mark.parametrize("op", [Op.MIN, Op.MAX])
def test_nan_wins(op: Op, name: str) -> None:
    dtype = dtype_of(name)
    a = np.array([np.nan, 1, -np.inf, np.nan], dtype)
    b = np.array([1, np.nan, np.nan, np.inf], dtype)
    assert np.isnan(reduce_all(kernel(op, dtype), [a, b])).all()


@pytest.mark.parametrize("name", sorted(HALVES))
@pytest.mark.parametrize("op", [Op.MIN, Op.MAX])
def test_every_half_against_others(op: Op, name: str) -> None:
    """By value, in float64; the first NaN wins, and -0 is less than 0."""
    every = np.arange(2**16, dtype=np.uint16)
    k = kernel(op, dtype_of(name))
    for other in (every, np.roll(every, 1), np.roll(every, 12345), every[::-1].copy(), every ^ 0x8000):
        a, b = every.view(k.dtype), other.view(k.dtype)
        with np.errstate(invalid="ignore"):
            x, y = a.astype(np.float64), b.astype(np.float64)
        less = (x < y) | ((x == y) & np.signbit(x))
        first = np.isnan(x) | (~np.isnan(y) & (less if op is Op.MIN else ~less))
        out = np.empty_like(a)
        k.fold(a, b, out)
        assert out.tobytes() == np.where(first, every, other).tobytes()
        into = b.copy()
        k.last(a, into, into, 2)
        assert same_bits(into, out)


def test_integers_wrap_around() -> None:
    a = np.array([127, -128], np.int8)
    assert reduce_all(kernel("sum", a.dtype), [a, a]).tolist() == [-2, 0]
    assert reduce_all(kernel("prod", a.dtype), [a, a]).tolist() == [1, 0]


@pytest.mark.parametrize("name", sorted(FLOATS | COMPLEX))
@pytest.mark.parametrize("op", [Op.SUM, Op.AVG, Op.PROD])
@pytest.mark.parametrize("count", [4, 4 * float16.SHORT])
def test_floating_point_exceptions_stay_silent(op: Op, name: str, count: int) -> None:
    dtype = dtype_of(name)
    largest = 3e38 if name == "bfloat16" else np.finfo(dtype).max
    a = np.resize(np.array([largest, np.inf, largest, np.nan], dtype), count)
    b = np.resize(np.array([largest, -np.inf, -largest, 0], dtype), count)
    before = np.geterr()
    with np.errstate(all="raise"):
        result = reduce_all(kernel(op, dtype), [a, b, a])
        assert np.geterr() == dict.fromkeys(before, "raise")
    assert np.geterr() == before
    assert not np.isfinite(result[1])
    assert np.isnan(result[3])


def test_halves_are_summed_in_float32() -> None:
    for name in sorted(HALVES):
        dtype = dtype_of(name)
        inputs = [np.array([x], dtype) for x in (4096, 1, 1, 1, 1, 1, 1, 1, 1, -4096)]
        assert kernel("sum", dtype).accumulate_dtype == np.float32
        assert reduce_all(kernel("sum", dtype), inputs)[0] == 8
    assert kernel("max", np.dtype("float16")).accumulate_dtype == np.float16


def test_average_of_halves_does_not_overflow_in_between() -> None:
    a = np.array([60000], np.float16)
    assert reduce_all(kernel("avg", a.dtype), [a, a])[0] == np.float16(60000)


@pytest.mark.parametrize(("op", "name"), SUPPORTED)
def test_without_a_need_to_finish_the_fold_is_the_result(op: Op, name: str) -> None:
    k = kernel(op, dtype_of(name))
    a, b = numbers(name, 9, 1), numbers(name, 9, 2)
    acc = np.empty(9, k.accumulate_dtype)
    k.fold(a, b, acc)
    assert k.needs_finish == (op is Op.AVG or k.accumulate_dtype != k.dtype)
    if k.accumulate_dtype == k.dtype:
        expected = reduce_all(k, [a, b])
        k.finish(acc, acc, 2)
        assert same_bits(acc, expected)


@pytest.mark.parametrize("name", ["int32", "float16", "float32", "complex64", "bfloat16"])
def test_unaligned_buffers(name: str) -> None:
    a, b = numbers(name, 5000, 1), numbers(name, 5000, 2)
    k = kernel("sum", dtype_of(name))
    memory = bytearray(b"?" + a.tobytes())
    unaligned = np.frombuffer(memory, k.dtype, offset=1)
    assert same_bits(reduce_all(k, [unaligned, b]), reduce_all(k, [a, b]))


@pytest.mark.parametrize("name", ["float16", "float32", "complex128"])
def test_threads_fold_at_once(name: str) -> None:
    k = kernel("prod", dtype_of(name))
    a, b = numbers(name, 20000, 1), numbers(name, 20000, 2)
    expected, results = reduce_all(k, [a, b]), []
    threads = [
        threading.Thread(target=lambda: results.extend(reduce_all(k, [a, b]) for _ in range(20))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    assert all(same_bits(result, expected) for result in results)


@pytest.mark.parametrize(("op", "name"), REFUSED)
def test_meaningless_reductions_are_refused(op: Op, name: str) -> None:
    assert not supports(op, dtype_of(name))
    with pytest.raises(ConfigError, match=rf"op {op} .*{name}"):
        kernel(op, dtype_of(name))


@pytest.mark.parametrize(("op", "name"), SUPPORTED)
def test_supports_what_there_is(op: Op, name: str) -> None:
    assert supports(op, dtype_of(name))
    assert supports(op.value, dtype_of(name))


@pytest.mark.parametrize(
    ("op", "name", "hint"),
    [
        ("avg", "int32", "use sum"),
        ("sum", "bool", "use or"),
        ("prod", "bool", "use and"),
        ("and", "float32", "integers"),
    ],
)
def test_a_refusal_says_what_would_do(op: str, name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        kernel(op, np.dtype(name))


def test_unknown_ops_and_dtypes() -> None:
    with pytest.raises(ConfigError, match=r"'median' is unknown; known are sum, avg"):
        kernel("median", np.dtype("float32"))
    assert not supports("median", np.dtype("float32"))
    with pytest.raises(ConfigError, match="not supported"):
        kernel("sum", np.dtype("datetime64[s]"))


def test_a_kernel_is_made_once() -> None:
    assert kernel("sum", np.dtype("float32")) is kernel(Op.SUM, np.dtype(np.float32))


@pytest.mark.parametrize("op", [Op.SUM, Op.AVG])
@pytest.mark.parametrize("name", ["float32", "float64", "complex64", "float16", "bfloat16", "int32"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_the_last_fold_is_a_fold_and_a_finish(name: str, op: Op, size: int) -> None:
    """To the bit, also in place: an average divides in blocks what a pass of its own would divide."""
    if name == "int32" and op is Op.AVG:
        return
    k = kernel(op, dtype_of(name))
    rng = np.random.default_rng(size)
    for count in (0, 3, 1000, BLOCK + 3, 3 * BLOCK):
        a, b = (rng.normal(0, 1000, count).astype(k.dtype) for _ in range(2))
        acc, expected, out = np.empty(count, k.accumulate_dtype), np.empty_like(a), np.empty_like(a)
        k.fold(a, b, acc)
        k.finish(acc, expected, size)
        k.last(a, b, out, size)
        assert out.tobytes() == expected.tobytes()
        k.last(a, b, a, size)
        assert a.tobytes() == expected.tobytes()


@pytest.mark.parametrize("size", [1, 2, 3, 8, 1024])
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_dividing_is_division_to_the_bit(name: str, size: int) -> None:
    bits = np.random.default_rng(size).integers(0, 256, 80000, dtype=np.uint8).view(name)
    out = np.empty_like(bits)
    with np.errstate(all="ignore"):
        divide(bits, size, out)
        assert out.tobytes() == np.true_divide(bits, size).tobytes()
