"""Checkpoint file of an elastic job: written in the background, whole or not at all.

The previous checkpoint stays until the next is completely on disk. A file that was not read is not replaced: a file
belongs to a *lineage* of jobs, each continued from the file of the one before, and a job replaces files of its own
lineage only. `npz` has the format of the file.

A checkpoint is written as a *draft* that replaces the file when it is complete, and that is safe with several
concurrent writers. Its name contains the job and the epoch of its writer, which locks it while it lives. So drafts of
dead writers can be removed, and those of living ones stay. A writer of a later epoch removes drafts of earlier epochs
of its job: the other ranks count those writers as lost, and those writers find their drafts gone. A writer that finds a
draft of a later epoch counts as lost itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import secrets
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from kfcomm.elastic.checks import sendable
from kfcomm.elastic.npz import CheckpointHeader, about_of, arrays_in, write
from kfcomm.elastic.state import Kept, State, difference, load, outline_of, plan_of
from kfcomm.errors import ConfigError

NUM_TRIES = 100


class GivenUp(Exception):
    """This writer counts as lost, or the file belongs to another job."""


class Writer(NamedTuple):
    """Writer of drafts.

    Attributes:
        job: id of the job, in hexadecimal digits.
        epoch: epoch of the job.
    """

    job: str
    epoch: int


class Draft:
    """File that replaces its target when it is complete.

    Args:
        target: path of the file to be replaced.
        writer: its writer.

    Attributes:
        raw: the open file.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, target: Path, writer: Writer) -> None:
        self._target = target
        for _ in range(NUM_TRIES):
            self.path = target.with_name(f".{target.name}.{writer.job}.{writer.epoch}.{secrets.token_hex(8)}")
            self.raw: BinaryIO = self.path.open("xb")
            if _lock(self.raw.fileno()) is not False and _is_at(self.path, self.raw.fileno()):
                return
            self.raw.close()  # another process took it for a dead writer's, before it was locked
        raise OSError(f"another process removes each {self.path.name} from {target.parent}")

    def sync(self) -> None:
        """Write all of it to disk."""
        self.raw.flush()
        os.fsync(self.raw.fileno())

    def publish(self) -> None:
        """Replace the target.

        Raises:
            GivenUp: a later writer has removed the draft.
            OSError: the target cannot be replaced.
        """
        try:
            self.path.replace(self._target)
        except FileNotFoundError:
            raise GivenUp("its draft was removed by a later writer") from None
        # Without this a power failure may undo the rename.
        folder = os.open(self._target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def close(self) -> None:
        """Remove the draft, unless it was published."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.raw.close()


def check(target: Path, writer: Writer) -> None:
    """Check for drafts of later epochs.

    Raises:
        GivenUp: there is one.
    """
    if any(one is not None and one.job == writer.job and one.epoch > writer.epoch for _, one in _drafts(target)):
        raise GivenUp("a later epoch has begun")


def clear(target: Path, writer: Writer) -> None:
    """Remove the drafts of dead writers, and those of earlier epochs of this job."""
    for path, one in _drafts(target):
        if one is not None and one.job == writer.job and one.epoch < writer.epoch:
            path.unlink(missing_ok=True)
        else:
            with contextlib.suppress(OSError):
                _remove_if_dead(path)


def _remove_if_dead(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        if _lock(descriptor) and _is_at(path, descriptor):
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _drafts(target: Path) -> Iterator[tuple[Path, Writer | None]]:
    """Drafts of one file, each with its writer; None for a name of an earlier version, without the writer."""
    form = re.compile(re.escape(f".{target.name}.") + r"(?:([0-9a-f]+)\.(\d+)\.[0-9a-f]+|\d+)")
    for path in target.parent.iterdir():
        found = form.fullmatch(path.name)
        if found is not None:
            yield path, None if found[1] is None else Writer(found[1], int(found[2]))


def _lock(descriptor: int) -> bool | None:
    """Lock a file; False if another process has locked it, None where files cannot be locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the file of a descriptor has this path."""
    try:
        there, here = path.stat(), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


logger = logging.getLogger("kfcomm")


class Found(NamedTuple):
    """Checkpoint that a rank sees.

    Attributes:
        digest: digest of its description.
        number: number of the step that begins with it.
    """

    digest: str
    number: int


class Checkpoint:
    """The checkpoint file of one state.

    Args:
        path: path of the file, in a directory that exists.
        every: number of steps from one checkpoint to the next.
        state: state to be written.

    Attributes:
        lineage: ids of the jobs that continued from each other; this job is the last.

    Raises:
        ConfigError: an argument is not valid.
    """

    def __init__(self, path: str | os.PathLike[str], every: int, state: State) -> None:
        self.path = Path(path)
        if type(every) is not int or every < 1:
            raise ConfigError(f"checkpoint_every is a number of steps from 1 on, not {every!r}")
        if not self.path.parent.is_dir():
            raise ConfigError(f"there is no directory {str(self.path.parent)!r} for a checkpoint")
        self.lineage = ["0"]
        self.every = every
        self._state = state
        self._kept = Kept(state)
        self._thread = ThreadPoolExecutor(1, "kfcomm-checkpoint")
        self._written: Future[None] | None = None
        self._begun = -1

    @property
    def name(self) -> str:
        """Its path, for error texts."""
        return sendable(str(self.path))

    async def find(self) -> Found | None:
        """Read the description of the file; None without a file.

        Raises:
            ConfigError: the file is not a checkpoint, or is damaged.
        """
        found = await asyncio.get_running_loop().run_in_executor(self._thread, about_of, self.path)
        return None if found is None else Found(found[1], found[0].number)

    async def read(self) -> Any:
        """Load the state of the file; returns the position that was written with it, None without a file.

        Raises:
            ConfigError: the file is damaged, or of another state; then the state is unchanged.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._read)

    def _read(self) -> Any:
        found = about_of(self.path)
        if found is None:
            return None
        about, _ = found
        if (mine := plan_of(self._state)) != about.plan:
            raise ConfigError(f"{self.name} does not fit: {difference(mine, about.plan, 'the checkpoint')}")
        if about.outline not in (None, outline_of(self._state)):
            raise ConfigError(f"{self.name} does not fit: its names, or its lists and dictionaries, differ")
        arrays = arrays_in(self.path, about)
        try:
            load(self._state, arrays, about.small)
        except (LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{self.name} does not fit: {error!r}") from error
        self.lineage = about.lineage
        return about.place

    def look(self, number: int, place: Any, epoch: int = 0) -> None:
        """Begin to write, at a boundary, if a checkpoint is due and the last one is written.

        Cost: a copy of the state, if it writes.
        """
        is_due = number >= self._begun + self.every if self._begun >= 0 else number > 0
        if not is_due or (self._written is not None and not self._written.done()):
            return
        self._begun = number
        # Only the copy happens in the step; training goes on while the thread writes it.
        self._kept.keep(place)
        self._written = self._thread.submit(self._write, number, epoch)

    async def close(self) -> None:
        """Wait until a checkpoint that is being written is complete."""
        if self._written is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._written.result)
        self._thread.shutdown()

    def _write(self, number: int, epoch: int) -> None:
        """Write a checkpoint from the copy of the state, on a thread of its own, while training changes the state."""
        kept, writer = self._kept, Writer(self.lineage[-1], epoch)
        about = CheckpointHeader(kept.plan, kept.outline, kept.small, kept.place, number, self.lineage, epoch, None)
        try:
            clear(self.path, writer)
            draft = Draft(self.path, writer)
            try:
                clear(
                    self.path, writer
                )  # again: writers of earlier epochs may have begun before they could see this draft
                write(draft.raw, about, kept.arrays)
                draft.sync()
                check(self.path, writer)  # in this order: a later writer's draft may be published in between
                self._check_there(epoch)
                draft.publish()
            finally:
                draft.close()
        except Exception as error:  # noqa: BLE001  training does not fail by it
            logger.error("no checkpoint was written to %s: %s; training goes on", self.path, error)

    def _check_there(self, epoch: int) -> None:
        """Check that the file may be replaced: it is damaged, or of this lineage and not of a later epoch.

        Raises:
            GivenUp: it may not be.
        """
        try:
            found = about_of(self.path)
        except ConfigError:
            return
        if found is None:
            return
        about, _ = found
        # Two jobs with one path: the later writer would destroy the progress of the other.
        if about.lineage != self.lineage[: len(about.lineage)]:
            raise GivenUp("it belongs to another job, and this job has not read it")
        if about.lineage == self.lineage and about.epoch > epoch:
            raise GivenUp("a later epoch has written it")
