"""Format of a checkpoint file: an archive for ``numpy.load``, with checksums over everything.

There is an entry for each array of the state, and the entry ``kfcomm``: msgpack of the form, a digest and the bytes of
a `CheckpointHeader`, which holds a checksum of each array. Nothing that is read is trusted: shapes and types of arrays
are those of the reader's state, and any fault of a file raises ``ConfigError``.
"""

from __future__ import annotations

import ast
import hashlib
import math
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np

from kfcomm.arrays import dtype_of
from kfcomm.collectives.objects import packed, unpacked
from kfcomm.elastic.checks import sendable
from kfcomm.elastic.stripes import Array, checksum
from kfcomm.errors import ConfigError

FORM = 2
"""Form 1 had no checksums."""
ENTRY = "kfcomm"
PLAIN_KINDS = "biufc"
"""Kinds of dtypes that NumPy can save; arrays of others are saved as bytes."""
MAX_HEADER_NBYTES = 10_000
PIECE_NBYTES = 1 << 20

T = TypeVar("T")


class CheckpointHeader(NamedTuple):
    """Contents of a checkpoint without its arrays.

    Attributes:
        plan: path, shape and dtype of each array; see ``state.plan_of``.
        outline: see ``state.outline_of``; None in files of form 1.
        small: values other than arrays; see ``state.small_of``.
        place: position of training.
        number: number of the step that begins.
        lineage: ids of the jobs that continued from each other; the last one has written the file.
        epoch: epoch of that job.
        sums: checksums of the bytes of the arrays; None in files of form 1.
    """

    plan: list[list[Any]]
    outline: list[Any] | None
    small: Any
    place: Any
    number: int
    lineage: list[str]
    epoch: int
    sums: list[int] | None


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
    """Description of a file, and its digest; None without a file.

    Raises:
        ConfigError: it is not a readable checkpoint, or has another version.
    """
    return _reading(path, lambda file: _about(file, path))


def arrays_in(path: Path, about: CheckpointHeader) -> list[Array]:
    """Read the arrays of a file with this header, flat.

    Raises:
        ConfigError: they differ from the header.
    """

    def read(file: zipfile.ZipFile) -> list[Array]:
        arrays = [_array(file, *one) for one in about.plan]
        if about.sums is not None and about.sums != [checksum([one.view(np.uint8)]) for one in arrays]:
            raise ValueError("the checksum of an array differs")
        return arrays

    found = _reading(path, read)
    if found is None:
        raise ConfigError(f"{_named(path)} was removed while it was read")
    return found


def _reading(path: Path, read: Callable[[zipfile.ZipFile], T]) -> T | None:
    try:
        raw = path.open("rb")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        with raw, zipfile.ZipFile(raw) as file:
            return read(file)
    except ConfigError:
        raise
    except Exception as error:  # bytes that anything may have happened to raise whatever they like
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ConfigError:
    why = sendable(str(error) or repr(error))
    return ConfigError(f"{_named(path)} is not a readable checkpoint: {why:.300}")


def _named(path: Path) -> str:
    return sendable(str(path))


def _about(file: zipfile.ZipFile, path: Path) -> tuple[CheckpointHeader, str]:
    data = file.read(ENTRY)
    form, *fields = unpacked(np.frombuffer(data, np.uint8))
    digest = _digest(data).hex()
    if form == 1:
        plan, small, place = fields
        number = place[0] if isinstance(place, list) and place and type(place[0]) is int else 0
        return CheckpointHeader(plan, None, small, place, number, [digest], 0, None), digest
    if form != FORM:
        raise ConfigError(f"{_named(path)} is a checkpoint of another version of kfcomm")
    right, told = fields
    if _digest(told) != right:
        raise ValueError("its digest differs")
    return CheckpointHeader(*unpacked(np.frombuffer(told, np.uint8))), digest


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
