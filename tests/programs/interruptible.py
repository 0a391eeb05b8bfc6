"""One rank that is interrupted, or helps one that is: a process that does what the test tells it, one thing at a time.

Signals reach the main thread alone, so the blocking calls run there, and what the test says is read in between.

An interrupt comes at a *place*: as a line of kfcomm is about to run, a signal becomes pending, as if it had arrived at
that moment: SIGINT, or SIGALRM with a handler that raises one of `RAISED`. Python lets the handler raise at the next
point at which it looks for signals. (A trace function that raised by itself would do so where no signal ever does, for
example within the end of a ``with``.)
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import kfcomm
from kfcomm import sync

PACKAGE = str(Path(kfcomm.__file__).parent)
X = np.arange(4, dtype=np.float32)
KEPT = "kept"
LOOPING = "looping"
HANG_S = 60.0


class Alarm(Exception):
    """Of a program's own alarm."""


CTRL_C = "KeyboardInterrupt"
RAISED: dict[str, Callable[[], BaseException]] = {
    "Alarm": Alarm,
    "TimeoutError": lambda: TimeoutError("of a handler"),
    "ConnectionResetError": lambda: ConnectionResetError(104, "of a handler"),
    "BlockingIOError": lambda: BlockingIOError(11, "of a handler"),
    "CollectiveAborted": lambda: kfcomm.CollectiveAborted("of a handler"),
    "SessionClosed": lambda: kfcomm.SessionClosed("of a handler"),
    "CancelledError": lambda: asyncio.CancelledError("of a handler"),
    "SystemExit": lambda: SystemExit(3),
}
"""What a handler may raise: of a class of its own, or of one that kfcomm and what it uses raise, too."""

Place = tuple[str, int, int]
"""File, line, and the how-manieth time that it runs in a call."""
Call = Callable[[], Any]


# ---------------------------------------------------------------- what is interrupted


def _persistent(prepared: sync.PersistentCollective[Any]) -> Call:
    return lambda: prepared.start().wait()


INTERRUPTIBLE: dict[str, Callable[[sync.Communicator, str], Call]] = {
    "all_reduce": lambda comm, name: lambda: comm.all_reduce(X, name),
    "wait": lambda comm, name: comm.all_reduce_async(X, name).wait,
    "persistent": lambda comm, name: _persistent(comm.all_reduce_init(X, name)),
    "persistent run": lambda comm, name: comm.all_reduce_init(X, name).run,
    "all_reduce_many": lambda comm, name: lambda: comm.all_reduce_many({name: X, "b": X}),
    "monitored_all_reduce": lambda comm, name: lambda: comm.monitored_all_reduce(X, name),
    "reduce": lambda comm, name: lambda: comm.reduce(X, 0, name),
    "broadcast": lambda comm, name: lambda: comm.broadcast(X, 0, name),
    "gather": lambda comm, name: lambda: comm.gather(X, 0, name),
    "all_gather": lambda comm, name: lambda: comm.all_gather(X, name),
    "all_gather concat": lambda comm, name: lambda: comm.all_gather(X, name, concat=True),
    "scatter": lambda comm, name: lambda: comm.scatter(X, 0, name),
    "reduce_scatter": lambda comm, name: lambda: comm.reduce_scatter(X, name),
    "all_to_all": lambda comm, name: lambda: comm.all_to_all(X, name),
    "barrier": lambda comm, name: lambda: comm.barrier(name),
    "consensus": lambda comm, name: lambda: comm.consensus(X, name),
    "broadcast_object": lambda comm, name: lambda: comm.broadcast_object(name, 0, name),
    "all_gather_object": lambda comm, name: lambda: comm.all_gather_object(name, name),
    "gather_object": lambda comm, name: lambda: comm.gather_object(name, 0, name),
    "scatter_object": lambda comm, name: lambda: comm.scatter_object([name] * comm.size, 0, name),
    "send": lambda comm, name: lambda: comm.send(X, 1, name),
    "recv": lambda comm, name: lambda: comm.recv(1, name),
    "recv_any": lambda comm, name: lambda: comm.recv_any(None, name),
    "send_object": lambda comm, name: lambda: comm.send_object(name, 1, name),
    "recv_object": lambda comm, name: lambda: comm.recv_object(1, name),
    "put": lambda comm, name: lambda: comm.queue(name, 0, 1).put(X),
    "get": lambda comm, name: lambda: comm.queue(name, 1, 0).get(),
    "save": lambda comm, name: lambda: comm.save(name, X),
    "request": lambda comm, name: lambda: comm.request(KEPT, 1),
    "set_strategy": lambda comm, name: lambda: comm.set_strategy("ring"),
    "synchronize": lambda comm, name: comm.synchronize,
}
"""By verb, how rank 0 gets ready to make a call of a name, or a message of that tag."""

HELPERS: dict[str, Callable[[sync.Communicator, str], Any]] = {
    "wait": lambda comm, name: comm.all_reduce_async(X, name),
    "persistent": lambda comm, name: comm.all_reduce_async(X, name),
    "persistent run": lambda comm, name: comm.all_reduce_async(X, name),
    "all_reduce_many": lambda comm, name: comm.all_reduce_many_async({name: X, "b": X}),
    "reduce": lambda comm, name: comm.reduce_async(X, 0, name),
    "broadcast": lambda comm, name: comm.broadcast_async(X, 0, name),
    "gather": lambda comm, name: comm.gather_async(X, 0, name),
    "all_gather concat": lambda comm, name: comm.all_gather_async(X, name, concat=True),
    "scatter": lambda comm, name: comm.scatter_async(None, 0, name),
    "barrier": lambda comm, name: comm.barrier_async(name),
    "broadcast_object": lambda comm, name: comm.broadcast_object_async(None, 0, name),
    "all_gather_object": lambda comm, name: comm.all_gather_object_async(name, name),
    "gather_object": lambda comm, name: comm.gather_object_async(name, 0, name),
    "scatter_object": lambda comm, name: comm.scatter_object_async(None, 0, name),
    "send": lambda comm, name: comm.recv_async(0, name),
    "recv": lambda comm, name: comm.send_async(X, 0, name),
    "recv_any": lambda comm, name: comm.send_async(X, 0, name),
    "send_object": lambda comm, name: comm.recv_object_async(0, name),
    "recv_object": lambda comm, name: comm.send_object_async(name, 0, name),
    "put": lambda comm, name: comm.queue(name, 0, 1).get_async(),
    "get": lambda comm, name: comm.queue(name, 1, 0).put_async(X),
    "save": lambda comm, name: None,
    "request": lambda comm, name: None,
    "set_strategy": lambda comm, name: comm.set_strategy_async("ring"),
    "synchronize": lambda comm, name: None,
}
"""By verb, how rank 1 begins its part; of those left out, as rank 0."""

BETWEEN_TWO = {"send", "recv", "recv_any", "send_object", "recv_object", "put", "get", "request"}
RECEIVING = {"recv", "recv_any", "recv_object", "get"}
"""Of those, what takes a message: one that was not returned is there for the next one."""
UNNAMED = {"set_strategy"}
"""After an interrupt the ranks may have made a different number of these: the world is not used any more."""


def begin(comm: sync.Communicator, verb: str, name: str) -> Any:
    """Started part of rank 1, or None."""
    make = HELPERS.get(verb)
    return getattr(comm, f"{verb}_async")(X, name) if make is None else make(comm, name)


# ---------------------------------------------------------------- lines


class Lines:
    """Traces the lines of kfcomm that the calling thread runs."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, int], int] = {}

    def start(self) -> None:
        """From now on."""
        sys.settrace(self._called)

    def stop(self) -> None:
        """No more."""
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._traced if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _traced(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            where = (frame.f_code.co_filename[len(PACKAGE) + 1 :], frame.f_lineno)
            times = self._times[where] = self._times.get(where, 0) + 1
            self.at((*where, times))
        return self._traced

    def at(self, place: Place) -> None:
        """A line is about to run."""


class Recorded(Lines):
    """Recorder of executed lines.

    Attributes:
        places: in their order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: list[Place] = []

    def at(self, place: Place) -> None:
        """See `Lines`."""
        self.places.append(place)


class Interrupting(Lines):
    """A signal comes at one place, after a pause in which other threads do what they can.

    Attributes:
        has_come: it has.
    """

    def __init__(self, place: Place, number: int = signal.SIGINT, pause_s: float = 0.0) -> None:
        super().__init__()
        self.has_come = False
        self._place = place
        self._number = number
        self._pause_s = pause_s

    def at(self, place: Place) -> None:
        """See `Lines`."""
        if place == self._place:
            sys.settrace(None)
            if self._pause_s:
                time.sleep(self._pause_s)
            self.has_come = True

    def _traced(self, frame: FrameType, event: str, arg: Any) -> Any:
        super()._traced(frame, event, arg)
        if self.has_come:
            # An operator, not a call: from here to the line of kfcomm Python does not look for signals.
            _ = None in map(_thread.interrupt_main, (self._number,))
            return None
        return self._traced


# ---------------------------------------------------------------- the process


class Rank:
    """The process, and its connection to the test: an `tests.processes.stage.Actor`, whose roles are methods here."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._handle: Any = None
        self._hang_s = HANG_S
        self._comm: sync.Communicator

    def obey(self) -> None:
        """Until the test says that this was all. What hangs shows where, and ends."""
        while line := self._lines.readline():
            faulthandler.dump_traceback_later(self._hang_s, exit=True)
            order = json.loads(line)
            if order["do"] == "end":
                break
            do = getattr(self, order["do"].rpartition(".")[2])
            self._tell(id=order["id"], ok=do(**order["args"]))
        self._lines.close()
        self._connection.close()

    def _tell(self, **message: Any) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def join(self, **settings: Any) -> None:
        """Join the world. What makes rank 0 hang may make the other wait: rank 0 is the first to say so."""
        self._hang_s *= 1 + settings.get("rank", 0) / 2
        self._comm = sync.init(device="none", **settings)
        self._comm.save(KEPT, X)
        self._comm.barrier("begin")

    def record(self, verb: str, names: list[str]) -> list[list[Place]]:
        """The places of the call, each time that it is made."""
        found = []
        for name in names:
            lines, call = Recorded(), INTERRUPTIBLE[verb](self._comm, name)
            lines.start()
            try:
                call()
            finally:
                lines.stop()
            found.append(lines.places)
        return found

    def interrupt(self, verb: str, name: str, place: list[Any], raises: str, pause_s: float) -> str:
        """Make the call; how it ended.

        Returns:
            ``interrupted``, ``returned`` (the result was there first), ``missed`` (the place was not run), or what else
            came.
        """
        number, error = signal.SIGINT, None
        if raises != CTRL_C:
            number, error = signal.SIGALRM, RAISED[raises]()
            signal.signal(number, partial(_raise, error))
        lines, has_returned = Interrupting((place[0], place[1], place[2]), number, pause_s), False
        try:
            call = INTERRUPTIBLE[verb](self._comm, name)
            lines.start()
            call()
            has_returned = True
            lines.stop()
        except BaseException as came:  # noqa: BLE001  the test judges it
            if came is not error and not (error is None and isinstance(came, KeyboardInterrupt)):
                return f"{type(came).__name__}: {came}"
            return "returned" if has_returned else "interrupted"
        finally:
            lines.stop()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return "swallowed" if lines.has_come else "missed"

    def again(self, verb: str, name: str) -> str:
        """Take the message that an interrupted call has left, or that is sent again."""
        while True:
            try:
                INTERRUPTIBLE[verb](self._comm, name)()
            except kfcomm.CollectiveAborted:
                continue
            except kfcomm.KfcommError as error:
                return f"{type(error).__name__}: {error}"
            return "done"

    def deliver(self, verb: str, name: str) -> str:
        """Wait until the message was taken, and send it again if it was aborted: ``kept`` or ``aborted``."""
        handle, self._handle = self._handle, None
        try:
            handle.wait()
        except kfcomm.CollectiveAborted:
            begin(self._comm, verb, name).wait()
            return "aborted"
        except kfcomm.KfcommError as error:
            return f"{type(error).__name__}: {error}"
        return "kept"

    def help(self, verb: str, names: list[str]) -> None:
        """Begin this rank's part, for each of the names in turn."""
        for name in names:
            if self._handle is not None:
                self._handle.wait()
            self._handle = begin(self._comm, verb, name)

    def settle(self, *, give_up: bool) -> str:
        """The end of what was begun; cancelled, if that is asked for and possible."""
        handle, self._handle = self._handle, None
        if handle is None:
            return "done"
        if give_up:
            handle.cancel()
        with contextlib.suppress(Exception):
            handle.exception()
        return "settled"

    def barrier(self, name: str, timeout: float) -> str:
        """``done``, ``closed``, or the error."""
        try:
            self._comm.barrier(name, timeout=timeout)
        except kfcomm.SessionClosed:
            return "closed"
        except Exception as error:  # noqa: BLE001  the test judges it
            return f"{type(error).__name__}: {error}"
        return "done"

    def loop(self, verb: str) -> str:
        """Blocking calls until something ends them."""
        try:
            self._tell(log=LOOPING)
            while True:
                INTERRUPTIBLE[verb](self._comm, "loop")()
        except KeyboardInterrupt:
            return "interrupted"
        except Exception as error:  # noqa: BLE001  the test judges it
            return f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Leave the world."""
        self._comm.close()


def _raise(error: BaseException, number: int, frame: FrameType | None) -> None:
    raise error


def main(path: str, label: str) -> None:
    """Connect to the test and do what it says."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connection.sendall(json.dumps({"label": label, "pid": os.getpid()}).encode() + b"\n")
    connection.recv(1)
    Rank(connection).obey()


def nursery() -> None:
    """Fork a process for each line of standard input, ``path label``; its modules are already imported."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here waits for them
    for line in sys.stdin:
        path, label = line.split()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            main(path, label)
            return


if __name__ == "__main__":
    nursery()
