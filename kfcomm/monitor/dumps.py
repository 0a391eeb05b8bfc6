"""Dumps of a process's collectives as JSON, on request or on a signal; ``kfcomm doctor`` reads those of several ranks.

Invariants: making one only reads, so that it can be done on any thread, at any moment, whatever state the process is
in. A file is written whole or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import site
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, cast

from kfcomm.common.version import versions
from kfcomm.engine.closing import open_sessions
from kfcomm.engine.meter import steady
from kfcomm.rendezvous.host import hostname

if TYPE_CHECKING:
    from kfcomm.engine.operation import Operation
    from kfcomm.engine.session import Session

logger = logging.getLogger("kfcomm")

SIGNAL = getattr(signal, "SIGUSR1", None)
FORMAT = 1
MAX_USES = 10_000
MAX_FRAMES = 40
MAX_TASKS = 100
HERE = str(Path(__file__).parent)
PACKAGE = str(Path(__file__).parent.parent)
OTHERS = (PACKAGE, str(Path(os.__file__).parent), *site.getsitepackages(), "<frozen")
"""Where code is that the user has not written: this package, the standard library, what was installed."""


class DumpedGroup(TypedDict):
    """A group; its members are ranks of the world."""

    name: str
    members: list[int]


class PendingCall(TypedDict):
    """A collective in flight, as one rank sees it; ranks are those of the world."""

    group: str
    members: list[int]
    name: str
    seq: int
    verb: str
    waited_s: float
    arrived: list[int]
    not_heard_from: list[int]
    chunks_missing: int
    sends_pending: int


class PendingReceive(TypedDict):
    """A receive whose message has not shown up; ``source`` is a rank of the world, None is any."""

    group: str
    tag: str
    source: int | None
    waited_s: float


class Event(TypedDict):
    """Something that a rank did, by the wall clock; ``name`` is empty for unnamed collectives."""

    time_s: float
    event: str
    name: str
    seq: int
    detail: str


class CodePlace(TypedDict):
    """A thread or task: the user's own line ``at`` which it is (empty if none), and its stack, outermost first."""

    name: str
    at: str
    stack: list[str]


class Details(TypedDict, total=False):
    """Fields of a record for people, beside those that the doctor reads."""

    versions: list[Any]  # of kfcomm and its protocol
    host: str
    pid: int
    activity: str  # what it did last, in words
    links: list[str]  # those that are open, in words
    device: dict[str, Any]  # what the others know of its device
    routes: dict[str, str]  # of device memory, and why, by id of the group; empty in a world without devices


class Record(Details):
    """The record of one session: what it waits for, what it did last, and where its program is. JSON-able."""

    format: int
    rank: int
    size: int
    time_s: float  # when it was made, by the wall clock
    loop_blocked_s: float  # for how long its event loop has had no turn
    lost: dict[str, str]  # ranks that are gone, and why
    groups: dict[str, DumpedGroup]  # by id
    waiting: list[PendingCall]
    receiving: list[PendingReceive]
    uses: dict[str, dict[str, int]]  # how often each of the newest names was used, by id of the group
    events: list[Event]  # oldest first
    threads: list[CodePlace]
    tasks: list[CodePlace]


def dump(path: str | os.PathLike[str] | None = None) -> list[dict[str, Any]]:
    """A record of every open communicator world of this process; written as JSON to ``path`` if given.

    May be called on any thread. See ``Communicator.dump`` for one of them.

    Raises:
        OSError: the file cannot be written; what it held before is still there.
    """
    records = [snapshot(session) for session in steady(open_sessions)]
    if path is not None:
        _write(Path(path), records)
    return records


def snapshot(session: Session, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The record of one session as a plain mapping; written as JSON to ``path`` if given."""
    record = cast("dict[str, Any]", record_of(session))
    if path is not None:
        _write(Path(path), [record])
    return record


def install_signal(folder: str | os.PathLike[str] = ".", *, is_launched: bool = False) -> None:
    """Write a dump into ``folder`` on SIGUSR1, unless the program handles that signal itself."""
    # Only the main thread may set handlers, and Python runs them there, between two steps of its program: a main thread
    # deep in a library call answers when that call returns.
    if SIGNAL is None or threading.current_thread() is not threading.main_thread():
        return
    present = signal.getsignal(SIGNAL)
    # `kfcomm run` starts its ranks with the signal ignored: that is not the program's choice.
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
    # By way of the loop: the signal may have interrupted this thread in the very stream that is logged to.
    with contextlib.suppress(RuntimeError):  # the loop has just been closed
        session.engine.loop.call_soon_threadsafe(logger.log, level, "%s", message)


def _write(whole: Path, records: list[dict[str, Any]]) -> None:
    """Write a dump atomically: a reader never sees half of one."""
    part = whole.with_name(f".{whole.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:  # for its owner alone
            json.dump(records, file, indent=1)
        part.replace(whole)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def record_of(session: Session) -> Record:
    """Everything that this process knows of a session, as JSON-able values."""
    # The engine may be at work on another thread, or have been interrupted on this one: `steady` copies what it may
    # change in one step of the interpreter, and looks again if that failed.
    engine = session.engine
    lost = steady(lambda: dict(engine.router.lost))
    return {
        "format": FORMAT,
        "versions": list(versions()),
        "rank": session.rank,
        "size": session.layout.size,
        "host": hostname(),
        "pid": os.getpid(),
        "time_s": time.time(),
        "activity": session.activity(),
        "loop_blocked_s": round(session.lag.blocked_s(), 3),
        "lost": {str(rank): cause.message for rank, cause in lost.items()},
        "links": [
            f"to rank {rank}: {session.network.describe(rank)}" for rank in steady(lambda: sorted(engine.links.by_peer))
        ],
        "groups": {
            group_id.hex(): {"name": name, "members": list(members)}
            for group_id, (name, members) in steady(lambda: dict(session.groups.known)).items()
        },
        "device": asdict(session.devices.reports[session.rank]),
        "routes": _routes(session),
        "waiting": [_waiting(operation) for operation in steady(engine.in_flight)],
        "receiving": cast(
            "list[PendingReceive]", [one for waits in steady(lambda: list(engine.receivers)) for one in steady(waits)]
        ),
        "uses": _uses(steady(engine.router.uses)),
        "events": cast("list[Event]", steady(engine.recorder.as_list)),
        "threads": steady(threads),
        "tasks": steady(lambda: tasks(engine.loop)),
    }


def _routes(session: Session) -> dict[str, str]:
    groups = steady(lambda: dict(session.groups.known))
    found = {group_id.hex(): session.route_of(members) for group_id, (_, members) in groups.items()}
    return {group_id: str(choice) for group_id, choice in found.items() if choice is not None}


def _waiting(operation: Operation) -> PendingCall:
    collective = operation.collective
    members = collective.group.members
    return {
        "group": collective.key.group_id.hex(),
        "members": list(members),
        "name": collective.name,
        "seq": collective.seq,
        "verb": collective.signature[0],
        "waited_s": round(operation.engine.reactor.time() - operation.posted_s, 3),
        "arrived": [members[rank] for rank in collective.arrived_ranks()],
        "not_heard_from": [members[rank] for rank in collective.missing_ranks()],
        "chunks_missing": collective.remaining,
        "sends_pending": collective.sends,
    }


def _uses(keys: list[tuple[bytes, str, int]]) -> dict[str, dict[str, int]]:
    uses: dict[str, dict[str, int]] = {}
    for group_id, name, count in islice(reversed(keys), MAX_USES):
        uses.setdefault(group_id.hex(), {})[name] = count
    return uses


def threads() -> list[CodePlace]:
    """Every thread; the frames that make a dump are left out."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [
        _described(names.get(ident, f"thread {ident}"), list(_stack(frame)))
        for ident, frame in sys._current_frames().items()
    ]


def program_line() -> str:
    """The user's own line at which the main thread is; empty if it is at none. On any thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(OTHERS):
            return _words(frame.f_code, frame.f_lineno or 0)
        frame = frame.f_back
    return ""


def tasks(loop: asyncio.AbstractEventLoop) -> list[CodePlace]:
    """The tasks of a loop that run the user's own code."""
    found = []
    for task in asyncio.all_tasks(loop):
        points = list(_suspended(task.get_coro()))
        if points and not points[0][0].co_filename.startswith(PACKAGE):
            found.append(_described(task.get_name(), points))
    return found[:MAX_TASKS]


def _stack(frame: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    """The frames of a thread, outermost first, down to where a dump was asked for."""
    frames = []
    while frame is not None:
        frames.append((frame.f_code, frame.f_lineno or 0))
        frame = frame.f_back
    # Frames that make the dump itself.
    while frames and frames[0][0].co_filename.startswith(HERE):
        frames.pop(0)
    yield from reversed(frames[:MAX_FRAMES])


def _suspended(coroutine: Any) -> Iterator[tuple[CodeType, int]]:
    """The points at which a coroutine and those that it awaits are, outermost first."""
    for _ in range(MAX_FRAMES):
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            return
        yield frame.f_code, frame.f_lineno or 0
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)


def _described(name: str, points: list[tuple[CodeType, int]]) -> CodePlace:
    own = [point for point in points if not point[0].co_filename.startswith(OTHERS)]
    return {"name": name, "at": _words(*own[-1]) if own else "", "stack": [_words(*point) for point in points]}


def _words(code: CodeType, line: int) -> str:
    return f"{code.co_filename}:{line} in {code.co_qualname}"
