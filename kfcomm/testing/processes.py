"""A world of real processes on this host, and the program of each rank, which runs the functions of the test.

Invariants: no process outlives its world. Where a rank has failed, was killed or stopped, the others are killed at the
end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from kfcomm.testing.faults import Fault, FaultKind, FaultPlan, Killed, watched

LEAVING_S = 30.0
"""A process that leaves a whole world takes far less; the bound turns a hang into a kill."""


class ProcessWorld:
    """The ranks of a job, each a process. Functions are sent by name, arguments and results by pickle."""

    def __init__(
        self, size: int, faults: FaultPlan, store: str, token: str, *, is_blocking: bool, **options: Any
    ) -> None:
        faults.check(size, ("kill", "stop"))
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_whole = not faults.faults
        for rank in range(size):
            settings = {"rank": rank, "size": size, "store": store, "token": token, "serve": False, **options}
            connection, process = _started()
            self._connections.append(connection)
            self._processes.append(process)
            connection.send((settings, faults.of(rank), is_blocking))

    def __len__(self) -> int:
        return len(self._processes)

    def pid(self, rank: int) -> int:
        """The process id of a rank."""
        return self._processes[rank].pid

    def kill(self, rank: int) -> None:
        """End the process of ``rank`` by SIGKILL."""
        self._is_whole = False
        self._processes[rank].kill()

    def stop(self, rank: int) -> None:
        """Stop the process of ``rank`` by SIGSTOP."""
        self._is_whole = False
        os.kill(self.pid(rank), signal.SIGSTOP)

    def begin(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Have every rank call ``function(comm, *args)``."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it was killed
                connection.send((function, args))

    def outcome(self, rank: int) -> Any:
        """Next result or error of a rank, `Killed` if it has ended; blocks until it comes."""
        try:
            is_result, said = self._connections[rank].recv()
        except (EOFError, OSError):
            self._is_whole = False
            return Killed(f"the process of rank {rank} has ended")
        if not is_result:
            self._is_whole = False
            said.add_note(f"on rank {rank}")
        return said

    async def soon(self, rank: int) -> Any:
        """Await `outcome` on an event loop."""
        loop, told = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._connections[rank].fileno(), told.set)
        try:
            await told.wait()
        finally:
            loop.remove_reader(self._connections[rank].fileno())
        return self.outcome(rank)

    def close(self, *, kindly: bool) -> None:
        """End every process: after a goodbye if ``kindly`` and nothing has failed, else at once."""
        # In an orderly end the ranks wait for each other, and so for one that has failed, was killed or stopped.
        kindly = kindly and self._is_whole
        for connection, process in zip(self._connections, self._processes, strict=True):
            if kindly:
                connection.send(None)
            else:
                process.kill()
        # In a second round, since ranks leave together.
        for connection, process in zip(self._connections, self._processes, strict=True):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LEAVING_S)
            process.kill()
            process.wait()
            connection.close()


def _started() -> tuple[Connection, subprocess.Popen[bytes]]:
    """Start a process that waits for its rank; it has the module path of this process."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "kfcomm.testing.processes", str(theirs.fileno())],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    return Connection(ours.detach()), process


@contextlib.contextmanager
def process_world(size: int, faults: FaultPlan, *, is_blocking: bool, **options: Any) -> Iterator[ProcessWorld]:
    """A world of ``size`` processes, which are joining; all have ended at the end."""
    token = secrets.token_hex(32)
    with _served(token) as store:
        world = ProcessWorld(size, faults, store, token, is_blocking=is_blocking, **options)
        try:
            yield world
        except BaseException:
            world.close(kindly=False)
            raise
        world.close(kindly=True)


@contextlib.contextmanager
def _served(token: str) -> Iterator[str]:
    """Serve a store on a thread of this process, in place of a launcher; return its address."""
    ready: SimpleQueue[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = SimpleQueue()

    async def serve() -> None:
        from kfcomm.rendezvous.store import StoreServer  # here: the ranks import this module, too

        server, done = await StoreServer.start("127.0.0.1", token=token.encode()), asyncio.Event()
        ready.put((server.url, asyncio.get_running_loop(), done))
        await done.wait()
        await server.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), name="kfcomm-store")
    thread.start()
    url, loop, done = ready.get()
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()


Request = tuple[Callable[..., Any], tuple[Any, ...]]


def main(requests: Connection) -> None:
    """Receive the rank, join, and serve ``requests``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test, which ends this process
    settings, faults, is_blocking = requests.recv()
    try:
        if is_blocking:
            _blocking(requests, settings, faults)
        else:
            asyncio.run(_awaiting(requests, settings, faults))
    except Exception as error:  # noqa: BLE001  the test is told of any: it may be waiting for this rank to join
        _send(requests, (False, _told(error)))


async def _awaiting(requests: Connection, settings: dict[str, Any], faults: tuple[Fault, ...]) -> None:
    from kfcomm.joining import init

    waiting: asyncio.Queue[Request | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    async with init(**settings) as comm:
        mine = watched(comm, faults, _strike)
        requests.send((True, None))
        _read(requests, lambda request: loop.call_soon_threadsafe(waiting.put_nowait, request))
        while (request := await waiting.get()) is not None:
            function, args = request
            try:
                answer = (True, await function(mine, *args))
            except Exception as error:  # noqa: BLE001  the test is told of any
                answer = (False, _told(error))
            _send(requests, answer)


def _blocking(requests: Connection, settings: dict[str, Any], faults: tuple[Fault, ...]) -> None:
    from kfcomm.sync import init

    waiting: SimpleQueue[Request | None] = SimpleQueue()
    with init(**settings) as comm:
        mine = watched(comm, faults, _strike)
        requests.send((True, None))
        _read(requests, waiting.put)
        while (request := waiting.get()) is not None:
            function, args = request
            try:
                answer = (True, function(mine, *args))
            except Exception as error:  # noqa: BLE001  the test is told of any
                answer = (False, _told(error))
            _send(requests, answer)


def _read(requests: Connection, put: Callable[[Request | None], object]) -> None:
    """Hand on each request, and None for the last; end the process when the test is gone."""
    # On a thread: so the process ends with that of the test, even during a call.

    def read() -> None:
        try:
            while (request := requests.recv()) is not None:
                put(request)
            put(None)
        except EOFError:
            os._exit(1)

    threading.Thread(target=read, daemon=True, name="kfcomm-requests").start()


def _send(requests: Connection, answer: tuple[bool, Any]) -> None:
    try:
        requests.send(answer)
    except Exception as error:  # noqa: BLE001  pickle raises what it likes
        requests.send((False, _told(TypeError(f"the result cannot be sent to the test: {error}"))))


def _told(error: Exception) -> Exception:
    """Return the error in a form that can be sent, with the place where it was raised."""
    error.add_note("".join(traceback.format_exception(error)).rstrip())
    try:
        # Also loaded: an exception whose arguments are not those of its class can be dumped only.
        pickle.loads(pickle.dumps(error))  # noqa: S301  our own words
    except Exception:  # noqa: BLE001  pickle raises what it likes
        return RuntimeError("".join(traceback.format_exception_only(error)).rstrip())
    return error


def _strike(kind: FaultKind) -> None:
    os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
