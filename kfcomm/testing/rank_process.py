"""The program of one rank of a `ProcessWorld`: it joins, and does what the test asks for, until the test hangs up.

A thread reads the requests, so that the process ends with the test's even in the midst of a call.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from kfcomm.testing.faults import Fault, FaultKind, watched

Request = tuple[Callable[..., Any], tuple[Any, ...]]


def main(requests: Connection) -> None:
    """Hear which rank this is, join, and serve ``requests``."""
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
    """The error as it can be sent: with the place where it was raised."""
    error.add_note("".join(traceback.format_exception(error)).rstrip())
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  our own words
    except Exception:  # noqa: BLE001  pickle raises what it likes
        return RuntimeError("".join(traceback.format_exception_only(error)).rstrip())
    return error


def _strike(kind: FaultKind) -> None:
    os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
