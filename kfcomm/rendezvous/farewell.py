"""What a rank tells its launcher of its end: that it begins to leave, and with which error.

The first rank to fail often takes longer to end than those that fail because of it: its interpreter has more to take
down. So it says at once that it leaves, along a Unix socket at which the launcher listens, before the others can hear
of it. What it says is no promise: only the end of the process tells whether it has failed. In an elastic job it shows
along the same socket, now and then, that it runs, and says when the others have let it go.

The launcher never writes. That the socket can be read means that the launcher is gone, and its guardian may be, too:
the kernel then ends this process (``F_SETSIG``, fcntl(2)), whatever it does at that moment and whatever was between
the two, a shell for example.

Invariants: nothing here waits, and nothing raises. Only the process that joined speaks, not what it forks; the
descriptor is closed in whatever it executes.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import io
import os
import signal
import socket
import sys
import threading
import time
from types import TracebackType, UnionType
from typing import Any, NamedTuple

import msgpack

from kfcomm.common.unix import credentials_of
from kfcomm.errors import CollectiveAborted, PeerLost, RendezvousError

MAX_NBYTES = 1 << 16
SIGN_OF_LIFE, LET_GO = b"\0", b"\1"
MAX_TEXT_NBYTES = 48 << 10
_MAX_SUMMARY = 400
_MAX_CHAIN = 64


class Farewell(NamedTuple):
    """What a rank says.

    Attributes:
        rank: who says it.
        at_s: when it began to leave, by the monotonic clock of the host; None says that it has joined, and stays.
        code: the exit code that its error leads to; 0 without one.
        is_elsewhere: the error says that another rank has failed, or follows from one that does.
        summary: the error in a line, of a group its first; empty without one.
        text: its traceback, as it is printed; empty without one, or if it is very long.
        is_printed: whether the traceback is being printed now: nobody has caught the error.
    """

    rank: int
    at_s: float | None = None
    code: int = 0
    is_elsewhere: bool = False
    summary: str = ""
    text: bytes = b""
    is_printed: bool = False

    def to_wire(self) -> bytes:
        """At most `MAX_NBYTES` bytes of msgpack."""
        encoded: bytes = msgpack.packb(tuple(self))
        return encoded

    @classmethod
    def from_wire(cls, data: bytes) -> Farewell | None:
        """The inverse of `to_wire`; None if it is not."""
        try:
            values = msgpack.unpackb(data, use_list=False)
        except (ValueError, msgpack.UnpackException):
            return None
        kinds: tuple[type | UnionType, ...] = (int, float | None, int, bool, str, bytes, bool)
        if not isinstance(values, tuple) or len(values) != len(kinds):
            return None
        fits = all(isinstance(value, kind) for value, kind in zip(values, kinds, strict=True))
        return cls(*values) if fits else None


def is_elsewhere(error: BaseException | None) -> bool:
    """Whether another rank is to blame: the error says so, or comes of one that does."""
    for _ in range(_MAX_CHAIN):
        match error:
            case None:
                return False
            case PeerLost() | CollectiveAborted() | RendezvousError(rank=int()):
                return True
            case BaseExceptionGroup():
                return all(map(is_elsewhere, error.exceptions))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def exit_code_of(error: BaseException | None) -> int:
    """The exit code of an interpreter that this error ends."""
    match error:
        case None:
            return 0
        case SystemExit(code=None):
            return 0
        case SystemExit(code=int(code)):
            return code & 0xFF
        case KeyboardInterrupt():
            return -signal.SIGINT
    return 1


class _Line:
    """The connection of this process to its launcher."""

    def __init__(self, address: str, rank: int) -> None:
        self.pid = os.getpid()
        self.rank = rank
        self._left: tuple[int, float] | None = None
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._sock.setblocking(False)
            self._sock.connect("\0" + address)
            self._end_with_the_launcher()
            atexit.register(self._sock.close)  # after what says farewell at the exit: that is registered later
        except OSError:
            self._sock.close()

    def joined(self) -> None:
        self._left = None
        self._send(Farewell(self.rank))

    def leaving(self, error: BaseException | None, *, is_printed: bool = False) -> bytes:
        """Say that the process leaves with an error; returns the traceback as it was told.

        An error is told when it is first met: what follows takes its time. That one leaves without any is told once.
        """
        same = self._left is not None and self._left[0] == id(error)
        if self._left is not None and (error is None or (same and not is_printed)):
            return b""
        at_s = self._left[1] if same and self._left is not None else time.monotonic()
        self._left = id(error), at_s
        code = exit_code_of(error)
        if error is None or code == 0:
            self._send(Farewell(self.rank, at_s))
            return b""
        text = _text_of(error)
        told = Farewell(self.rank, at_s, code, is_elsewhere(error), _summary_of(error), text, is_printed)
        return text if self._send(told) else b""

    def lives(self) -> None:
        self._write(SIGN_OF_LIFE)

    def is_let_go(self) -> None:
        self._write(LET_GO)

    def _send(self, farewell: Farewell) -> bool:
        return self._write(farewell.to_wire())

    def _write(self, data: bytes) -> bool:
        if self.pid != os.getpid():
            return False
        with contextlib.suppress(OSError):
            self._sock.send(data)
            return True
        return False

    def _end_with_the_launcher(self) -> None:
        """Have the kernel end this process when the launcher is gone.

        Not for a launcher of another user: it would not have it, and hang up.
        """
        if not credentials_of(self._sock).is_same_user:
            self._sock.close()
            return
        fcntl.fcntl(self._sock, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(self._sock, fcntl.F_SETOWN, os.getpid())
        flags = fcntl.fcntl(self._sock, fcntl.F_GETFL)
        fcntl.fcntl(self._sock, fcntl.F_SETFL, flags | os.O_ASYNC)
        with contextlib.suppress(BlockingIOError):
            if not self._sock.recv(1):
                # it went before the kernel was asked
                os.kill(os.getpid(), signal.SIGKILL)


_line: _Line | None = None
_print_before = sys.__excepthook__


def join(address: str | None, rank: int) -> None:
    """This process takes part as ``rank``; if it has a launcher, that is told, now and at the end."""
    global _line, _print_before  # a process has one launcher, and one hook for what nobody catches
    if address is None:
        return
    if _line is None or _line.pid != os.getpid():
        _line = _Line(address, rank)
        if sys.excepthook is not _uncaught:
            _print_before, sys.excepthook = sys.excepthook, _uncaught
    _line.joined()


def show_life() -> None:
    """This process runs, whatever its program does; from any thread."""
    if _line is not None:
        _line.lives()


def let_go() -> None:
    """The other ranks of an elastic job have let this process go."""
    if _line is not None:
        _line.is_let_go()


def leave() -> None:
    """This process is about to leave its world, with the error that is being handled, if there is one."""
    if _line is not None:
        _line.leaving(sys.exception())


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Tell the launcher, then print as ever; to a letter as it was told, so that the launcher can shorten it."""
    text = b"" if _line is None else _line.leaving(error, is_printed=True)
    if not text or _print_before is not sys.__excepthook__ or sys.stderr is None:
        _print_before(kind, error, trace)
        return
    sys.stderr.write(text.decode())
    sys.stderr.flush()


def _text_of(error: BaseException) -> bytes:
    """The traceback as Python prints it; empty if it is very long."""
    import traceback

    # before 3.12 "Did you mean" is printed by the interpreter alone
    printed = "".join(traceback.format_exception(error)) if sys.version_info >= (3, 12) else _printed(error)
    text = printed.encode(errors="backslashreplace")
    return text if len(text) <= MAX_TEXT_NBYTES else b""


class _Caught(io.StringIO):
    """Standard error for one thread; what others write meanwhile goes where it would have."""

    def __init__(self, others: Any) -> None:
        super().__init__()
        self._others = others
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread:
            return super().write(text)
        return 0 if self._others is None else int(self._others.write(text) or 0)


def _printed(error: BaseException) -> str:
    """Text that the interpreter prints for an uncaught error."""
    before = sys.stderr
    caught = sys.stderr = _Caught(before)
    try:
        sys.__excepthook__(type(error), error, error.__traceback__)
    finally:
        if sys.stderr is caught:
            sys.stderr = before
    return caught.getvalue()


def _summary_of(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return ""
    import traceback

    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    # of a SyntaxError lines of the program come first
    line = next(one for one in traceback.format_exception_only(error) if not one.startswith(" ")).split("\n", 1)[0]
    return line.encode(errors="backslashreplace").decode()[:_MAX_SUMMARY]
