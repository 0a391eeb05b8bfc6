"""Worlds of blocking communicators in one process: each rank has its engine, its I/O thread, and real links."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import kfcomm
from kfcomm.sync import Communicator
from kfcomm.sync.driver import Driver
from kfcomm.transports.shm.hub import Hub
from tests.processes.stage import TOKEN, served

TRANSPORTS = ("shm", "unix", "tcp")


@contextlib.contextmanager
def joined(transport: str, size: int = 2) -> Iterator[list[Communicator]]:
    """The communicators of all ranks, by rank; closed at the end."""
    with served() as store, ThreadPoolExecutor(size) as pool:

        def init(rank: int) -> Communicator:
            return kfcomm.sync.init(
                rank=rank, size=size, store=store.url, serve=False, token=TOKEN, transport=transport, device="none",
                timeout=1e6,
            )  # fmt: skip

        comms = list(pool.map(init, range(size)))
        try:
            yield comms
        finally:
            list(pool.map(Communicator.close, comms))


def driver_of(comm: Communicator) -> Driver:
    return comm._driver


def hub_of(comm: Communicator) -> Hub:
    """Of a communicator that shares memory."""
    (hub,) = (poller for poller in driver_of(comm).reactor.pollers if isinstance(poller, Hub))
    return hub


def until(condition: Callable[[], Any]) -> None:
    """Look until it holds, letting others run."""
    pause = threading.Event()
    while not condition():
        pause.wait(1e-4)


class Call:
    """A call on a thread of its own."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        self._future: Future[Any] = Future()

        def run() -> None:
            try:
                self._future.set_result(function(*arguments, **options))
            except BaseException as error:  # noqa: BLE001  the test asks for it
                self._future.set_exception(error)

        self.thread = threading.Thread(target=run)
        self.thread.start()

    @property
    def ident(self) -> int:
        return self.thread.ident or 0

    def done(self) -> bool:
        return self._future.done()

    def error(self) -> BaseException | None:
        self.thread.join()
        return self._future.exception()

    def result(self) -> Any:
        self.thread.join()
        return self._future.result()


def leading(comm: Communicator, name: str, **options: Any) -> Call:
    """An ``all_reduce`` of 1 whose caller drives the engine, and sleeps by now."""
    turns = driver_of(comm).turns
    call = Call(comm.all_reduce, 1, name, **options)
    until(lambda: turns.leader == call.ident and turns.is_resting)
    return call


def following(comm: Communicator, name: str, function: Callable[..., Any] | None = None, **options: Any) -> Call:
    """The same of one who waits for the leader."""
    turns = driver_of(comm).turns
    before = len(turns.followers)
    call = Call(function or comm.all_reduce, 1, name, **options)
    until(lambda: len(turns.followers) > before)
    return call


def at_rest(comm: Communicator) -> bool:
    """Whether no caller is inside, and nothing of an earlier call is left."""
    turns = driver_of(comm).turns
    flags = turns.leader, turns.io_driver.is_masked, turns.followers, turns.reactor.is_driven, turns.lock.is_working
    return not any(flags)
