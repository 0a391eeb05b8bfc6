"""Dumps of a process's collectives as JSON, on request or on a signal.

``kfcomm doctor`` reads the dumps of several processes and names the ranks that hold up others. Invariants: making one
only reads, so that it can be done on any thread, at any moment, whatever state the process is in.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kfcomm.engine.forks import open_sessions
from kfcomm.engine.meter import steady
from kfcomm.engine.session import Session
from kfcomm.monitor.dump_record import record_of

if TYPE_CHECKING:
    from types import FrameType

logger = logging.getLogger("kfcomm")

SIGNAL = getattr(signal, "SIGUSR1", None)


def dump(path: str | os.PathLike[str] | None = None) -> list[dict[str, Any]]:
    """A record of every open communicator world of this process; written as JSON to ``path`` if given.

    May be called on any thread. See ``Communicator.dump`` for one of them.

    Raises:
        OSError: the file cannot be written; what it held before is still there.
    """
    records = [record_of(session) for session in steady(open_sessions)]
    if path is not None:
        _write(Path(path), records)
    return records


def snapshot(session: Session, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The record of one session. See ``dump``."""
    record = record_of(session)
    if path is not None:
        _write(Path(path), [record])
    return record


def install_signal(folder: str | os.PathLike[str] = ".", *, is_launched: bool = False) -> None:
    """Write a dump into ``folder`` on SIGUSR1, unless the program handles that signal itself.

    A rank that is launched ignores it before, as ``kfcomm run`` has it.

    Python runs signal handlers on the main thread, between two steps of its program: a main thread deep in a library
    call answers when that call returns. Does nothing off the main thread, which alone may set handlers.
    """
    if SIGNAL is None or threading.current_thread() is not threading.main_thread():
        return
    present = signal.getsignal(SIGNAL)
    if present is signal.SIG_DFL or isinstance(present, _Answer) or (is_launched and present is signal.SIG_IGN):
        signal.signal(SIGNAL, _Answer(Path(folder)))


@dataclass(frozen=True, slots=True)
class _Answer:
    """The handler: writes ``kfcomm-rank<r>-pid<p>.json`` for every open world. Never raises into the program."""

    never_raises: ClassVar = True  # see `kfcomm.sync.signals`
    folder: Path

    def __call__(self, number: int, frame: FrameType | None) -> None:
        for session in steady(open_sessions):
            self._answer(session)

    def _answer(self, session: Session) -> None:
        path = self.folder / f"kfcomm-rank{session.rank}-pid{os.getpid()}.json"
        try:
            snapshot(session, path)
        except Exception as error:  # noqa: BLE001  it would come up anywhere in the program, or inside the engine
            _log(session, logging.WARNING, f"rank {session.rank} could not write {path}: {error}")
        else:
            _log(session, logging.INFO, f"rank {session.rank} wrote {path}")


def _log(session: Session, level: int, message: str) -> None:
    """By way of the loop: the signal may have interrupted this thread in the very stream that is logged to."""
    with contextlib.suppress(RuntimeError):  # the loop has just been closed
        session.engine.loop.call_soon_threadsafe(logger.log, level, "%s", message)


def _write(whole: Path, records: list[dict[str, Any]]) -> None:
    """Whole or not at all: a reader never sees half a dump."""
    part = whole.with_name(f".{whole.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:  # for its owner alone
            json.dump(records, file, indent=1)
        part.replace(whole)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
