"""A file from which training goes on when all ranks were lost: written in the background, whole or not at all.

The one from before stays until all of the next is on disk. What was not read is not written over: a file belongs to a
*lineage* of jobs, each of which went on from what the one before had written, and a job writes over those of its own
lineage alone. See ``npz`` for what is in it, and ``drafts`` for several writers.
"""

from __future__ import annotations

import asyncio
import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from kfcomm.elastic.checks import sendable
from kfcomm.elastic.drafts import Draft, GivenUp, Writer, check, clear
from kfcomm.elastic.npz import About, about_of, arrays_in, write
from kfcomm.elastic.state import Kept, State, difference, load, outline_of, plan_of
from kfcomm.errors import ConfigError

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
        about = About(kept.plan, kept.outline, kept.small, kept.place, number, self.lineage, epoch, None)
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
