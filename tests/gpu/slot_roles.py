"""Roles of actors whose ranks fold each other's device memory: on a GPU, or on a fake device that they keep."""

from __future__ import annotations

import asyncio
import time
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from kfcomm.arrays.dtypes import NUMPY_NAMES
from kfcomm.arrays.reduce import kernel, supports
from kfcomm.collectives.on_device import calls
from kfcomm.errors import KfcommError
from kfcomm.types import Op
from tests.gpu.arrays import on_device

if TYPE_CHECKING:
    from tests.processes.actor import Actor

VERBS = ("all_reduce", "many", "reduce", "broadcast", "all_gather", "gather", "reduce_scatter", "all_to_all")


def given(me: Actor, values: Any) -> Any:
    """An array on the device of the actor."""
    fake = me.kept.get("device")
    return on_device(values) if fake is None else fake.array(values)


def numbers(rank: int, dtype: np.dtype[Any], count: int) -> Any:
    """Values of a rank that every rank knows; of floating-point numbers also infinities, and some NaN."""
    rng = np.random.default_rng([rank, count, dtype.num])
    if dtype.kind in "biu":
        return rng.integers(0, 2 if dtype.kind == "b" else 120, count).astype(dtype)
    parts = rng.standard_normal(2 * count) * 10.0 ** rng.integers(-3, 4, 2 * count)
    parts[rng.integers(0, 2 * count, 3)] = np.inf, -np.inf, np.nan
    with np.errstate(all="ignore"):
        return parts.view(np.complex128).astype(dtype) if dtype.kind == "c" else parts[:count].astype(dtype)


def folded(op: Op, rows: list[Any]) -> Any:
    """The fold of all rows in their order, by the kernels of the host."""
    folds, acc = kernel(op, rows[0].dtype), rows[0]
    for row in rows[1:-1]:
        acc, before = np.empty(len(row), folds.accumulate_dtype), acc
        folds.fold(before, row, acc)
    out = np.empty_like(rows[0])
    folds.last(acc, rows[-1], out, len(rows))
    return out


async def all_sizes(me: Actor) -> None:
    """Carry out small calls, too, in device slots."""
    calls.SLOTS_NBYTES = 0


async def bits(me: Actor, *, count: int, shift: int) -> list[str]:
    """All dtypes and ops; those whose result differs in any bit. Arrays begin ``shift`` elements into their memory."""
    comm, wrong = me.comm, []
    for name in NUMPY_NAMES:
        dtype = np.dtype(name)
        rows = [numbers(rank, dtype, count) for rank in range(comm.size)]
        x = given(me, np.concatenate([np.zeros(shift, dtype), rows[comm.rank]]))[shift:]
        ops = [op for op in Op if supports(op, dtype)]
        handles = {op: comm.all_reduce(x, f"bits {name} {op}", op=op) for op in ops}
        for op, handle in handles.items():
            y = (await handle).get()
            if y.tobytes() != folded(op, rows).tobytes():
                wrong.append(f"{op} of {name}")
    return wrong


async def random_program(me: Actor, *, seed: int, rounds: int) -> list[str]:
    """Verbs of names in random orders; what is wrong."""
    comm, size, rank, wrong = me.comm, me.comm.size, me.comm.rank, []
    common, own = Random(seed), Random(f"{seed} {me.comm.rank}")
    for _ in range(rounds):
        uses = [
            (f"k{name}", common.choice(VERBS), common.choice((1, 64, 5_000, 20_000, 70_000)), common.randrange(size))
            for name in common.sample(range(12), common.randint(1, 8))
        ]
        handles = {}
        for name, verb, count, root in own.sample(uses, len(uses)):
            handles[name] = _begun(me, name, verb, count * size, root)
            if own.random() < 0.2:
                await asyncio.sleep(0)
        for name, verb, count, root in uses:
            y = await handles[name]
            wanted = _expected(verb, count * size, root, rank, size)
            if difference := _difference(y, wanted):
                wrong.append(f"{verb} of {count * size} under {name!r}: {difference}")
    await comm.synchronize()
    return wrong


def _values(rank: int, count: int) -> Any:
    return (np.arange(count) % 1000 + 100 * rank).astype(np.float32)


def _begun(me: Actor, name: str, verb: str, count: int, root: int) -> Any:
    comm, x = me.comm, given(me, _values(me.comm.rank, count))
    if verb == "many":
        return comm.all_reduce_many({f"a {name}": x, f"b {name}": given(me, _values(comm.rank, 3))})
    if verb in ("reduce", "broadcast", "gather"):
        return getattr(comm, verb)(x, root, name=name)
    return getattr(comm, verb)(x, name=name)


def _expected(verb: str, count: int, root: int, rank: int, size: int) -> Any:
    every = [_values(one, count) for one in range(size)]
    match verb:
        case "all_reduce":
            return np.sum(every, 0)
        case "many":
            return [np.sum(every, 0), np.sum([_values(one, 3) for one in range(size)], 0)]
        case "reduce":
            return np.sum(every, 0) if rank == root else None
        case "broadcast":
            return every[root]
        case "all_gather":
            return np.stack(every)
        case "gather":
            return np.stack(every) if rank == root else None
        case "reduce_scatter":
            return np.array_split(np.sum(every, 0), size)[rank]
        case _:
            return np.concatenate([np.split(one, size)[rank] for one in every])


def _difference(found: Any, wanted: Any) -> str:
    """The difference between a result on a device and the expected one; empty for equal ones."""
    if isinstance(found, dict):
        return "".join(_difference(one, other) for one, other in zip(found.values(), wanted, strict=True))
    if found is None or wanted is None:
        return "" if found is wanted else f"{found} instead of {wanted}"
    values = found.get().reshape(-1)
    unlike = np.flatnonzero(values != wanted.reshape(-1))
    if not unlike.size:
        return ""
    at = unlike[0]
    return f"{unlike.size} unlike from {at} to {unlike[-1]}, {values[at]} instead of {wanted.reshape(-1)[at]}"


async def repeated(me: Actor, *, name: str, elements: int, calls: int) -> dict[str, Any]:
    """The same all_reduce again and again; how many were right or wrong, the error that ended it, and when."""
    comm, right, wrong = me.comm, 0, 0
    x, y = given(me, np.full(elements, comm.rank + 1, np.float32)), given(me, np.zeros(elements, np.float32))
    total = comm.size * (comm.size + 1) / 2
    error = ""
    longest_s, at_s = 0.0, time.monotonic()
    try:
        for _ in range(calls):
            begin_s = time.monotonic()
            await comm.all_reduce(x, name, out=y)
            values = y.get()
            longest_s = max(longest_s, time.monotonic() - begin_s)
            if (values == total).all():
                right += 1
            else:
                wrong += 1
    except KfcommError as failure:
        error, at_s = type(failure).__name__, time.monotonic()
    return {"right": right, "wrong": wrong, "error": error, "at_s": at_s, "longest_s": longest_s}


async def shrunk(me: Actor) -> list[Any]:
    """Go on without the lost ranks: the route, and whether device memory is exchanged there."""
    before, me.comm = me.comm, await me.comm.shrink()
    del before
    y = None
    for _ in range(5):
        y = await me.comm.all_reduce(given(me, np.ones(1 << 15, np.float32)), "after")
    values = y.get()
    await me.comm.synchronize()
    return [str(me.comm.route.route), bool((values == me.comm.size).all())]
