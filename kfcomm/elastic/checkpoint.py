"""Checkpoint file of an elastic job: written in the background, whole or not at all.

The previous checkpoint stays until the next is completely on disk. A file that was not read is not replaced: a file
belongs to a *lineage* of jobs, each continued from the file of the one before, and a job replaces files of its own
lineage only.

The file is an archive for ``numpy.load``, with checksums over everything. There is an entry for each array of the
state, and the entry ``kfcomm``: msgpack of the form, a digest and the bytes of a `CheckpointHeader`, which holds a
checksum of each array. Nothing that is read is trusted: shapes and types of arrays are those of the reader's state, and
any fault of a file raises ``ConfigError``.

A checkpoint is written as a *draft* that replaces the file when it is complete, and that is safe with several
concurrent writers. Its name contains the job and the epoch of its writer, which locks it while it lives. So drafts of
dead writers can be removed, and those of living ones stay. A writer of a later epoch removes drafts of earlier epochs
of its job: the other ranks count those writers as lost, and those writers find their drafts gone. A writer that finds a
draft of a later epoch counts as lost itself.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import fcntl
import hashlib
import logging
import math
import os
import re
import secrets
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np

from kfcomm.arrays import dtype_of
from kfcomm.collectives.objects import packed, unpacked
from kfcomm.elastic.checks import sendable
from kfcomm.elastic.merging import Conversion
from kfcomm.elastic.replicas import checksum
from kfcomm.elastic.snapshots import Form, Kept, load_form
from kfcomm.elastic.state import State, difference, outline_of, plan_of
from kfcomm.elastic.trees import Array, described
from kfcomm.errors import ConfigError

FORM = 3
"""Form 1 had no checksums, form 2 no objects."""
NO_OBJECTS = described({})
ENTRY = "kfcomm"
PLAIN_KINDS = "biufc"
"""Kinds of dtypes that NumPy can save; arrays of others are saved as bytes."""
MAX_HEADER_NBYTES = 10_000
PIECE_NBYTES = 1 << 20

logger = logging.getLogger("kfcomm")
T = TypeVar("T")


class CheckpointHeader(NamedTuple):
    """Contents of a checkpoint without its arrays."""

    plan: list[list[Any]]  # path, shape and dtype of each array, those of objects last
    outline: list[Any] | None  # see ``state.outline_of``; None in files of form 1
    small: Any  # description of the values without arrays
    place: Any  # position of training
    number: int  # of the step that begins
    lineage: list[str]  # ids of the jobs that continued from each other; the last one has written the file
    epoch: int  # of that job
    sums: list[int] | None  # checksums of the bytes of the arrays; None in files of form 1
    objects: Any = NO_OBJECTS  # description of the states of objects, by name
    num_parts: int = 0  # arrays of objects
    ways: list[list[Any]] = []  # noqa: RUF012  see ``state.Snapshot``; never written to

    def form(self) -> Form:
        """Return the values of the state without the contents of arrays."""
        num = len(self.plan) - self.num_parts
        return Form(self.plan[:num], self.outline or [], self.small, self.objects, self.plan[num:], self.ways)


def write(raw: BinaryIO, about: CheckpointHeader, arrays: Sequence[Array]) -> None:
    """Write a checkpoint; the arrays are flat, and the sums of ``about`` are made here."""
    sums = [checksum([one.view(np.uint8)]) for one in arrays]
    told = packed(list(about._replace(sums=sums))).tobytes()
    with zipfile.ZipFile(raw, "w") as file:
        file.writestr(ENTRY, packed([FORM, _digest(told), told]).tobytes())
        for (name, shape, _), array in zip(about.plan, arrays, strict=True):
            with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
                plain = array.reshape(shape) if array.dtype.kind in PLAIN_KINDS else array.view(np.uint8)
                np.lib.format.write_array(entry, plain, allow_pickle=False)


def about_of(path: Path) -> tuple[CheckpointHeader, str] | None:
    """Header of a file, and its digest; None without a file."""
    return _reading(path, _about)


def arrays_in(path: Path, about: CheckpointHeader) -> list[Array]:
    """Read the arrays of a file with this header, flat."""

    def read(file: zipfile.ZipFile, _: Path) -> list[Array]:
        arrays = [_array(file, *one) for one in about.plan]
        if about.sums is not None and about.sums != [checksum([one.view(np.uint8)]) for one in arrays]:
            raise ValueError("the checksum of an array differs")
        return arrays

    found = _reading(path, read)
    if found is None:
        raise ConfigError(f"{_named(path)} was removed while it was read")
    return found


def _reading(path: Path, read: Callable[[zipfile.ZipFile, Path], T]) -> T | None:
    try:
        try:
            raw = path.open("rb")
        except FileNotFoundError:
            return None
        with raw, zipfile.ZipFile(raw) as file:
            return read(file, path)
    except ConfigError:
        raise
    except Exception as error:  # bytes that anything may have happened to raise whatever they like
        why = sendable(str(error) or repr(error))
        raise ConfigError(f"{_named(path)} is not a readable checkpoint: {why:.300}") from error


def _named(path: Path) -> str:
    return sendable(str(path))


def _about(file: zipfile.ZipFile, path: Path) -> tuple[CheckpointHeader, str]:
    data = file.read(ENTRY)
    form, *fields = unpacked(np.frombuffer(data, np.uint8))
    digest = _digest(data).hex()
    if form == 1:
        plan, small, place = fields
        number = place[0] if isinstance(place, list) and place and type(place[0]) is int else 0
        return CheckpointHeader(plan, None, described(small), place, number, [digest], 0, None), digest
    if form not in (2, FORM):
        raise ConfigError(f"{_named(path)} is a checkpoint of another version of kfcomm")
    right, told = fields
    if _digest(told) != right:
        raise ValueError("its digest differs")
    about = CheckpointHeader(*unpacked(np.frombuffer(told, np.uint8)))
    return about if form == FORM else about._replace(small=described(about.small)), digest


def _array(file: zipfile.ZipFile, name: str, shape: Sequence[int], dtype: str) -> Array:
    kind = dtype_of(dtype)
    found = np.empty(math.prod(shape), kind)
    is_plain = kind.kind in PLAIN_KINDS
    with file.open(f"{name}.npy") as entry:
        header = _header(entry)
        room = found.view(np.uint8)
        for begin in range(0, room.size, PIECE_NBYTES):
            piece = room[begin : begin + PIECE_NBYTES]
            data = entry.read(piece.size)
            if len(data) != piece.size:
                raise ValueError(f"{name} is shorter than its shape")
            piece[:] = np.frombuffer(data, np.uint8)
        if entry.read(1):  # at the end the sum of the entry is looked at, with that of the header
            raise ValueError(f"{name} is longer than its shape")
    told = ast.literal_eval(header)
    right = (tuple(shape), kind) if is_plain else ((found.nbytes,), np.dtype(np.uint8))
    if (tuple(told["shape"]), np.dtype(told["descr"])) != right or told["fortran_order"]:
        raise ValueError(f"{name} differs from its description in the checkpoint")
    return found


def _header(entry: Any) -> str:
    start = entry.read(8)
    is_short = start[6:7] == b"\x01"
    size = int.from_bytes(entry.read(2 if is_short else 4), "little")
    if start[:6] != np.lib.format.MAGIC_PREFIX or size > MAX_HEADER_NBYTES:
        raise ValueError("an entry is not a NumPy array")
    return str(entry.read(size).decode("latin1"))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


NUM_TRIES = 100


class GivenUp(Exception):
    """This writer counts as lost, or the file belongs to another job."""


class Writer(NamedTuple):
    """Writer of drafts: a job, by its id in hexadecimal digits, in one of its epochs."""

    job: str
    epoch: int


class Draft:
    """File that replaces its target when it is complete; ``raw`` is open for writing."""

    def __init__(self, target: Path, writer: Writer) -> None:
        self._target = target
        for _ in range(NUM_TRIES):
            self.path = target.with_name(f".{target.name}.{writer.job}.{writer.epoch}.{secrets.token_hex(8)}")
            self.raw: BinaryIO = self.path.open("xb")
            if _lock(self.raw.fileno()) is not False and _is_at(self.path, self.raw.fileno()):
                return
            self.raw.close()  # another process took it for a dead writer's, before it was locked
        raise OSError(f"another process removes each {self.path.name} from {target.parent}")

    def publish(self) -> None:
        """Replace the target, or raise `GivenUp` if a later writer has removed the draft."""
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
    """Raise `GivenUp` if there is a draft of a later epoch."""
    if any(one is not None and one.job == writer.job and one.epoch > writer.epoch for _, one in _drafts(target)):
        raise GivenUp("a later epoch has begun")


def clear(target: Path, writer: Writer) -> None:
    """Remove the drafts of dead writers, and those of earlier epochs of this job."""
    for path, one in _drafts(target):
        if one is not None and one.job == writer.job and one.epoch < writer.epoch:
            path.unlink(missing_ok=True)
        else:
            with contextlib.suppress(OSError), path.open("r+b") as raw:
                # Another process may have removed it since it was listed, and a new draft may have its path.
                if _lock(raw.fileno()) and _is_at(path, raw.fileno()):
                    path.unlink(missing_ok=True)


def _drafts(target: Path) -> Iterator[tuple[Path, Writer | None]]:
    """Drafts of one file, each with its writer; None for a name of an earlier version, without the writer."""
    form = re.compile(re.escape(f".{target.name}.") + r"(?:([0-9a-f]+)\.(\d+)\.[0-9a-f]+|\d+)")
    for path in target.parent.iterdir():
        found = form.fullmatch(path.name)
        if found is not None:
            yield path, None if found[1] is None else Writer(found[1], int(found[2]))


def _lock(descriptor: int) -> bool | None:
    """Lock a file; False if another process has locked it, None where files cannot be locked."""
    # A lock ends with its process: a draft that can be locked is a dead writer's.
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


class Found(NamedTuple):
    """Checkpoint that a rank sees: digest of its header, and number of the step that begins with it."""

    digest: str
    number: int


class Checkpoint:
    """The checkpoint file of one state, written each ``every`` steps."""

    def __init__(self, path: str | os.PathLike[str], every: int, state: State) -> None:
        self.path = Path(path)
        if type(every) is not int or every < 1:
            raise ConfigError(f"checkpoint_every is a number of steps from 1 on, not {every!r}")
        if not self.path.parent.is_dir():
            raise ConfigError(f"directory {str(self.path.parent)!r} for checkpoints does not exist: create it first")
        self.lineage = ["0"]  # ids of the jobs that continued from each other; this job is the last
        self.every = every
        self._state = state
        self._kept = Kept(state)
        self._thread = ThreadPoolExecutor(1, "kfcomm-checkpoint")
        self._written: Future[None] | None = None
        self._begun = -1

    @property
    def name(self) -> str:
        """Path of the file, for error texts."""
        return sendable(str(self.path))

    async def find(self) -> Found | None:
        """Read the description of the file; None without a file."""
        found = await asyncio.get_running_loop().run_in_executor(self._thread, about_of, self.path)
        return None if found is None else Found(found[1], found[0].number)

    async def read(self) -> Any:
        """Load the state of the file; returns the position that was written with it, None without a file."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._read)

    def _read(self) -> Any:
        found = about_of(self.path)
        if found is None:
            return None
        about, _ = found
        form = about.form()
        if (mine := plan_of(self._state)) != form.plan:
            raise ConfigError(f"{self.name} does not fit: {difference(mine, form.plan, 'the checkpoint')}")
        if about.outline not in (None, outline_of(self._state)):
            raise ConfigError(f"{self.name} does not fit: its names, or its lists and dictionaries, differ")
        arrays = arrays_in(self.path, about)
        try:
            load_form(self._state, form, arrays)
        except Exception as error:  # an object may raise anything, and so may values of other forms
            raise ConfigError(f"{self.name} does not fit: {sendable(str(error) or repr(error))}") from error
        self.lineage = about.lineage
        return about.place

    def is_due_after(self, number: int, *, is_exact: bool) -> bool:
        """Whether one is due at the boundary after this one, at which one can begin if the position is exact."""
        return self.every == 1 if is_exact and self._is_due(number) else self._is_due(number + 1)

    def _is_due(self, number: int) -> bool:
        is_writing = self._written is not None and not self._written.done()
        return not is_writing and (number >= self._begun + self.every if self._begun >= 0 else number > 0)

    def look(self, number: int, place: Any, epoch: int = 0, merged: Conversion | None = None) -> None:
        """Begin to write, at a boundary, if one is due and the last one is written; costs a copy then."""
        if not self._is_due(number):
            return
        self._begun = number
        # Only the copy happens in the step; training continues while the thread writes it.
        self._kept.keep(place)
        if merged is not None:  # what differs between ranks is written as one rank would have it
            self._kept.set_parts({part: value for copy, part, value in merged.values(1) if not copy})
        self._written = self._thread.submit(self._write, number, epoch)

    async def close(self) -> None:
        """Wait until a checkpoint that is being written is complete."""
        if self._written is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._written.result)
        self._thread.shutdown()

    def _write(self, number: int, epoch: int) -> None:
        """Write a checkpoint from the copy of the state, on a thread of its own, while training changes the state."""
        kept, writer = self._kept, Writer(self.lineage[-1], epoch)
        form, told = kept.form, (kept.place, number, self.lineage, epoch, None)
        plan = [*form.plan, *form.parts]
        about = CheckpointHeader(plan, form.outline, form.small, *told, form.objects, len(form.parts), form.ways)
        try:
            clear(self.path, writer)
            draft = Draft(self.path, writer)
            try:
                # again: writers of earlier epochs may have begun before they could see this draft
                clear(self.path, writer)
                write(draft.raw, about, kept.arrays)
                draft.raw.flush()
                os.fsync(draft.raw.fileno())
                check(self.path, writer)  # in this order: a later writer's draft may be published in between
                self._check_there(epoch)
                draft.publish()
            finally:
                draft.close()
        except Exception as error:  # noqa: BLE001  training does not fail by it
            logger.error("no checkpoint was written to %s: %s; training goes on", self.path, error)

    def _check_there(self, epoch: int) -> None:
        """Raise `GivenUp` unless the file is damaged, or of this lineage and not of a later epoch."""
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
