"""A file from which training goes on when all ranks were lost: written in the background, whole or not at all.

It is what ``numpy.load`` reads: an entry for each array of the state, and ``kfcomm``, msgpack that tells the rest. The
one from before stays until all of the next is on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import logging
import os
import zipfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from kfcomm.arrays import adapt
from kfcomm.collectives.objects import packed, unpacked
from kfcomm.elastic.state import Array, Kept, State, arrays_of, difference, load, plan_of
from kfcomm.errors import ConfigError

logger = logging.getLogger("kfcomm")

FORM = 1
ABOUT = "kfcomm"
PLAIN_KINDS = "biufc"
"""Of dtypes that NumPy can save; others go as bytes."""


class Checkpoint:
    """The checkpoint file of one state.

    Args:
        path: of the file; its directory is there.
        every: so many steps lie between two.
        state: what is kept.

    Raises:
        ConfigError: they cannot be.
    """

    def __init__(self, path: str | os.PathLike[str], every: int, state: State) -> None:
        self.path = Path(path)
        if type(every) is not int or every < 1:
            raise ConfigError(f"checkpoint_every is a number of steps from 1 on, not {every!r}")
        if not self.path.parent.is_dir():
            raise ConfigError(f"there is no directory {str(self.path.parent)!r} for a checkpoint")
        self._every = every
        self._state = state
        self._kept = Kept(state)
        self._thread = ThreadPoolExecutor(1, "kfcomm-checkpoint")
        self._written: Future[None] | None = None
        self._begun = -1

    async def read(self) -> Any:
        """Take the state of the file over; returns the place that was written with it, None if there is no file.

        Raises:
            ConfigError: it is none of this state, or damaged.
        """
        return await asyncio.wrap_future(self._thread.submit(self._read))

    def _read(self) -> Any:
        if not self.path.exists():
            return None
        try:
            with zipfile.ZipFile(self.path) as file:
                form, plan, small, place = unpacked(file.read(ABOUT))
                mine = plan_of(self._state)
                if form == FORM and mine == plan:
                    arrays = [_array(file, name).view(adapt(array).dtype) for name, array in arrays_of(self._state)]
        except (OSError, KeyError, ValueError, zipfile.BadZipFile, EOFError) as error:
            raise ConfigError(f"{self.path} is no checkpoint that can be read: {error}") from error
        if form != FORM:
            raise ConfigError(f"{self.path} is a checkpoint of another version of kfcomm")
        if mine != plan:
            raise ConfigError(f"{self.path} does not fit: {difference(mine, plan, 'the checkpoint')}")
        load(self._state, arrays, small)
        return place

    def look(self, number: int, place: Any) -> None:
        """At a boundary: begin to write, if it is time and the last one is written. Costs a copy of the state then."""
        is_due = number >= self._begun + self._every if self._begun >= 0 else number > 0
        if not is_due or (self._written is not None and not self._written.done()):
            return
        self._begun = number
        self._kept.keep(place)
        self._written = self._thread.submit(self._write)

    async def close(self) -> None:
        """What is being written is written to its end."""
        if self._written is not None:
            await asyncio.wrap_future(self._written)
        self._thread.shutdown()

    def _write(self) -> None:
        """On a thread of its own, while training changes the state: all is taken from the copy."""
        kept = self._kept
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            # of those who were killed while they wrote; one that was only given up finds its own gone, and writes none
            for left in self.path.parent.glob(f".{glob.escape(self.path.name)}.*"):
                left.unlink(missing_ok=True)
            with beside.open("wb") as raw:
                with zipfile.ZipFile(raw, "w") as file:
                    file.writestr(ABOUT, packed([FORM, kept.plan, kept.small, kept.place]).tobytes())
                    for (name, shape, _), array in zip(kept.plan, kept.arrays, strict=True):
                        with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
                            plain = array.reshape(shape) if array.dtype.kind in PLAIN_KINDS else array.view(np.uint8)
                            np.lib.format.write_array(entry, plain, allow_pickle=False)
                raw.flush()
                os.fsync(raw.fileno())
            beside.replace(self.path)
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except Exception as error:  # noqa: BLE001  training does not fail by it
            logger.error("no checkpoint was written to %s: %s; training goes on", self.path, error)
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)


def _array(file: zipfile.ZipFile, name: str) -> Array:
    with file.open(f"{name}.npy") as entry:
        found: Array = np.lib.format.read_array(entry, allow_pickle=False)
    return found
