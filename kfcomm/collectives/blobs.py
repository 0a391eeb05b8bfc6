"""Named, versioned blobs that a rank stores and other ranks fetch at any time.

A blob is copied when it is saved, so a peer always gets one whole version, never a torn one. The first request for a
name of a rank is a message. Between ranks that share memory, its answer says where the versions are listed (see
`kfcomm.transports.shm.versions`). Later requests read them there, and send a message only if they do not find theirs.
Such a request gets the latest whole version, even if its owner is busy or saves another; it first checks whether the
owner is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from kfcomm.arrays import HostArray, adapt
from kfcomm.arrays.kinds import NUMPY, ArrayKind
from kfcomm.collectives.handle import Handle, looked_at
from kfcomm.collectives.mailbox import Mailbox
from kfcomm.collectives.receives import Message, MessageForm
from kfcomm.collectives.specs import CallOptions
from kfcomm.common.arguments import whole_number
from kfcomm.core.collective import GroupView
from kfcomm.errors import CollectiveAborted, CollectiveError, CollectiveTimeout, ConfigError, PeerLost
from kfcomm.transports.shm.versions import Directory, PeerDirectory

if TYPE_CHECKING:
    from kfcomm.engine.traffic import Traffic
    from kfcomm.transports.shm.heap import Array, Heaps

ASK_TAG = "blob question"
KEPT_VERSIONS = 2


class Blobs:
    """The blobs of this rank, and requests for those of others.

    Args:
        mailbox: of the group.
        view: of the group.
        heaps: memory of the ranks of this host; None without it.
        traffic: of the engine.
    """

    def __init__(self, mailbox: Mailbox, view: GroupView, heaps: Heaps | None, traffic: Traffic) -> None:
        self._mailbox = mailbox
        self._view = view
        self._rank = view.rank
        self._heaps = heaps
        self._traffic = traffic
        self._kept: dict[str, dict[int, HostArray]] = {}
        """Versions by name, the latest last. A mapping never changes: other threads may read it."""
        self._directories: dict[str, Directory] = {}
        self._readable: dict[tuple[int, str], PeerDirectory] = {}
        """By rank and name: blobs of others in memory of this host, known from the answer to the first request."""
        self._free_slots: list[int] = []
        self._num_slots = 0
        mailbox.serve(ASK_TAG, self._serve)

    def save(self, name: str, x: Any, version: int | None) -> int:
        """Keep a copy; return its version. The last versions of each name are kept."""
        array = adapt(as_array(x))
        version = checked_version(version)
        former = self._kept.get(name, {})
        number = (max(former, default=-1) + 1) if version is None else version
        kept = {one: value for one, value in former.items() if one != number}
        kept[number] = HostArray(self._copied(array.flat), array.shape, array.kind, False)
        for one in list(kept)[:-KEPT_VERSIONS]:
            del kept[one]
        directory = self._directory(name)
        if directory is not None:
            directory.show(kept)
        self._kept[name] = kept
        return number

    def _reading(self, name: str, source: int, version: int | None, kind: ArrayKind) -> Generator[None, None, Any]:
        """Copy a blob without a message, in pieces; the result is None where that cannot be.

        Raises:
            CollectiveError: it is one of this rank, which has no such version.
        """
        if source == self._rank:
            kept = self._find(name, version)
            if isinstance(kept, str):
                raise CollectiveError(kept, key=name)
            return kind.restore(kept.flat.copy().reshape(kept.shape))
        directory = self._readable.get((source, name))
        if directory is None or self._mailbox.is_lost(source):
            return None
        found = yield from directory.reading(version)
        if found is None:
            return None
        self._traffic.read(self._view.members[source], found.nbytes)
        return kind.restore(found)

    async def request(
        self, name: str, source: int, version: int | None, timeout_s: float | None, kind: ArrayKind = NUMPY
    ) -> Any:
        """Request a rank's blob, as an array of this kind: by messages where it cannot be read without."""
        pieces = self._reading(name, source, version, kind)
        try:
            while True:
                next(pieces)
                await asyncio.sleep(0)
        except StopIteration as end:
            found = end.value
        return await self._ask(name, source, version, timeout_s, kind) if found is None else found

    def request_now(self, name: str, source: int, version: int | None, kind: ArrayKind) -> Any:
        """Result of a request that needs no message; None if it does. On any thread."""
        pieces = self._reading(name, source, version, kind)
        try:
            while True:
                next(pieces)
        except StopIteration as end:
            return end.value

    def close(self) -> None:
        """End what others may read without a message."""
        for directory in self._directories.values():
            directory.close()
        self._directories.clear()
        self._readable.clear()

    async def _ask(self, name: str, source: int, version: int | None, timeout_s: float | None, kind: ArrayKind) -> Any:
        """Request a blob by messages. The answer tells a refusal, often empty, and the directory; then the blob."""
        # Tags of answers are used again, since every tag that was ever used is remembered by both ends.
        slot = self._free_slots.pop() if self._free_slots else self._num_slots
        self._num_slots = max(self._num_slots, slot + 1)
        options = CallOptions(timeout=timeout_s)
        asked = self._mailbox.send(_message([name, version, slot]), source, ASK_TAG, options)
        answers = {
            tag: self._mailbox.recv(source, tag, options, MessageForm(kind=of))
            for tag, of in zip(_reply_tags(slot), (NUMPY, kind), strict=True)
        }
        told, blob = answers.values()
        try:
            await asked
            refusal, *where = msgpack.unpackb((await told)[0].tobytes())
            result = None if refusal else (await blob)[0]
        except BaseException as error:
            self._give_up(asked, answers, source)
            whole = self._of_request(error, name, source)
            if whole is None:
                raise
            raise whole from None
        self._free_slots.append(slot)
        if where and self._heaps is not None:
            self._readable[source, name] = PeerDirectory(self._heaps, self._view.members[source], *where)
        if refusal:
            blob.cancel()
            raise CollectiveError(refusal, key=name)
        return result

    def _directory(self, name: str) -> Directory | None:
        """Directory of a blob of this rank; None without shared memory."""
        found = self._directories.get(name)
        if found is None and self._heaps is not None:
            found = Directory.make(self._heaps)
            if found is not None:
                self._directories[name] = found
        return found

    def _copied(self, flat: Array) -> Array:
        block = None if self._heaps is None or not flat.nbytes else self._heaps.empty(flat.nbytes)
        if block is None:
            return flat.copy()
        copy = block.view(flat.dtype)
        copy[:] = flat
        return copy

    def _give_up(self, asked: Handle[None], answers: Mapping[str, Handle[Message]], source: int) -> None:
        """Drop the answer of a request that failed. Its tags are not used again: a late answer might meet a new one."""
        asked.cancel()
        for tag, answer in answers.items():
            if answer.cancel() or answer.cancelled() or isinstance(answer.exception(), CollectiveTimeout):
                self._mailbox.drop(source, tag, f"{self._view.called(self._rank)} no longer waits")
        handles: list[Handle[Any]] = [asked, *answers.values()]
        for handle in handles:
            handle.when_done(self._mailbox.reactor, looked_at)

    def _of_request(self, error: BaseException, name: str, source: int) -> CollectiveError | None:
        """Error for the caller if a message of a request has failed; None for the original error."""
        what = f"the request for {name!r} of {self._view.called(source)}"
        if isinstance(error, CollectiveTimeout):
            known = {"arrived": (self._rank,), "missing": (source,)}
            return CollectiveTimeout(f"{what} was not answered in time", key=name, **known)
        if isinstance(error, PeerLost):
            return PeerLost(f"{what} failed: {str(error).rpartition(' failed: ')[2]}", key=name, rank=error.rank)
        if isinstance(error, CollectiveAborted):
            return CollectiveAborted(f"{what} was cancelled there", key=name)
        return None

    def _find(self, name: str, version: int | None) -> HostArray | str:
        versions = self._kept.get(name)
        if not versions:
            return f"{self._view.called(self._rank)} has saved nothing as {name!r}"
        if version is None:
            return versions[next(reversed(versions))]
        if version not in versions:
            return f"{self._view.called(self._rank)} keeps versions {sorted(versions)} of {name!r}, not {version}"
        return versions[version]

    async def _serve(self, source: int, message: Handle[Message]) -> None:
        """Answer one request of one rank."""
        question, _ = await message
        name, version, slot = msgpack.unpackb(question.tobytes())
        kept = self._find(name, version)
        refusal = kept if isinstance(kept, str) else ""
        told, blob = _reply_tags(slot)
        directory = self._directories.get(name)
        where = [] if directory is None else [directory.place, directory.key]
        replies = [self._mailbox.send(_message([refusal, *where]), source, told)]
        if not isinstance(kept, str):
            replies.append(self._mailbox.send(kept, source, blob))
        await asyncio.gather(*replies)


def as_array(x: Any) -> Any:
    """Read an array or ``bytes``, which verbs refuse, but blobs keep as numbers from 0 to 255."""
    return np.frombuffer(x, np.uint8) if isinstance(x, bytes) else x


def checked_version(version: Any) -> int | None:
    """Return a version as ``int`` itself; None for the latest.

    Raises:
        ConfigError: it is not a number from 0 on, or is too large to travel.
    """
    number = whole_number(version)
    if version is not None and (number is None or not 0 <= number < 1 << 63):
        raise ConfigError(f"expected a version from 0 to 2**63 - 1, got {version!r:.60}")
    return number


def _message(content: list[Any]) -> HostArray:
    return adapt(np.frombuffer(msgpack.packb(content), np.uint8))


def _reply_tags(slot: int) -> tuple[str, str]:
    return f"blob answer {slot}", f"blob {slot}"
