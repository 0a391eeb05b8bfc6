"""Drafts: files that replace another one when they are complete, safe with several concurrent writers.

The name of a draft contains the job and the epoch of its writer, which locks it while it lives. So drafts of dead
writers can be removed, and those of living ones stay. A writer of a later epoch removes drafts of earlier epochs of its
job: the other ranks count those writers as lost, and those writers find their drafts gone. A writer that finds a draft
of a later epoch counts as lost itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

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
