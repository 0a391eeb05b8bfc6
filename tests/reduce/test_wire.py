"""Numbers are rounded once before they travel, as NumPy rounds; folds are in float32; rounding twice is as once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kfcomm.arrays.dtypes import SUPPORTED_NAMES, dtype_of
from kfcomm.arrays.reduce import Wire, float16, wire_dtype_of, wire_of
from kfcomm.arrays.reduce.kernels import BLOCK
from kfcomm.errors import ConfigError
from kfcomm.types import Op

WIRES = ("float16", "bfloat16")
PAIRS = [(wire, name) for wire in WIRES for name in ("float32", "float64", wire)]
OPS = (Op.SUM, Op.AVG, Op.PROD, Op.MIN, Op.MAX)
COUNTS = (0, 1, 9, float16.SHORT + 1, BLOCK + float16.SHORT + 5)
SIZES = (1, 3, 4)


def wire(op: Op | None, name: str, wire_name: str) -> Wire:
    dtype = dtype_of(name)
    return wire_of(op, dtype, wire_dtype_of(wire_name, dtype))


def data(name: str, count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(count) * 2.0 ** rng.integers(-26, 18, count)
    if count > 100:
        x[:4] = [np.inf, -np.inf, np.nan, -0.0]
    with np.errstate(all="ignore"):
        return x.astype(dtype_of(name))


def rounded(x: np.ndarray, wire_name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return x.astype(np.float32).astype(dtype_of(wire_name))


def combined(op: Op, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    functions = {Op.SUM: np.add, Op.AVG: np.add, Op.PROD: np.multiply, Op.MIN: np.minimum, Op.MAX: np.maximum}
    with np.errstate(all="ignore"):
        return functions[op](a.astype(np.float32), b.astype(np.float32))


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """The same bits, but for which of several NaN it is: where two meet, that is up to the processor."""
    nan = np.isnan(a.astype(np.float64))
    return (
        a.dtype == b.dtype
        and bool((nan == np.isnan(b.astype(np.float64))).all())
        and a[~nan].tobytes() == b[~nan].tobytes()
    )


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("wire_name", "name"), PAIRS)
def test_to_the_wire_and_back(wire_name: str, name: str, count: int) -> None:
    w, x = wire(None, name, wire_name), data(name, count, 1)
    sent, got, again = np.empty(count, w.wire_dtype), np.empty_like(x), np.empty(count, w.wire_dtype)
    with np.errstate(all="raise"):
        w.encode(x, sent)
        w.decode(sent, got)
        w.encode(got, again)
    assert sent.tobytes() == rounded(x, wire_name).tobytes()
    assert again.tobytes() == sent.tobytes()
    with np.errstate(all="ignore"):
        assert got.tobytes() == sent.astype(w.dtype).tobytes()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("wire_name", "name"), PAIRS)
def test_folding_and_finishing(wire_name: str, name: str, op: Op, count: int) -> None:
    w, own = wire(op, name, wire_name), data(name, count, 1)
    first, second = (data(wire_name, count, seed) for seed in (2, 3))
    partial, out, sent = np.empty(count, np.float32), np.empty_like(own), np.empty(count, w.wire_dtype)
    for size in SIZES:
        with np.errstate(all="raise"):
            w.fold(own, first, partial)
            expected = combined(op, own, first)
            assert same(partial, expected)
            for travels in (sent, None):
                w.last(partial, second, size, out, travels)
                with np.errstate(all="ignore"):
                    total = combined(op, expected, second)
                    total = total / np.float32(size) if op is Op.AVG else total
                    as_sent = total.astype(w.wire_dtype)
                    kept = as_sent if travels is not None else total
                    assert same(out, kept.astype(w.dtype))
                assert travels is None or same(sent, as_sent)
            w.finish(own, 1, out, sent)
            assert same(sent, rounded(own, wire_name))


@pytest.mark.parametrize("wire_name", WIRES)
def test_in_place_and_in_pieces(wire_name: str) -> None:
    w = wire(Op.AVG, "float32", wire_name)
    own, theirs = data("float32", BLOCK + 700, 1), data(wire_name, BLOCK + 700, 2)
    whole, sent = np.empty_like(own), np.empty_like(theirs)
    w.last(own, theirs, 3, whole, sent)
    pieces, sent_in_pieces = own.copy(), np.empty_like(theirs)
    for cut in (slice(0, 5), slice(5, 5000), slice(5000, None)):
        w.last(pieces[cut], theirs[cut], 3, pieces[cut], sent_in_pieces[cut])
    assert same(pieces, whole)
    assert same(sent_in_pieces, sent)


def test_one_wire_serves_several_threads_at_once() -> None:
    wire, x = wire_of(Op.SUM, np.dtype(np.float32), np.dtype(np.float16)), np.full(1 << 16, 1.5, np.float32)

    def encode(_: int) -> float:
        out = np.empty(x.size, np.float16)
        for _ in range(50):
            wire.encode(x, out)
        return float(out.sum(dtype=np.float64))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(encode, range(4))) == [1.5 * x.size] * 4


@pytest.mark.parametrize("wire_name", WIRES)
def test_the_error_that_is_stated(wire_name: str) -> None:
    precision, smallest = {"float16": (11, 2.0**-25), "bfloat16": (8, 2.0**-134)}[wire_name]
    w, rng = wire(None, "float64", wire_name), np.random.default_rng(1)
    x = rng.uniform(1, 2, 100000) * 2.0 ** rng.integers(-40, 15, 100000) * rng.choice([-1, 1], 100000)
    sent, got = np.empty(len(x), w.wire_dtype), np.empty_like(x)
    w.encode(x, sent)
    w.decode(sent, got)
    by_float32 = 1 + 2.0**-12  # float64 is rounded to float32 first
    assert (np.abs(got - x) <= np.maximum(np.abs(x) * 2.0**-precision, smallest) * by_float32).all()


@pytest.mark.parametrize("wire_name", WIRES)
@pytest.mark.parametrize("name", [name for name in SUPPORTED_NAMES if name not in {"float32", "float64"}])
def test_dtypes_that_a_wire_dtype_cannot_carry_are_refused(wire_name: str, name: str) -> None:
    if name == wire_name:
        assert wire_dtype_of(wire_name, dtype_of(name)) == dtype_of(name)
        return
    with pytest.raises(ConfigError, match=f"wire_dtype {wire_name} cannot carry {name}: it takes"):
        wire_dtype_of(wire_name, dtype_of(name))


@pytest.mark.parametrize("unknown", ["float8", "", "float32", 16, np.float32, None, [1]])
def test_unknown_wires(unknown: object) -> None:
    with pytest.raises(ConfigError, match="known are bfloat16, float16"):
        wire_dtype_of(unknown, np.dtype(np.float32))
