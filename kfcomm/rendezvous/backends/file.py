"""Store in a folder, for a launcher that is restarted.

The folder holds ``store``, a file to which each change is appended and written to disk before it is answered, and
``lock``, a file that the process using the folder has locked. A record that was being written when the machine went
down is cut off. When most records of the file are outdated, the file is rewritten beside the old one and renamed.

A full disk does not end a job: it continues, the log says that changes are not saved, and when there is space again
everything is rewritten.
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
from kfcomm.rendezvous.authentication import kept_token
from kfcomm.rendezvous.backends import Backend, LocalStore, Opening
from kfcomm.rendezvous.contents import Contents
from kfcomm.rendezvous.keyvalue import Exit, StoreClosed
from kfcomm.types import override

MAGIC = b"kfcomm store 1\n"
SLACK_NBYTES = 1 << 20
"""Outdated bytes for which the file is not rewritten."""
AGAIN_S = 5.0
"""Seconds between attempts to write to a full disk."""

_HEAD = struct.Struct("<II")
_STORE, _LOCK, _DRAFT = "store", "lock", "store.new"

logger = logging.getLogger("kfcomm")


class FileStore(LocalStore):
    """Store in a folder of this user alone, which is created if missing.

    Raises:
        ConfigError: another process uses it, it cannot be written, or holds other files.
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
            self._nbytes = _read(self._path, self.contents)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._live_nbytes = self._rewrite(self.contents.items())
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(f"--store {str(folder)!r} cannot be written: {error.strerror}") from error
        except BaseException:
            os.close(self._lock)
            raise

    @override
    async def set(self, key: str, value: bytes) -> None:
        self.contents.check(key, value)
        await self._kept(key, value)

    @override
    async def claim(self, key: str, value: bytes) -> bytes:
        while (other := self._claims.get(key)) is not None:
            await asyncio.wait([other])
        if (held := self.contents.held(key)) is not None:
            return held
        self.contents.check(key, value)
        self._claims[key] = kept = asyncio.ensure_future(self._kept(key, value))
        kept.add_done_callback(functools.partial(self._claimed, key))
        await asyncio.shield(kept)
        return value

    @override
    async def report_exit(self, end: Exit) -> None:
        await self.claim(end.key, end.to_wire())

    @override
    async def clear(self, *folders: str) -> None:
        await super().clear(*folders)
        self._live_nbytes = self._rewrite(self.contents.items())

    @override
    async def close(self, *, is_over: bool) -> None:
        if self._lock < 0:
            return
        if self._writing is not None:
            await self._writing
        # The token and the lock stay: the next job of this folder uses them.
        if is_over:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
        self.contents.close()
        os.close(self._file)
        os.close(self._lock)
        self._lock = -1

    def _claimed(self, key: str, kept: asyncio.Future[None]) -> None:
        self._claims.pop(key, None)
        if not kept.cancelled():
            kept.exception()  # mark as retrieved: the waiter may have been cancelled

    def _locked(self) -> int:
        """Descriptor of the locked file; the kernel releases the lock when this process ends."""
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

    # ---------------------------------------------------------------- writing

    async def _kept(self, key: str, value: bytes) -> None:
        """Return when it is on disk and in the contents. Changes that arrive meanwhile go to disk together."""
        if self._lock < 0 or self.contents.is_closed:
            raise StoreClosed("the store is closed")
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
                    self.contents.take(key, value)
                except Exception as error:  # noqa: BLE001  passed on to the waiter
                    if not done.cancelled():
                        done.set_exception(error)
                else:
                    if not done.done():
                        done.set_result(None)
        self._writing = None

    async def _write(self, batch: list[tuple[str, bytes]]) -> None:
        """Append these records, or rewrite the file if due. If the disk refuses, log it and continue in memory."""
        now_s = asyncio.get_running_loop().time()
        if self._broken_s is not None and now_s - self._broken_s < AGAIN_S:
            return
        rows = b"".join(_row(key, value) for key, value in batch)
        is_anew = self._broken_s is not None or self._nbytes > 2 * self._live_nbytes + SLACK_NBYTES
        contents = dict(self.contents.items()) | dict(batch) if is_anew else {}
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
            # Answered only after this: no process acts on a change that a crash could undo.
            os.fdatasync(self._file)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._nbytes)  # cut off the partial record
            raise
        self._nbytes += len(rows)

    def _rewrite(self, contents: Iterable[tuple[str, bytes]]) -> int:
        """Write a new file and rename it over the old one; return its bytes."""
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


def _read(path: Path, contents: Contents) -> int:
    """Read the complete records of a file; return their bytes. Raises `ConfigError`: it is not a store's."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0
    if not data:
        return 0
    if not data.startswith(MAGIC):
        raise ConfigError(
            f"--store: {str(path)!r} does not hold a store of this version of kfcomm: take another folder"
        )
    at = len(MAGIC)
    while at + _HEAD.size <= len(data):
        nbytes, checksum = _HEAD.unpack_from(data, at)
        row = data[at + _HEAD.size : at + _HEAD.size + nbytes]
        if len(row) < nbytes or zlib.crc32(row) != checksum:
            break
        contents.take(*msgpack.unpackb(row))
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


async def _open(address: str, _: Opening) -> LocalStore:
    return FileStore(Path(address))


def _token(address: str) -> bytes:
    return kept_token(Path(address))


BACKEND = Backend(("",), "a folder", _open, token=_token)
