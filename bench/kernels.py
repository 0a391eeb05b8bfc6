"""GB/s of folding and finishing, by dtype and op, beside a plain ``np.add`` of float32 in the same run.

``PYTHONPATH=. python bench/kernels.py`` prints one row for each kernel: a leaf's contribution into a partial result
(fold), the last fold together with the finish (last), and the finish by itself. GB/s count the bytes of the
caller's dtype that come in or go out; what NumPy's own ``add`` moves is counted alike (one operand). Times are of the
processor, the best of some runs, so that others who load the machine disturb them little.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click
import numpy as np

from kfcomm.arrays.dtypes import dtype_of
from kfcomm.arrays.reduce import kernel, wire_of
from kfcomm.types import Op

RUNS = 15
CASES = (
    ("float32", "sum"),
    ("float32", "avg"),
    ("float64", "avg"),
    ("float16", "sum"),
    ("float16", "avg"),
    ("float16", "prod"),
    ("float16", "max"),
    ("bfloat16", "sum"),
    ("bfloat16", "avg"),
    ("bfloat16", "max"),
)
WIRES = ("float16", "bfloat16")
Array = np.ndarray[Any, np.dtype[Any]]


def rate(nbytes: int, work: Callable[[], object]) -> float:
    """GB/s of processor time, at best."""
    best = float("inf")
    for _ in range(RUNS):
        start_s = time.process_time()
        work()
        best = min(best, time.process_time() - start_s)
    return nbytes / best / 1e9


def in_chunks(count: int, chunk: int, work: Callable[[slice], object]) -> Callable[[], None]:
    """``work`` on every chunk, as the runtime does it."""

    def all_of_them() -> None:
        for start in range(0, count, chunk):
            work(slice(start, start + chunk))

    return all_of_them


def numbers(name: str, count: int, seed: int) -> Array:
    """Random ones around 1."""
    return np.random.default_rng(seed).normal(1, 0.1, count).astype(dtype_of(name))


def kernel_rates(name: str, op: str, count: int, nbytes_of_chunk: int, size: int) -> tuple[float, float, float]:
    """Of fold, last and finish."""
    chunk = nbytes_of_chunk // dtype_of(name).itemsize
    k = kernel(op, dtype_of(name))
    theirs = np.ones(count, k.dtype)  # of which products stay what they are
    acc, out = numbers(name, count, 1).astype(k.accumulate_dtype), np.empty_like(theirs)
    nbytes = theirs.nbytes
    fold = rate(nbytes, in_chunks(count, chunk, lambda c: k.fold(acc[c], theirs[c], acc[c])))
    last = rate(nbytes, in_chunks(count, chunk, lambda c: k.last(acc[c], theirs[c], out[c], size)))
    finish = rate(nbytes, in_chunks(count, chunk, lambda c: k.finish(acc[c], out[c], size)))
    return fold, last, finish


def wire_rates(name: str, count: int, chunk: int, size: int) -> tuple[float, float, float]:
    """Of encode, fold and last, in bytes of float32."""
    wire = wire_of(Op.SUM, np.dtype(np.float32), dtype_of(name))
    own, theirs = numbers("float32", count, 1), numbers(name, count, 2)
    out, sent = np.empty_like(own), np.empty_like(theirs)
    encode = rate(own.nbytes, in_chunks(count, chunk, lambda c: wire.encode(own[c], sent[c])))
    fold = rate(own.nbytes, in_chunks(count, chunk, lambda c: wire.fold(own[c], theirs[c], out[c])))
    last = rate(own.nbytes, in_chunks(count, chunk, lambda c: wire.last(own[c], theirs[c], size, out[c], sent[c])))
    return encode, fold, last


@click.command()
@click.option("--mib", default=4, show_default=True, help="MiB of float32 that a buffer of as many elements has.")
@click.option("--chunk", default=1 << 19, show_default=True, help="Bytes of one call, of the caller's dtype.")
@click.option("--size", default=3, show_default=True, help="Ranks, for averages.")
def main(mib: int, chunk: int, size: int) -> None:
    """Print GB/s of the kernels."""
    count = mib << 18
    a, b = numbers("float32", count, 1), numbers("float32", count, 2)
    out = np.empty_like(a)
    plain = rate(a.nbytes, in_chunks(count, chunk // 4, lambda c: np.add(a[c], b[c], a[c])))
    copy = rate(a.nbytes, in_chunks(count, chunk // 4, lambda c: np.copyto(out[c], a[c])))
    print(f"{'np.add float32':24}{plain:8.2f} GB/s    copy {copy:.2f} GB/s\n")
    print(f"{'GB/s':24}{'fold':>8}{'last':>8}{'finish':>8}")
    for name, op in CASES:
        print(f"{name + ' ' + op:24}" + "".join(f"{one:8.2f}" for one in kernel_rates(name, op, count, chunk, size)))
    print(f"\n{'float32, wire_dtype':24}{'encode':>8}{'fold':>8}{'last':>8}")
    for name in WIRES:
        print(f"{name:24}" + "".join(f"{one:8.2f}" for one in wire_rates(name, count, chunk // 4, size)))


if __name__ == "__main__":
    main()
