"""What a process knows of its collectives, as JSON: on request, or on a signal.

``kfcomm doctor`` reads these dumps of several processes, and says who waits for whom.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfcomm.session import Session, open_sessions

if TYPE_CHECKING:
    from types import FrameType

    from kfcomm.core.collective import Collective

FORMAT = 1
SIGNAL = getattr(signal, "SIGUSR1", None)


def dump(path: str | os.PathLike[str] | None = None) -> list[dict[str, Any]]:
    """A record of every open communicator world of this process; written as JSON to ``path`` if given.

    May be called on any thread. See ``Communicator.dump`` for one of them.
    """
    records = [_record(session) for session in open_sessions()]
    if path is not None:
        _write(path, records)
    return records


def snapshot(session: Session, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The record of one session."""
    record = _record(session)
    if path is not None:
        _write(path, [record])
    return record


def install_signal() -> None:
    """Write a dump on SIGUSR1, unless the program handles that signal itself. Does nothing off the main thread."""
    if SIGNAL is None or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(SIGNAL) is signal.SIG_DFL:
        signal.signal(SIGNAL, _on_signal)


def _on_signal(_: int, __: FrameType | None) -> None:
    folder = Path(os.environ.get("KFCOMM_DUMP_DIR", "."))
    for record in dump():
        with contextlib.suppress(OSError):
            _write(folder / f"kfcomm-rank{record['rank']}-pid{os.getpid()}.json", [record])


def _write(path: str | os.PathLike[str], records: list[dict[str, Any]]) -> None:
    """Whole or not at all: a reader never sees half a dump."""
    whole = Path(path)
    part = whole.with_name(f".{whole.name}.{os.getpid()}")
    part.write_text(json.dumps(records, indent=1))
    part.replace(whole)


def _record(session: Session) -> dict[str, Any]:
    engine = session.engine
    return {
        "format": FORMAT,
        "rank": session.rank,
        "size": session.layout.size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time_s": time.time(),
        "activity": session.activity(),
        "lost": {str(rank): cause.message for rank, cause in dict(engine.router.lost).items()},
        "links": [f"to rank {rank}: {session.network.describe(rank)}" for rank in engine.ends.peers_in_use()],
        "waiting": [_waiting(collective) for collective in list(engine.router.live)],
        "events": engine.recorder.as_list(),
    }


def _waiting(collective: Collective) -> dict[str, Any]:
    members = collective.group.members
    return {
        "group": collective.key.group_id.hex(),
        "members": list(members),
        "name": collective.name,
        "seq": collective.seq,
        "verb": collective.signature[0],
        "waited_s": round(collective.context.waited_s(), 3),
        "arrived": [members[rank] for rank in collective.arrived_ranks()],
        "not_heard_from": [members[rank] for rank in collective.missing_ranks()],
        "chunks_missing": collective.remaining,
        "sends_pending": collective.sends,
    }
