"""One rank's timeline while it runs: notes from the engine, written by a thread of its own.

Invariants: the engine's side appends a tuple and waits for nothing; what has not been written is bounded, and
what does not fit is counted and left out, chunks before whole collectives; a file that cannot be written, or has
become too large, ends the timeline and not the job. The file is whole after every write (see `layout`).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from kfcomm.core.collective import shown
from kfcomm.engine.observer import Observer
from kfcomm.errors import ConfigError
from kfcomm.monitor.timeline.translation import (
    ARRIVED,
    COUNTER,
    END,
    ENDED,
    FIRST,
    INSTANT,
    LAST,
    NEXT,
    POSTED,
    SAMPLED,
    SENT,
    SPAN,
    About,
    Groups,
    Note,
    Translator,
    metadata,
)
from kfcomm.rendezvous.host import hostname
from kfcomm.types import override

if TYPE_CHECKING:
    from kfcomm.core.collective import GroupView, Key
    from kfcomm.engine.control import ClockReader, ClockSample, ControlPlane, ToldClock
    from kfcomm.engine.executors import InSlot
    from kfcomm.engine.operation import Operation
    from kfcomm.engine.session import Session

logger = logging.getLogger("kfcomm")

# A note costs 0.4 to 0.7 µs on the engine's thread, 4 µs on the writer's, which holds the interpreter's lock for no
# more than a few hundred lines at a time, and 210 bytes of the file. A step of ResNet-50's gradients, 214 collectives
# on four ranks, makes 1,650 notes on each.
MAX_CHUNK_NOTES = 1 << 16
"""Chunks are left out while more notes than this wait to be written."""
MAX_NOTES = 1 << 17
"""So is everything else."""
MAX_FILE_NBYTES = 1 << 30
WRITE_EVERY_S = 0.2
"""But what has failed, and events, at once."""
LINES_AT_ONCE = 256
"""Then the writer writes, and with that lets go of the interpreter's lock: about half a millisecond."""
COMPARE_AFTER_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Clocks are compared at the beginning, and again after so many seconds; then after the last of these for ever."""
LAST_COMPARISON_S = 1.0
"""How long a rank that closes waits to compare once more."""
FINISH_WITHIN_S = 10.0
"""How long it waits for what has not been written; a disk may hang."""


class Timeline(Observer):
    """Records one rank.

    Raises:
        OSError: the trace cannot be written.
    """

    sees_chunks: ClassVar = True
    outlives_epoch: ClassVar = True

    def __init__(
        self, folder: Path, about: About, groups: Groups, control: ControlPlane | None, clock: ClockReader
    ) -> None:
        self.path = folder / about.file_name
        self._about = about
        self._control = control  # None in a world of one
        self._clock = clock
        self._translator = Translator(about.rank, groups)
        self._notes: deque[Note] = deque()
        self._room, self._chunk_room = MAX_NOTES, MAX_CHUNK_NOTES
        self._num_left_out = self._num_told = 0
        self._since: dict[int, int] = {}
        self._nbytes = 0
        self._stopping = False
        self._wake = threading.Event()
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._write(FIRST + NEXT.join(about.as_lines()))
        self._thread = threading.Thread(target=self._run, name="kfcomm-timeline", daemon=True)
        # Also for a program that does not close its communicator: the thread is a daemon.
        atexit.register(self._finish)
        self._thread.start()

    @classmethod
    def of(cls, session: Session, folder: str | os.PathLike[str], clock: ClockReader = time.monotonic_ns) -> Timeline:
        """The timeline of a session, which tells it what happens from now on; the session's end is its end.

        Raises:
            ConfigError: the trace cannot be written.
        """
        about = About(
            job=session.network.job, rank=session.rank, size=session.layout.size,
            host=session.layout.hosts[session.rank], hostname=hostname(), pid=os.getpid(),
            started_ns=clock(), time_s=time.time(),
        )  # fmt: skip
        try:
            made = cls(Path(folder), about, session.groups.known, session.engine.control, clock)
        except OSError as error:
            raise _refusal(folder, error) from error
        session.engine.observe((*(session.engine.observers or ()), made))
        return made

    # ---------------------------------------------------------------- events of the engine

    @override
    def posted(self, operation: Operation) -> None:
        if len(self._notes) < self._room:
            one = operation.collective
            self._notes.append(
                (POSTED, self._clock(), one.key, one.seq, one.group, one.signature, one.program, operation.nbytes,
                 operation.priority)
            )  # fmt: skip
        else:
            self._num_left_out += 1

    @override
    def done(self, operation: Operation | InSlot, *, is_last: bool) -> None:
        self._ended(cast("Operation", operation), "")  # slots are not used while chunks are observed

    @override
    def failed(self, operation: Operation, reason: str, *, is_last: bool) -> None:
        self._ended(operation, reason)

    def _ended(self, operation: Operation, reason: str) -> None:
        if len(self._notes) < self._room:
            self._notes.append((ENDED, self._clock(), operation.collective.key, operation.seq, reason))
            if reason:
                self._wake.set()  # the process may not live for long
        else:
            self._num_left_out += 1

    @override
    def sent(self, peer: int, operation: Operation, nbytes: int) -> None:
        if len(self._notes) < self._chunk_room:
            self._notes.append((SENT, self._clock(), peer, operation.collective.key, operation.seq, nbytes))
        else:
            self._num_left_out += 1

    @override
    def first_byte(self, peer: int) -> None:
        self._since[peer] = self._clock()

    @override
    def last_byte(self, peer: int, key: Key, seq: int, nbytes: int) -> None:
        if len(self._notes) < self._chunk_room:
            since_ns = self._since.pop(peer, 0) if self._since else 0  # 0 if one read took all of it
            self._notes.append((ARRIVED, self._clock(), since_ns, peer, key, seq, nbytes))
        else:
            self._num_left_out += 1

    @override
    def refused(self, group: GroupView, name: str, reason: str, *, is_local: bool) -> None:
        self.instant("refused" if is_local else "rejected", collective=shown(name), reason=reason)

    @override
    def lost(self, rank: int, reason: str) -> None:
        self.instant("peer lost", rank=rank, reason=reason)

    @override
    def swapped(self, strategy: str, generation: int, size: int, error: BaseException | None) -> None:
        if error is None:
            self.instant("strategy", now=strategy, generation=generation, ranks=size)
        else:
            self.instant("strategy refused", asked=strategy, reason=str(error) or type(error).__name__, ranks=size)

    @override
    def joined(self, epoch: int, rank: int, size: int) -> None:
        self.instant("epoch", number=epoch, rank=rank, size=size)

    @override
    def instant(self, name: str, /, **details: Any) -> None:
        if len(self._notes) < self._room:
            self._notes.append((INSTANT, self._clock(), name, details))
            self._wake.set()
        else:
            self._num_left_out += 1

    @override
    def counter(self, name: str, unit: str, value: float) -> None:
        if len(self._notes) < self._room:
            self._notes.append((COUNTER, self._clock(), name, unit, value))
        else:
            self._num_left_out += 1

    @override
    def span(self, name: str, since_ns: int, until_ns: int, /, **details: Any) -> None:
        if len(self._notes) < self._room:
            self._notes.append((SPAN, since_ns, until_ns, name, details))
        else:
            self._num_left_out += 1

    @override
    def left(self, rank: int) -> None:
        if rank == 0:  # its clock can be asked for once more
            self._compare(self._told)

    @override
    def forked(self) -> None:
        # The child has no writer thread, and shares the file with its parent.
        atexit.unregister(self._finish)
        self._room = self._chunk_room = 0
        with contextlib.suppress(OSError):
            os.close(self._file)

    @override
    async def close(self) -> None:
        # compares clocks once more, and waits until all is written
        compared = asyncio.Event()

        def told(sample: ClockSample | None) -> None:
            self._told(sample)
            compared.set()

        if self._compare(told):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_COMPARISON_S):
                    await compared.wait()
        self._finish()

    # ---------------------------------------------------------------- clocks

    def _compare(self, told: ToldClock) -> bool:
        """Ask how rank 0's clock relates to this one; whether there is anything to ask."""
        if self._control is None or self._about.rank == 0:
            return False
        self._control.compare_clocks(0, told)
        return True

    def _told(self, sample: ClockSample | None) -> None:
        if sample is not None and len(self._notes) < self._room:
            self._notes.append((SAMPLED, sample.at_ns, sample))

    # ---------------------------------------------------------------- the writer's thread

    def _run(self) -> None:
        pauses = iter(COMPARE_AFTER_S)
        compare_s = time.monotonic()
        try:
            while True:
                # Before the notes are written: so those of before `_finish` are among them.
                stops = self._stopping
                self._write_notes()
                if stops:
                    return
                if time.monotonic() >= compare_s:
                    self._compare(self._told)
                    compare_s = time.monotonic() + next(pauses, COMPARE_AFTER_S[-1])
                self._wake.wait(WRITE_EVERY_S)
                self._wake.clear()
        except OSError as error:
            self._give_up(f"{self.path}: {error.strerror}")
        except Exception as error:
            logger.exception("the timeline of rank %d has a defect", self._about.rank)
            self._give_up(f"{type(error).__name__}: {error}")
        finally:
            self._end()

    def _write_notes(self) -> None:
        lines: list[str] = []
        # Those of now, since the engine appends more meanwhile.
        for _ in range(len(self._notes)):
            self._translator.translate(self._notes.popleft(), lines)
            if len(lines) >= LINES_AT_ONCE:
                self._write_lines(lines)
                lines = []
        self._write_lines(lines)
        if self._num_left_out > self._num_told and self._room:
            left_out, self._num_told = self._num_left_out - self._num_told, self._num_left_out
            self._notes.append((INSTANT, self._clock(), "left out", {"notes": left_out}))

    def _write_lines(self, lines: list[str]) -> None:
        if lines and self._room:
            self._write(NEXT + NEXT.join(lines))
            if self._nbytes > MAX_FILE_NBYTES:
                self._give_up(f"{self.path} has {self._nbytes >> 20} MiB")

    def _write(self, text: str) -> None:
        rest = memoryview(text.encode(errors="replace"))
        while rest:
            written = os.write(self._file, rest)
            self._nbytes += written
            rest = rest[written:]

    def _give_up(self, reason: str) -> None:
        """Take and write no more notes."""
        if self._room:
            self._room = self._chunk_room = 0
            self._num_left_out += len(self._notes)
            self._notes.clear()
            logger.warning("rank %d: the timeline ends here, the job goes on: %s", self._about.rank, reason)

    def _end(self) -> None:
        end = metadata(END, self._about.rank, {"left_out": self._num_left_out, "open": self._translator.num_open})
        with contextlib.suppress(OSError):
            self._write(NEXT + end + LAST)
        os.close(self._file)

    def _finish(self) -> None:
        """Write what is left and end the thread. Calling it again does nothing."""
        atexit.unregister(self._finish)
        self._stopping = True
        self._wake.set()
        self._thread.join(FINISH_WITHIN_S)


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Make the folder, if it is not there, and see that files can be made in it.

    Raises:
        ConfigError: with what stands in the way.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refusal(folder, error) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"timeline={os.fspath(folder)!r} cannot be written to: no permission")


def _refusal(folder: str | os.PathLike[str], error: OSError) -> ConfigError:
    return ConfigError(f"timeline={os.fspath(folder)!r} cannot be written to: {error.strerror}")
