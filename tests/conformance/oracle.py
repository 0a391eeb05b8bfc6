"""Expected results of the verbs, in plain NumPy: data of every dtype, and folds in the order of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kfcomm.arrays.dtypes import NUMPY_NAMES
from kfcomm.core.graph import Graph
from kfcomm.core.signature import WHOLE_BELOW, pair_of, share_out, split
from kfcomm.strategies import AnyStrategy
from kfcomm.strategies.builtin import star_around
from kfcomm.types import Op

Array = np.ndarray[Any, np.dtype[Any]]

INTEGERS = tuple(name for name in NUMPY_NAMES if "int" in name)
REALS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
DTYPES = (*NUMPY_NAMES, "bfloat16")

ALLOWED = {
    **dict.fromkeys(INTEGERS, ("sum", "min", "max", "prod", "and", "or", "xor")),
    "bool": ("min", "max", "and", "or", "xor"),
    **dict.fromkeys(REALS, ("sum", "avg", "min", "max", "prod")),
    **dict.fromkeys(COMPLEX, ("sum", "avg", "prod")),
}
"""The ops that have a meaning, by dtype: the rules of the library, written down a second time."""

CASES = tuple((name, op) for name in DTYPES for op in ALLOWED[name])
REFUSED = tuple((name, str(op)) for name in DTYPES for op in Op if str(op) not in ALLOWED[name])


def dtype_called(name: str) -> np.dtype[Any]:
    """The NumPy dtype; bfloat16 comes from ``ml_dtypes``."""
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def data(name: str, shape: int | tuple[int, ...], seed: int) -> Array:
    """Reproducible values all over the range of a dtype (moderate ones for floats, so that products stay finite)."""
    dtype = dtype_called(name)
    random = np.random.default_rng(seed)
    if dtype.kind in "biu":
        count = int(np.prod(shape))
        raw = random.integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
        return (raw % 2 == 1).reshape(shape) if dtype.kind == "b" else raw.view(dtype).reshape(shape)
    values = random.normal(size=shape)
    if dtype.kind == "c":
        return np.asarray(values + 1j * random.normal(size=shape)).astype(dtype)
    return np.asarray(values).astype(dtype)


def _combined(op: str, a: Array, b: Array) -> Array:
    """``a ∘ b`` in the dtype of ``a``."""
    match op:
        case "sum" | "avg":
            return a + b
        case "prod" if a.dtype.kind == "c":
            out = np.empty_like(a)
            out.real = a.real * b.real - a.imag * b.imag
            out.imag = a.real * b.imag + a.imag * b.real
            return out
        case "prod":
            return a * b
        case "min":
            return np.minimum(a, b)
        case "max":
            return np.maximum(a, b)
        case "and":
            return a & b
        case "or":
            return a | b
    return a ^ b


def _folded(op: str, graph: Graph, rank: int, inputs: Sequence[Array]) -> Array:
    partial = inputs[rank]
    for child in graph.children[rank]:
        partial = _combined(op, partial, _folded(op, graph, child, inputs))
    return partial


def folded(op: str, graph: Graph, inputs: Sequence[Array]) -> Array:
    """The inputs of all ranks folded along one graph, children in the graph's order: exact to the last bit."""
    dtype = inputs[0].dtype
    is_half = dtype.name in ("float16", "bfloat16") and op in ("sum", "avg", "prod")
    wide = [one.astype(np.float32) for one in inputs] if is_half else list(inputs)
    with np.errstate(all="ignore"):
        total = _folded(op, graph, graph.root, wide)
        if op == "avg":
            size = len(inputs)
            if dtype.kind == "c":
                parts = total.view(total.real.dtype)
                total = (parts / parts.dtype.type(size)).view(total.dtype)
            else:
                total = total / total.dtype.type(size)
        return total.astype(dtype)


def all_reduced(op: str, inputs: Sequence[Array], strategy: AnyStrategy, name: str | None) -> Array:
    """Result of ``all_reduce`` under this name: each graph pair folds its part of the elements."""
    shape = inputs[0].shape
    flats = [np.ascontiguousarray(one).reshape(-1) for one in inputs]
    graphs = strategy.select(flats[0].nbytes)
    count = flats[0].size
    if graphs.goes_whole:
        return folded(op, star_around(len(flats), 0), flats).reshape(shape)
    if graphs.is_whole or (count < WHOLE_BELOW and not graphs.direct and graphs.exchange is None):
        pair = graphs.pairs[pair_of(name or "", len(graphs.pairs), graphs.shares)]
        return folded(op, pair.reduce, flats).reshape(shape)
    pairs = graphs.pairs if graphs.exchange is None else graphs.exchange.graphs()
    bounds = share_out(count, graphs.shares) if graphs.shares else split(count, len(pairs))
    parts = [
        folded(op, pair.reduce, [flat[at : at + length] for flat in flats])
        for pair, (at, length) in zip(pairs, bounds, strict=True)
    ]
    return np.concatenate(parts).reshape(shape)


def reduced(op: str, inputs: Sequence[Array], strategy: AnyStrategy, root: int) -> Array:
    """Result of ``reduce`` at its root."""
    graphs = strategy.select(inputs[0].nbytes)
    return folded(op, graphs.rooted(root).reduce, [one.reshape(-1) for one in inputs]).reshape(inputs[0].shape)


def reduce_scattered(op: str, inputs: Sequence[Array], strategy: AnyStrategy) -> list[Array]:
    """Results of ``reduce_scatter``, by rank."""
    graphs = strategy.select(inputs[0].nbytes)
    results = []
    for rank, (at, rows) in enumerate(split(inputs[0].shape[0], len(inputs))):
        parts = [np.ascontiguousarray(one[at : at + rows]) for one in inputs]
        flat = folded(op, graphs.rooted(rank).reduce, [part.reshape(-1) for part in parts])
        results.append(flat.reshape(parts[0].shape))
    return results


def scattered(x: Array, size: int) -> list[Array]:
    """The parts of ``scatter`` of one array."""
    return [x[at : at + rows] for at, rows in split(x.shape[0], size)]
