"""The full product of verb × op × dtype on memory links, each world of n ranks running all cases at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kfcomm.errors import CollectiveAborted, ConfigError
from kfcomm.testing import MemoryWorld
from tests.conformance import oracle
from tests.conformance.oracle import CASES, DTYPES, REFUSED
from tests.conformance.worlds import ends, same_bits, works, world

pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")

SIZES = (1, 2, 3, 5)
SHAPE = (7, 3)


def _inputs(dtype: str, size: int, shape: tuple[int, ...] = SHAPE) -> list[oracle.Array]:
    return [oracle.data(dtype, shape, 100 * rank + DTYPES.index(dtype)) for rank in range(size)]


Expect = Callable[[str, list[Any], MemoryWorld, str], list[Any]]


def _all_reduced(op: str, inputs: list[Any], comms: MemoryWorld, name: str) -> list[Any]:
    return [oracle.all_reduced(op, inputs, comms[0].strategy, name)] * len(inputs)


def _reduced(op: str, inputs: list[Any], comms: MemoryWorld, name: str) -> list[Any]:
    root = len(inputs) - 1
    return [None] * root + [oracle.reduced(op, inputs, comms[0].strategy, root)]


def _reduce_scattered(op: str, inputs: list[Any], comms: MemoryWorld, name: str) -> list[Any]:
    return oracle.reduce_scattered(op, inputs, comms[0].strategy)


REDUCING: dict[str, tuple[Callable[..., Any], Expect]] = {
    "all_reduce": (lambda comm, x, name, op: comm.all_reduce(x, name, op=op), _all_reduced),
    "reduce": (lambda comm, x, name, op: comm.reduce(x, comm.size - 1, name, op=op), _reduced),
    "reduce_scatter": (lambda comm, x, name, op: comm.reduce_scatter(x, name, op=op), _reduce_scattered),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", REDUCING)
@pytest.mark.parametrize("size", SIZES)
async def test_reducing_verbs(size: int, verb: str) -> None:
    call, expect = REDUCING[verb]
    async with world(size) as comms:
        inputs = {dtype: _inputs(dtype, size) for dtype in DTYPES}
        before = {dtype: [x.tobytes() for x in xs] for dtype, xs in inputs.items()}
        handles = {
            case: [call(comm, inputs[case[0]][comm.rank], "/".join(case), case[1]) for comm in comms] for case in CASES
        }
        wrong = []
        for (dtype, op), posted in handles.items():
            results = await asyncio.gather(*posted)
            wanted = expect(op, inputs[dtype], comms, f"{dtype}/{op}")
            wrong += [
                f"{verb} {op} of {dtype} on rank {rank}: {got!r}, expected {want!r}"
                for rank, (got, want) in enumerate(zip(results, wanted, strict=True))
                if not (got is want is None or same_bits(got, want))
            ]
        assert not wrong, "\n".join(wrong)
        assert before == {dtype: [x.tobytes() for x in xs] for dtype, xs in inputs.items()}


def _moved(verb: str, inputs: list[Any], size: int) -> list[Any]:
    last = size - 1
    match verb:
        case "broadcast":
            return [inputs[last]] * size
        case "gather":
            return [None] * last + [np.stack(inputs)]
        case "gather concat":
            return [None] * last + [np.concatenate(inputs)]
        case "all_gather":
            return [np.stack(inputs)] * size
        case "all_gather concat":
            return [np.concatenate(inputs)] * size
        case "scatter":
            return oracle.scattered(inputs[last], size)
        case "all_to_all":
            rows = len(inputs[0]) // size
            return [np.concatenate([x[rank * rows : (rank + 1) * rows] for x in inputs]) for rank in range(size)]
    return [inputs[(rank - 1) % size] for rank in range(size)]


async def _passed_on(comm: Any, x: Any, name: str) -> Any:
    """Every rank sends to the next one."""
    sent = comm.send(x, (comm.rank + 1) % comm.size, name)
    result = await comm.recv((comm.rank - 1) % comm.size, name)
    await sent
    return result


MOVING: dict[str, Callable[..., Any]] = {
    "broadcast": lambda comm, x, name: comm.broadcast(x, comm.size - 1, name),
    "gather": lambda comm, x, name: comm.gather(x, comm.size - 1, name),
    "gather concat": lambda comm, x, name: comm.gather(x, comm.size - 1, name, concat=True),
    "all_gather": lambda comm, x, name: comm.all_gather(x, name),
    "all_gather concat": lambda comm, x, name: comm.all_gather(x, name, concat=True),
    "scatter": lambda comm, x, name: comm.scatter(x, comm.size - 1, name),
    "all_to_all": lambda comm, x, name: comm.all_to_all(x, name),
    "send and recv": lambda comm, x, name: asyncio.ensure_future(_passed_on(comm, x, name)),
}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("size", "verb"),
    [(size, verb) for size in SIZES for verb in MOVING if size > 1 or verb != "send and recv"],
)
async def test_moving_verbs(size: int, verb: str) -> None:
    async with world(size) as comms:
        inputs = {dtype: _inputs(dtype, size, (2 * size, 3)) for dtype in DTYPES}
        handles = {d: [MOVING[verb](comm, inputs[d][comm.rank], d) for comm in comms] for d in DTYPES}
        wrong = []
        for dtype, posted in handles.items():
            wanted = _moved(verb, inputs[dtype], size)
            wrong += [
                f"{verb} of {dtype} on rank {rank}: {got!r}, expected {want!r}"
                for rank, (got, want) in enumerate(zip(await asyncio.gather(*posted), wanted, strict=True))
                if not (got is want is None or same_bits(got, want))
            ]
        assert not wrong, "\n".join(wrong)


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", REDUCING)
@pytest.mark.parametrize("size", SIZES)
async def test_combinations_without_a_meaning(size: int, verb: str) -> None:
    """Each is refused by one rank, whose call raises; the calls of the others are aborted, before or after."""
    call, _ = REDUCING[verb]
    async with world(size) as comms:
        good, good_op = np.ones(7, np.int32), "sum"
        wrong = []
        for number, (dtype, op) in enumerate(REFUSED):
            bad_rank, name = number % size, f"{dtype}/{op}"

            def refused(comm: Any, bad: int = bad_rank, name: str = name, dtype: str = dtype, op: str = op) -> Any:
                if comm.rank == bad:
                    return call(comm, oracle.data(dtype, 7, 1), name, op)
                return call(comm, good, name, good_op)

            outcomes = await ends(comms, refused)
            expected = [ConfigError if rank == bad_rank else CollectiveAborted for rank in range(size)]
            if [type(one) for one in outcomes] != expected:
                wrong.append(f"{verb} {op} of {dtype}: {outcomes}")
        assert not wrong, "\n".join(wrong)
        await works(comms, "/".join(REFUSED[0]))
