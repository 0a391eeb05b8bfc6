"""Pairwise covering arrays over strategy, transport, kind of array, API and dtype, and the role that runs them.

Every pair of values of any two of these stands in at least one case. Values are small integers, so that every dtype
holds every sum exactly and results are compared with NumPy's bit for bit.
"""

from __future__ import annotations

import array
import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kfcomm.arrays.dtypes import dtype_of
from tests.conformance.pairwise import Case, covering

if TYPE_CHECKING:
    from tests.processes.actor import Actor

Array = np.ndarray[Any, np.dtype[Any]]

STRATEGIES = (
    *("star", "ring", "clique", "chain_star", "tree", "binary_tree", "binary_tree_star"),
    *("multi_binary_tree_star", "multi_star", "double_tree", "binomial", "auto"),
)
TRANSPORTS = ("tcp", "unix", "shm")
APIS = ("async", "sync")
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
KINDS = ("numpy", "buffer", "numpy-noncontiguous")
ELEMENTS = (1, 7, 1000, 150_000)
"""The last one takes several chunks, of a dtype of any size."""


def can_be(kind: str, dtype: str) -> bool:
    """Whether there are arrays of this kind with this dtype."""
    match kind:
        case "buffer":
            return dtype in TYPECODES
        case "torch":
            return dtype not in ("uint16", "uint32", "uint64")
        case "jax":
            return dtype not in ("int64", "uint64", "float64", "complex128")
    return True


def cases(kinds: Sequence[str]) -> list[Case]:
    """Cases that cover every possible pair of values."""
    dtypes = [dtype for dtype in DTYPES if any(can_be(kind, dtype) for kind in kinds)]
    factors = {"strategy": STRATEGIES, "transport": TRANSPORTS, "kind": kinds, "api": APIS, "dtype": dtypes}
    return covering(factors, lambda case: can_be(case[2], case[4]))


TYPECODES = {
    "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I", "int64": "q", "uint64": "Q",
    "float32": "f", "float64": "d",
}  # fmt: skip


def _torch(values: Array) -> Any:
    import torch

    if values.dtype.name == "bfloat16":
        return torch.tensor(values.astype(np.float32)).to(torch.bfloat16)
    return torch.tensor(values)


def _jax(values: Array) -> Any:
    import jax.numpy

    return jax.numpy.asarray(values)


MAKERS: dict[str, Callable[[Array], Any]] = {
    "numpy": lambda values: values,
    "buffer": lambda values: array.array(TYPECODES[values.dtype.name], values.tobytes()),
    "numpy-noncontiguous": lambda values: np.repeat(values, 2)[::2],
    "torch": _torch,
    "jax": _jax,
}


def as_numpy(result: Any) -> Array:
    """Return the content of a library's array."""
    if hasattr(result, "detach"):
        import torch

        if result.dtype is torch.bfloat16:
            return result.float().numpy().astype(dtype_of("bfloat16"))
    array: Array = np.asarray(result)
    return array


def contribution(dtype: np.dtype[Any], elements: int, rank: int) -> Array:
    """Values from 0 to 3 (or 0 to 1)."""
    values = (np.arange(elements) * (rank + 3) // 2 + rank) % 4
    return (values > 2).astype(dtype) if dtype.kind == "b" else values.astype(dtype)


async def cover(me: Actor, *, cases: list[Case]) -> list[str]:
    """Run the cases of this transport, each with the API that it names; those that went wrong, in words."""
    wrong: list[str] = []
    for number, (strategy, _, kind, api, dtype_name) in enumerate(cases):
        elements = ELEMENTS[number % len(ELEMENTS)]
        dtype = dtype_of(dtype_name)
        parts = [contribution(dtype, elements, rank) for rank in range(me.comm.size)]
        fold = np.bitwise_or if dtype.kind == "b" else np.add
        x = MAKERS[kind](parts[me.comm.rank])
        arguments: dict[str, Any] = {"name": f"case/{number}", "op": "or" if dtype.kind == "b" else "sum"}
        if api == "async":
            await me.comm.set_strategy(strategy)
            y = await me.comm.all_reduce(x, **arguments)
        else:
            y = await asyncio.to_thread(_blocking, me, strategy, x, arguments)
        found = as_numpy(y)
        expected = functools.reduce(fold, parts)
        if found.dtype != dtype or found.tobytes() != expected.tobytes() or type(y) is not type(x):
            wrong.append(f"{cases[number]}, {elements} elements: {type(y)} {found} instead of {expected}")
    return wrong


def _blocking(me: Actor, strategy: str, x: Any, arguments: dict[str, Any]) -> Any:
    me.blocking.set_strategy(strategy)
    return me.blocking.all_reduce(x, **arguments)
