"""Roles of ranks that share a device through NCCL: many cases in flight together, in an order of the rank's own."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

import kfcomm
from kfcomm.arrays.devices import cuda
from kfcomm.errors import KfcommError
from kfcomm.rendezvous import identity
from kfcomm.types import Op, Verb
from tests.conformance import interfaces
from tests.conformance.oracle import ALLOWED, CASES, DTYPES, data
from tests.conformance.verb_table import VERBS, inputs
from tests.gpu.arrays import library, on_device
from tests.processes.roles import contribution
from tests.transports import conforming

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.processes.actor import Actor

NAMES = 8
"""In use at a time by `launches`."""
CHECKED_EVERY = 5
"""Uses of each of these names from one look at the results to the next."""


async def join(me: Actor, *, host: str = "", **settings: Any) -> list[str]:
    """Join the world; the route, and the reason. With ``host``, as a rank of this host with a device of its own."""
    library("cupy")
    look = cuda.CudaDevice._look

    def alone(device: cuda.CudaDevice) -> Any:
        return replace(look(device), uuid=f"of {me.label}") if host else look(device)

    with (
        mock.patch.object(identity, "host_id", lambda real=identity.host_id: host or real()),
        mock.patch.object(cuda.CudaDevice, "_look", alone),
    ):
        me.comm = await kfcomm.init(**settings)
    choice = me.comm.route
    assert choice is not None
    return [str(choice.route), choice.because]


async def kinds(me: Actor, *, elements: int, brief: bool = False) -> list[str]:
    """Every verb with every dtype and op, or with one op and few dtypes; the wrong results."""
    comm, size, rank = me.comm, me.comm.size, me.comm.rank
    root = size - 1
    ops = CASES if not brief else [(name, ALLOWED[name][0]) for name in DTYPES]
    cases = [(verb, name, Op(op)) for verb in conforming.REDUCING for name, op in ops]
    dtypes = DTYPES if not brief else ("bool", "bfloat16", "complex128")
    cases += [(verb, name, None) for verb in conforming.MOVING for name in dtypes]  # type: ignore[misc]
    given = {
        (verb, name): [
            data(name, elements * (size if verb in (Verb.REDUCE_SCATTER, Verb.ALL_TO_ALL) else 1), one)
            for one in range(size)
        ]
        for verb, name, _ in cases
    }
    begun: dict[Any, Any] = {}
    for verb, name, op in Random(rank).sample(cases, len(cases)):
        options: dict[str, Any] = {"name": f"{verb} {name} {op}"}
        if op is not None:
            options["op"] = op
        if verb in conforming.ROOTED:
            options["root"] = root
        x = on_device(given[verb, name][rank])
        begun[verb, name, op] = getattr(comm, verb)(x, **options), x
    results = {case: (await handle, x) for case, (handle, x) in begun.items()}
    await comm.synchronize()
    return [
        where for case in cases if (where := _wrong(case, rank, root, given[case[0], case[1]], *results[case])) != ""
    ]


def _wrong(case: tuple[Verb, str, Op | None], rank: int, root: int, given: list[Any], y: Any, x: Any) -> str:
    verb, name, op = case
    where = f"{verb} {op} of {name}"
    if x.get().tobytes() != given[rank].tobytes():
        return f"{where}: its input was changed"
    if rank != root and verb in (Verb.REDUCE, Verb.GATHER):
        return "" if y is None else f"{where}: a result on another rank than the root"
    try:
        conforming.compare(y.get().reshape(-1), conforming.expected(verb, op, root, given)[rank], op, where)
    except AssertionError as error:
        return f"{where}: {error}"
    return ""


async def rows(me: Actor, *, length: int, use: int = 0) -> list[str]:
    """Every form of every verb; the names of those with wrong results."""
    comm, size, rank = me.comm, me.comm.size, me.comm.rank
    table = [(number, row) for number, row in enumerate(VERBS) if row.on_devices]
    xs = inputs(size, length, use)
    begun = {}
    for number, row in Random(f"{rank} {use}").sample(table, len(table)):
        arguments = interfaces.arguments(
            row, _placed(None if row.parameter is None else row.give(xs[rank], rank, size))
        )
        begun[number] = getattr(comm, row.verb)(**{**arguments, "name": f"row {number}"})
    results = {number: await handle for number, handle in begun.items()}
    await comm.synchronize()
    return [row.name for number, row in table if not _equal(_fetched(results[number]), row.expected(xs)[rank])]


def _placed(given: Any) -> Any:
    if isinstance(given, dict):
        return {key: on_device(one) for key, one in given.items()}
    if isinstance(given, list):
        return [on_device(one) for one in given]
    return given if given is None else on_device(given)


def _fetched(result: Any) -> Any:
    if isinstance(result, dict):
        return {key: _fetched(one) for key, one in result.items()}
    if isinstance(result, list):
        return [_fetched(one) for one in result]
    return result.get() if hasattr(result, "get") else result


def _equal(found: Any, expected: Any) -> bool:
    try:
        np.testing.assert_equal(found, expected)
    except AssertionError:
        return False
    return True


async def steps(me: Actor, *, names: int, number: int, elements: int = 1000) -> int:
    """The same names in each step, in another order in each; how many results were right."""
    comm, size, rank = me.comm, me.comm.size, me.comm.rank
    xs = [on_device(np.full(elements, rank + 1 + name, np.float32)) for name in range(names)]
    random, right = Random(rank), 0
    for _ in range(number):
        order = random.sample(range(names), names)
        handles = {name: comm.all_reduce(xs[name], f"step/{name}") for name in order}
        ys = {name: await handle for name, handle in handles.items()}
        await comm.synchronize()
        right += sum(bool((y.get() == _total(size, name)).all()) for name, y in ys.items())
    return right


def _total(size: int, added: int) -> float:
    return size * added + size * (size + 1) / 2


async def all_reduce(me: Actor, *, name: str, elements: int, timeout: float | None = None) -> None:
    """One all_reduce, until the device has made it; it was found right."""
    size, rank = me.comm.size, me.comm.rank
    y = await me.comm.all_reduce(on_device(np.full(elements, rank + 1, np.float32)), name, timeout=timeout)
    await me.comm.synchronize()
    assert (y.get() == _total(size, 0)).all()


async def unlike(me: Actor, *, name: str) -> None:
    """One all_reduce whose shape is another on each rank, until the device has made it."""
    await me.comm.all_reduce(on_device(np.ones((3 + me.comm.rank, 2), np.float32)), name)
    await me.comm.synchronize()


async def in_groups(me: Actor, *, groups: Mapping[str, list[int]], elements: int) -> list[str]:
    """All_reduces of this rank's groups, all at once; the names of those that were wrong."""
    mine = [name for name, ranks in groups.items() if me.comm.rank in ranks]
    comms = {name: await me.comm.group(groups[name], name) for name in mine}
    begun = {name: comms[name].all_reduce(on_device(contribution(comms[name].rank, elements)), "x") for name in mine}
    ys = {name: await handle for name, handle in begun.items()}
    for name in mine:
        await comms[name].synchronize()
    wrong = []
    for name, y in ys.items():
        exact = sum(contribution(one, elements).astype(np.float64) for one in range(comms[name].size))
        wrong += [] if np.allclose(y.get(), exact, rtol=1e-4, atol=1e-5) else [name]
    return wrong


async def launches(
    me: Actor, *, number: int, elements: int, ends_at: int | None = None, by: str = "", note: str = ""
) -> dict[str, Any]:
    """So many all_reduces under a few names, until a rank is lost; what it was told, and of its results.

    This rank is sent the signal ``by`` behind the launch ``ends_at``, and writes the time into the file ``note``.
    """
    comm, size, rank = me.comm, me.comm.size, me.comm.rank
    xs = [on_device(np.full(elements, rank + 1 + name, np.float32)) for name in range(NAMES)]
    found = {"right": 0, "wrong": 0}
    try:
        for use in range(number // NAMES):
            handles = [comm.all_reduce(x, f"launch/{name}") for name, x in enumerate(xs)]
            if ends_at is not None and use >= ends_at // NAMES:
                _end(signal.Signals[by], Path(note))
            ys = [await handle for handle in handles]
            if use % CHECKED_EVERY == 0:
                await comm.synchronize()
                for name, y in enumerate(ys):
                    is_right = bool((y.get() == _total(size, name)).all())
                    found["right" if is_right else "wrong"] += 1
    except KfcommError as error:
        return {**found, "error": type(error).__name__, "rank": getattr(error, "rank", None), "at_s": time.monotonic()}
    return found


def _end(by: signal.Signals, note: Path) -> None:
    note.write_text(str(time.monotonic()))
    os.kill(os.getpid(), by)
