"""The contents of a store in a folder: a launcher that is started again finds them there.

The folder holds ``store``, a file to which each change is appended and written to disk before it is answered, and
``lock``, which the process that uses the folder has locked. What was being written when the machine went down is cut
off. When more of the file is overwritten than is not, it is written anew, beside, and renamed.

A disk that is full is no reason to end a job: it goes on, the log says that what changes is not kept, and when there is
room again, all is written anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import logging
import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

import msgpack

from kfcomm.errors import ConfigError
from kfcomm.rendezvous.backing import Lasting
from kfcomm.rendezvous.board import Board, Closed

MAGIC = b"kfcomm store 1\n"
SLACK_NBYTES = 1 << 20
"""The file is not written anew for less."""
AGAIN_S = 5.0
"""So often a disk that was full is tried."""

_HEAD = struct.Struct("<II")
_STORE, _LOCK, _DRAFT = "store", "lock", "store.new"

logger = logging.getLogger("kfcomm")


class Journal(Lasting):
    """See above.

    Args:
        folder: made if there is none; for this user alone.

    Raises:
        ConfigError: another process uses it, it cannot be written, or holds something else.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._path = folder / _STORE
        self._queue: list[tuple[str, bytes, asyncio.Future[None]]] = []
        self._claims: dict[str, asyncio.Future[None]] = {}
        self._writing: asyncio.Task[None] | None = None
        self._broken_s: float | None = None
        self._lock = self._locked()
        try:
            self._nbytes = _read(self._path, self.board)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._live_nbytes = self._rewritten()
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(f"--store {str(folder)!r} cannot be written: {error.strerror}") from error
        except BaseException:
            os.close(self._lock)
            raise

    async def set(self, key: str, value: bytes) -> None:
        """See `Backing`."""
        self.board.check(key, value)
        await self._kept(key, value)

    async def claim(self, key: str, value: bytes) -> bytes:
        """See `Backing`."""
        while (other := self._claims.get(key)) is not None:
            await asyncio.wait([other])
        if (held := self.board.held(key)) is not None:
            return held
        self.board.check(key, value)
        self._claims[key] = kept = asyncio.ensure_future(self._kept(key, value))
        kept.add_done_callback(functools.partial(self._claimed, key))
        await asyncio.shield(kept)
        return value

    async def clear(self, *folders: str) -> None:
        """See `Lasting`."""
        for key in [key for key, _ in self.board.contents() if key.partition("/")[0] not in folders]:
            self.board.drop(key)
        self._live_nbytes = self._rewritten()

    async def close(self, *, is_over: bool) -> None:
        """See `Lasting`."""
        if self._lock < 0:
            return
        if self._writing is not None:
            await self._writing
        if is_over:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
        self.board.close()
        os.close(self._file)
        os.close(self._lock)
        self._lock = -1

    def _claimed(self, key: str, kept: asyncio.Future[None]) -> None:
        self._claims.pop(key, None)
        if not kept.cancelled():
            kept.exception()  # who waits hears it; perhaps nobody does any more

    def _locked(self) -> int:
        """The descriptor of a lock that no other process has; the kernel gives it back when this one ends."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"--store {str(self._folder)!r} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            who = os.pread(lock, 32, 0).decode(errors="replace").strip()
            os.close(lock)
            raise ConfigError(
                f"--store {str(self._folder)!r} is used by another launcher (process {who or 'unknown'}): a folder is "
                "for one job"
            ) from error
        with contextlib.suppress(OSError):
            os.ftruncate(lock, 0)
            os.pwrite(lock, b"%d\n" % os.getpid(), 0)
        return lock

    # ---------------------------------------------------------------- what is written

    async def _kept(self, key: str, value: bytes) -> None:
        """Returns when it is on disk, and on the board; with others that come meanwhile it goes to disk at once."""
        if self._lock < 0 or self.board.is_closed:
            raise Closed
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._queue.append((key, value, done))
        if self._writing is None:
            self._writing = loop.create_task(self._write_all())
        await done

    async def _write_all(self) -> None:
        while self._queue:
            batch, self._queue = self._queue, []
            await self._write([(key, value) for key, value, _ in batch])
            for key, value, done in batch:
                try:
                    self.board.take(key, value)
                except Exception as error:  # noqa: BLE001  who waits for it is told
                    if not done.cancelled():
                        done.set_exception(error)
                else:
                    if not done.done():
                        done.set_result(None)
        self._writing = None

    async def _write(self, batch: list[tuple[str, bytes]]) -> None:
        """Append these; or all anew, if that is due. What the disk does not take is told of, and goes on in memory."""
        now_s = asyncio.get_running_loop().time()
        if self._broken_s is not None and now_s - self._broken_s < AGAIN_S:
            return
        rows = b"".join(_row(key, value) for key, value in batch)
        is_anew = self._broken_s is not None or self._nbytes > 2 * self._live_nbytes + SLACK_NBYTES
        contents = dict(self.board.contents()) | dict(batch) if is_anew else {}
        try:
            if is_anew:
                self._live_nbytes = await asyncio.to_thread(self._rewrite, contents.items())
            else:
                await asyncio.to_thread(self._append, rows)
        except OSError as error:
            if self._broken_s is None:
                logger.error(
                    "%s cannot be written: %s; the job goes on, and what changes from now on is not kept there",
                    self._folder, error.strerror,
                )  # fmt: skip
            self._broken_s = now_s
        else:
            if self._broken_s is not None:
                logger.warning("%s can be written again: all is kept there", self._folder)
            self._broken_s = None

    def _append(self, rows: bytes) -> None:
        try:
            _write_whole(self._file, rows, self._nbytes)
            os.fdatasync(self._file)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._nbytes)  # what is there is whole again
            raise
        self._nbytes += len(rows)

    def _rewritten(self) -> int:
        return self._rewrite(self.board.contents())

    def _rewrite(self, contents: Iterable[tuple[str, bytes]]) -> int:
        """Write all anew, beside what is there, and take its place; returns the bytes of the file."""
        draft = self._folder / _DRAFT
        whole = MAGIC + b"".join(_row(key, value) for key, value in contents)
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write_whole(file, whole, 0)
            os.fsync(file)
            draft.rename(self._path)
            _sync_folder(self._folder)
        except OSError:
            os.close(file)
            with contextlib.suppress(OSError):
                draft.unlink()
            raise
        os.close(self._file)
        self._file, self._nbytes = file, len(whole)
        return len(whole)


def _read(path: Path, board: Board) -> int:
    """Give the board what is whole in a file; returns how many bytes that is.

    Raises:
        ConfigError: it is another's.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0
    if not data:
        return 0
    if not data.startswith(MAGIC):
        raise ConfigError(f"--store: {str(path)!r} is no store of this version of kfcomm: take another folder")
    at = len(MAGIC)
    while at + _HEAD.size <= len(data):
        nbytes, checksum = _HEAD.unpack_from(data, at)
        row = data[at + _HEAD.size : at + _HEAD.size + nbytes]
        if len(row) < nbytes or zlib.crc32(row) != checksum:
            break
        board.take(*msgpack.unpackb(row))
        at += _HEAD.size + nbytes
    if at < len(data):
        logger.warning("%s: the last %d bytes were not written whole, and are left out", path, len(data) - at)
    return at


def _row(key: str, value: bytes) -> bytes:
    row: bytes = msgpack.packb([key, value])
    return _HEAD.pack(len(row), zlib.crc32(row)) + row


def _write_whole(file: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(file, view, at)
        view, at = view[count:], at + count


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
