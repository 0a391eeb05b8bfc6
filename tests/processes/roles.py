"""Commands of an actor, see `actor`. Arguments and results are JSON values."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import json
import multiprocessing
import os
import socket
from collections.abc import Sized
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

import kfcomm
from kfcomm import sync
from kfcomm.engine.network import SocketNetwork
from kfcomm.transports.shm.link import ShmLink
from tests.processes.actor import meet

if TYPE_CHECKING:
    from tests.processes.actor import Actor


async def nothing(me: Actor) -> None:
    """Return when the test has all earlier log records."""


async def join(me: Actor, **settings: Any) -> list[int]:
    """Join the world; rank, size and the hosts of all ranks."""
    me.comm = await kfcomm.init(**settings)
    return [me.comm.rank, me.comm.size, *me.comm.layout.hosts]


async def leave(me: Actor) -> None:
    """Close the communicator."""
    await me.comm.close()


async def join_blocking(me: Actor) -> None:
    """Join the world with the blocking communicator."""
    me.blocking = await asyncio.to_thread(sync.init)


async def leave_blocking(me: Actor) -> None:
    """Close the blocking communicator."""
    await asyncio.to_thread(me.blocking.close)


async def strategy(me: Actor, *, name: str) -> None:
    """Change the strategy."""
    await me.comm.set_strategy(name)


def contribution(rank: int, elements: int) -> np.ndarray[Any, Any]:
    """Random float32 that each rank knows of every other."""
    return np.random.default_rng([rank, elements]).standard_normal(elements, np.float32)


async def all_reduce(
    me: Actor, *, name: str, elements: int = 8, timeout: float | None = None, shape: list[int] | None = None,
    **options: Any,
) -> str:  # fmt: skip
    """A digest of the result, whose values were found right."""
    x = contribution(me.comm.rank, elements).reshape(elements if shape is None else shape)
    before = x.copy()
    try:
        y = await me.comm.all_reduce(x, name=name, timeout=timeout, **options)
    finally:
        np.testing.assert_array_equal(x, before)
    if not options:
        exact = sum(contribution(rank, elements).astype(np.float64) for rank in range(me.comm.size))
        np.testing.assert_allclose(y.reshape(-1), exact, rtol=1e-4, atol=1e-5)
    return hashlib.sha256(y.tobytes()).hexdigest()


async def post(me: Actor, *, name: str, elements: int = 8, timeout: float | None = None) -> None:
    """Begin an all_reduce and keep its handle."""
    me.kept[name] = me.comm.all_reduce(contribution(me.comm.rank, elements), name=name, timeout=timeout)


async def outcome(me: Actor, *, name: str) -> None:
    """Wait for the end of what `post` began."""
    await me.kept.pop(name)


async def cancel(me: Actor, *, name: str) -> bool:
    """Cancel what `post` began."""
    return bool(me.kept.pop(name).cancel())


async def barrier(me: Actor, *, timeout: float | None = None) -> None:
    """A barrier."""
    await me.comm.barrier(timeout=timeout)


async def barrier_then_block(me: Actor, *, label: str) -> None:
    """Not one turn of the loop between the end of the barrier and the work."""
    await me.comm.barrier()
    _block(label)


async def block(me: Actor, *, label: str) -> None:
    """Do not let the loop have its turn until the test says so."""
    _block(label)


def _block(label: str) -> None:
    connection = meet(label)
    connection.recv(1)
    connection.close()


async def leave_by(me: Actor, *, way: str) -> None:
    """End the process, as programs do."""
    match way:
        case "sys.exit":
            me.failing.set_exception(SystemExit(3))
        case "an unhandled error":
            me.failing.set_exception(ZeroDivisionError("of the program"))
        case "os._exit":
            os._exit(4)


async def show(me: Actor, *, seed: int, names: int, elements: int) -> int:
    """All names at once, in a random order of this rank's own; number of wrong results."""
    inputs = {name: np.full(elements, name + me.comm.rank, np.float32) for name in range(names)}
    order = np.random.default_rng([seed, me.comm.rank]).permutation(names).tolist()
    handles = {name: me.comm.all_reduce(inputs[name], name=f"show/{name}") for name in order}
    expected = {name: sum(name + rank for rank in range(me.comm.size)) for name in order}
    return sum([not bool(np.all(await handles[name] == expected[name])) for name in order])


async def sums(me: Actor, *, strategies: list[str], elements: int) -> list[str]:
    """Digests of the same all_reduce under each strategy."""
    return [await digest_under(me.comm, name, elements) for name in strategies]


async def digest_under(comm: kfcomm.Communicator, strategy: str, elements: int) -> str:
    """Digest of the sum of random float32 under a strategy."""
    await comm.set_strategy(strategy)
    y = await comm.all_reduce(contribution(comm.rank, elements), name="sum")
    return hashlib.sha256(y.tobytes()).hexdigest()


async def unplug(me: Actor) -> int:
    """Break every data connection of this rank, as a broken cable would; their number."""
    links = me.comm._session.engine.links._links()
    for link in links:
        for descriptor in link.descriptors():
            # The other end may have broken it already.
            with socket.socket(fileno=os.dup(descriptor)) as sock, contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if isinstance(link, ShmLink):  # which has none
            link.peer_lost()
    return len(links)


async def many(me: Actor, *, count: int) -> dict[str, int]:
    """So many small collectives in a row, then the sizes of all tables of the runtime."""
    x = np.ones(8, np.float32)
    for number in range(count):
        await me.comm.all_reduce(x, name=f"many/{number % 10}")
    engine = me.comm._session.engine
    tables = {**vars(engine), **vars(engine.router), **vars(engine.links), **vars(engine.deadlines)}
    return {name: len(table) for name, table in tables.items() if isinstance(table, Sized)}


async def work(me: Actor) -> int:
    """Collectives of checked results, one after the other, until any rank has been told to `stop`; their number."""
    me.kept["stop"] = False
    count = 0
    while True:
        count += 1
        stops = me.comm.all_reduce(np.full(1, me.kept["stop"], np.int64), name="stop")
        y = await me.comm.all_reduce(np.full(3000, count + me.comm.rank), name="work")
        np.testing.assert_array_equal(y, sum(count + rank for rank in range(me.comm.size)))
        if (await stops)[0]:
            return count


async def stop(me: Actor) -> None:
    """End `work` on every rank."""
    me.kept["stop"] = True


async def listening(me: Actor) -> dict[str, Any]:
    """Return where this rank listens, and its description."""
    network = me.comm._session.network
    assert isinstance(network, SocketNetwork)
    about = asdict(network.peers[me.comm.rank])
    return {name: one.hex() if isinstance(one, bytes) else one for name, one in about.items()}


async def memory(me: Actor, *, reset: bool = False) -> dict[str, int]:
    """Resident and peak memory in bytes, number of open descriptors; ``reset`` lets the peak begin anew."""
    if reset:
        with open("/proc/self/clear_refs", "w") as file:  # noqa: ASYNC230
            file.write("5")
    with open("/proc/self/status") as file:  # noqa: ASYNC230
        fields = dict(line.split(":", 1) for line in file)
    kib = {name: int(fields[field].split()[0]) for name, field in (("now", "VmRSS"), ("peak", "VmHWM"))}
    return {**{name: 1024 * value for name, value in kib.items()}, "descriptors": len(os.listdir("/proc/self/fd"))}


async def fork(me: Actor, *, label: str, way: str, lives_on: bool) -> None:
    """Fork; the child tells what its first calls said. With ``lives_on`` it stays until the test lets it go."""
    if way == "multiprocessing":
        child = multiprocessing.get_context("fork").Process(target=_child, args=(me, label, lives_on))
        child.start()
        if not lives_on:
            await asyncio.to_thread(child.join)
    elif (pid := os.fork()) == 0:
        _child(me, label, lives_on)
    elif not lives_on:
        await asyncio.to_thread(os.waitpid, pid, 0)


def _child(me: Actor, label: str, lives_on: bool) -> None:
    try:
        connection = meet(label)
        said = []
        for call in (lambda: me.comm.all_reduce(np.ones(3), name="child"), me.comm.barrier):
            try:
                call()
            except kfcomm.KfcommError as error:
                said.append(f"{type(error).__name__}: {error}")
        connection.sendall(json.dumps({"id": 1, "ok": said}).encode() + b"\n")
        if lives_on:
            connection.recv(1)
    finally:
        os._exit(0)


async def fork_and_join(me: Actor, *, label: str) -> None:
    """Fork; the child joins a world of its own, when the test asks it to."""
    child = os.fork()
    if child == 0:
        try:
            connection = meet(label)
            for name in [name for name in os.environ if name.startswith("KFCOMM_")]:
                del os.environ[name]
            with sync.init() as comm:
                said = [comm.rank, comm.size]
            connection.sendall(json.dumps({"id": 1, "ok": said}).encode() + b"\n")
        finally:
            os._exit(0)
    await asyncio.to_thread(os.waitpid, child, 0)


async def has_posted(me: Actor, *, name: str) -> bool:
    """Returns once this rank has posted a collective of this name: roles begin in order, so that is now."""
    engine = me.comm._session.engine
    return any(one.key.name == name for one in engine.router.live)


async def make_group(me: Actor, *, name: str, ranks: list[int]) -> None:
    """Make a group, on its members."""
    if me.comm.rank in ranks:
        me.kept[name] = await me.comm.group(ranks, name)


async def group_all_reduce(me: Actor, *, group: str, elements: int = 8) -> str:
    """A digest of the result in a group."""
    comm = me.kept[group]
    y = await comm.all_reduce(contribution(comm.rank, elements), name="in the group")
    return hashlib.sha256(y.tobytes()).hexdigest()


async def clone(me: Actor, *, label: str) -> None:
    """Make a child that holds all descriptors of this process, without running Python's fork hooks."""
    if ctypes.CDLL(None).fork() == 0:
        meet(label).recv(1)
        os._exit(0)
