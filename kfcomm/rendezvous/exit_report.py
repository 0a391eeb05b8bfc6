"""Exit report from a rank to its launcher: that it begins to leave, and with which error.

The first rank to fail often takes longer to end than the ranks that fail because of it, since its interpreter has more
to tear down. So it reports at once that it leaves, over a Unix socket of the launcher, before other ranks can detect
it. The report is preliminary: only the end of the process shows whether it has failed. In an elastic job the rank also
sends signs of life over this socket, and a notice when the other ranks have released it.

The launcher never writes. When the socket becomes readable, the launcher is gone, and its guardian may be too: the
kernel then kills this process (``F_SETSIG``, fcntl(2)), whatever it is doing, even if a shell runs between the two.

Invariants: nothing here waits, and nothing raises. Only the process that joined reports, not its forks; the descriptor
is closed on exec.
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

from kfcomm.common.sockets import credentials_of
from kfcomm.common.tracebacks import drop_own_frames, print_uncaught
from kfcomm.errors import CollectiveAborted, PeerLost, RendezvousError

MAX_NBYTES = 1 << 16
SIGN_OF_LIFE, RELEASED = b"\0", b"\1"
MAX_TEXT_NBYTES = 48 << 10
_MAX_SUMMARY = 400
_MAX_CHAIN = 64


class ExitReport(NamedTuple):
    """Report of a rank."""

    rank: int
    # when it began to leave, by the monotonic clock of the host; None: it has joined, and stays
    at_s: float | None = None
    code: int = 0  # exit code that its error leads to; 0 without an error
    is_elsewhere: bool = False  # whether the error follows from the failure of another rank
    summary: str = ""  # the error in one line (the first of a group); empty without an error
    text: bytes = b""  # its traceback, as it is printed; empty without an error, or if it is very long
    is_printed: bool = False  # whether the traceback is being printed now, since the error is uncaught

    def to_wire(self) -> bytes:
        """At most `MAX_NBYTES` bytes of msgpack."""
        encoded: bytes = msgpack.packb(tuple(self))
        return encoded

    @classmethod
    def from_wire(cls, data: bytes) -> ExitReport | None:
        """The inverse of `to_wire`; None if the data is malformed."""
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
    """Whether another rank is to blame, by the error or one of its causes."""
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
    """Exit code of an interpreter that ends with this error."""
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


class _LauncherConnection:
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
            atexit.register(self._sock.close)  # runs after the hooks that report at exit: they are registered later
        except OSError:
            self._sock.close()

    def joined(self) -> None:
        self._left = None
        self._send(ExitReport(self.rank))

    def leaving(self, error: BaseException | None, *, is_printed: bool = False) -> bytes:
        """Report that the process leaves with an error; return the traceback that was sent.

        An error is reported when it first occurs, since cleaning up takes time. Leaving without one is reported once.
        """
        # The same error passes here twice: when the communicator closes, and when it ends the interpreter.
        same = self._left is not None and self._left[0] == id(error)
        if self._left is not None and (error is None or (same and not is_printed)):
            return b""
        at_s = self._left[1] if same and self._left is not None else time.monotonic()
        self._left = id(error), at_s
        code = exit_code_of(error)
        if error is None or code == 0:
            self._send(ExitReport(self.rank, at_s))
            return b""
        text = _text_of(error)
        told = ExitReport(self.rank, at_s, code, is_elsewhere(error), _summary_of(error), text, is_printed)
        return text if self._send(told) else b""

    def lives(self) -> None:
        self._write(SIGN_OF_LIFE)

    def is_released(self) -> None:
        self._write(RELEASED)

    def _send(self, report: ExitReport) -> bool:
        return self._write(report.to_wire())

    def _write(self, data: bytes) -> bool:
        if self.pid != os.getpid():
            return False
        with contextlib.suppress(OSError):
            self._sock.send(data)
            return True
        return False

    def _end_with_the_launcher(self) -> None:
        """Have the kernel kill this process when the launcher is gone; only for a launcher of the same user."""
        if not credentials_of(self._sock).is_same_user:
            self._sock.close()
            return
        fcntl.fcntl(self._sock, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(self._sock, fcntl.F_SETOWN, os.getpid())
        flags = fcntl.fcntl(self._sock, fcntl.F_GETFL)
        fcntl.fcntl(self._sock, fcntl.F_SETFL, flags | os.O_ASYNC)
        with contextlib.suppress(BlockingIOError):
            if not self._sock.recv(1):
                # it was gone before the kernel was asked
                os.kill(os.getpid(), signal.SIGKILL)


_connection: _LauncherConnection | None = None
_print_before = sys.__excepthook__


def connect(address: str | None, rank: int) -> None:
    """Report to the launcher, if any, that this process has joined as ``rank``, and later that it leaves."""
    global _connection, _print_before  # a process has one launcher, and one hook for uncaught errors
    if address is None:
        return
    # A forked child that joins needs a connection of its own: the launcher knows ranks by theirs.
    if _connection is None or _connection.pid != os.getpid():
        _connection = _LauncherConnection(address, rank)
        if sys.excepthook is not _uncaught:
            _print_before, sys.excepthook = sys.excepthook, _uncaught
    _connection.joined()


def report_alive() -> None:
    """Send a sign of life; from any thread."""
    if _connection is not None:
        _connection.lives()


def report_release() -> None:
    """Report that the other ranks of an elastic job have released this process."""
    if _connection is not None:
        _connection.is_released()


def report_leaving() -> None:
    """Report that this process leaves its world, with the error that is being handled, if any."""
    if _connection is not None:
        _connection.leaving(sys.exception())


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report an uncaught error, then print it with exactly the reported text, so that the launcher can recognise it."""
    if _print_before is print_uncaught:
        drop_own_frames(error)
    text = b"" if _connection is None else _connection.leaving(error, is_printed=True)
    if not text or _print_before not in (sys.__excepthook__, print_uncaught) or sys.stderr is None:
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
    """Standard error of one thread; other threads still write to the previous one."""

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
