"""Checkpoint file of an elastic job: written in the background, whole or not at all."""

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
    """The ranks go on without this writer, or another job does."""


class Writer(NamedTuple):
    """Of drafts.

    Attributes:
        job: some hexadecimal digits.
        epoch: of the job.
    """

    job: str
    epoch: int


class Draft:
    """A file beside the one whose place it takes.

    Args:
        target: whose place it takes.
        writer: of it.

    Attributes:
        raw: to be written to.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, target: Path, writer: Writer) -> None:
        self._target = target
        for _ in range(NUM_TRIES):
            self.path = target.with_name(f".{target.name}.{writer.job}.{writer.epoch}.{secrets.token_hex(8)}")
            self.raw: BinaryIO = self.path.open("xb")
            if _lock(self.raw.fileno()) is not False and _is_at(self.path, self.raw.fileno()):
                return
            self.raw.close()  # somebody took it for one that a dead writer has left, before it was locked
        raise OSError(f"another process removes each {self.path.name} from {target.parent}")

    def sync(self) -> None:
        """All of it is on disk."""
        self.raw.flush()
        os.fsync(self.raw.fileno())

    def publish(self) -> None:
        """It takes the place of the other.

        Raises:
            GivenUp: a later writer has removed it.
            OSError: it cannot be.
        """
        try:
            self.path.replace(self._target)
        except FileNotFoundError:
            raise GivenUp("its draft was removed by a later writer") from None
        folder = os.open(self._target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def close(self) -> None:
        """Nothing of it stays, unless it was published."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.raw.close()


def check(target: Path, writer: Writer) -> None:
    """Whether a draft of a later epoch is there.

    Raises:
        GivenUp: one is.
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
    """Whether it is locked by this process from now on; None where files cannot be locked."""
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
    """A checkpoint that a rank sees.

    Attributes:
        digest: by which it is known.
        number: of the step that begins with it.
    """

    digest: str
    number: int


class Checkpoint:
    """The checkpoint file of one state.

    Args:
        path: of the file; its directory is there.
        every: so many steps lie between two.
        state: what is kept.

    Attributes:
        lineage: the jobs that went on from each other, this one the last.

    Raises:
        ConfigError: they cannot be.
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
        """Its path, in words."""
        return sendable(str(self.path))

    async def find(self) -> Found | None:
        """Read the description of the file; None without a file.

        Raises:
            ConfigError: the file is not a checkpoint, or is damaged.
        """
        found = await asyncio.get_running_loop().run_in_executor(self._thread, about_of, self.path)
        return None if found is None else Found(found[1], found[0].number)

    async def read(self) -> Any:
        """Take the state of the file over; returns the place that was written with it, None if there is no file.

        Raises:
            ConfigError: it is none of this state, or damaged; then the state is as it was.
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
        """At a boundary: begin to write, if it is time and the last one is written. Costs a copy of the state then."""
        is_due = number >= self._begun + self.every if self._begun >= 0 else number > 0
        if not is_due or (self._written is not None and not self._written.done()):
            return
        self._begun = number
        self._kept.keep(place)
        self._written = self._thread.submit(self._write, number, epoch)

    async def close(self) -> None:
        """What is being written is written to its end."""
        if self._written is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._written.result)
        self._thread.shutdown()

    def _write(self, number: int, epoch: int) -> None:
        """On a thread of its own, while training changes the state: all is taken from the copy."""
        kept, writer = self._kept, Writer(self.lineage[-1], epoch)
        about = CheckpointHeader(kept.plan, kept.outline, kept.small, kept.place, number, self.lineage, epoch, None)
        try:
            clear(self.path, writer)
            draft = Draft(self.path, writer)
            try:
                clear(self.path, writer)  # of those that were given up before they could see this one
                write(draft.raw, about, kept.arrays)
                draft.sync()
                check(self.path, writer)  # first for a later writer's draft, then for what has become of that
                self._check_there(epoch)
                draft.publish()
            finally:
                draft.close()
        except Exception as error:  # noqa: BLE001  training does not fail by it
            logger.error("no checkpoint was written to %s: %s; training goes on", self.path, error)

    def _check_there(self, epoch: int) -> None:
        """Whether what is there may be written over: a checkpoint of this lineage that is not later, or damaged.

        Raises:
            GivenUp: it may not.
        """
        try:
            found = about_of(self.path)
        except ConfigError:
            return
        if found is None:
            return
        about, _ = found
        if about.lineage != self.lineage[: len(about.lineage)]:
            raise GivenUp("it belongs to another job, and this job has not read it")
        if about.lineage == self.lineage and about.epoch > epoch:
            raise GivenUp("a later epoch has written it")
