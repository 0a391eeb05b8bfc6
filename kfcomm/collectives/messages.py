"""Between two ranks: send and recv, queues, and blobs to fetch; and what all ranks hold the same."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import numpy as np

from kfcomm.arrays import adapt, adapt_out
from kfcomm.collectives.blobs import Blobs
from kfcomm.collectives.exchange import Exchange, Steps, mapped, packed, unpacked
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.mailbox import Mailbox
from kfcomm.errors import ConfigError

Tag = int | str


class Messages(Exchange):
    """The verbs that are not of the whole group, and ``consensus``."""

    _mailbox: Mailbox
    _blobs: Blobs

    def send(self, x: Any, to: int, tag: Tag = 0, *, timeout: float | None = None, priority: int = 0) -> Handle[None]:
        """Send an array to rank ``to``; done when that rank has received it.

        Args:
            x: array of any shape and supported dtype; not to be modified before the handle is done.
            to: rank in the group, not this one.
            tag: tells kinds of messages apart; those with one tag arrive in the order of the calls.
            timeout: seconds; None for the communicator's.
            priority: accepted for later use.
        """
        self._check_open()
        self._check_other("to", to)
        return self._mailbox.send(adapt(x), to, _key(tag), timeout)

    def recv(
        self, source: int | None = None, tag: Tag = 0, *, out: Any = None, timeout: float | None = None
    ) -> Handle[Any]:
        """The next message with this tag from rank ``source``, or from any rank.

        Returns:
            A handle; its result is a NumPy array of the sender's shape and dtype, or ``out``, which must have them
            (else ``CollectiveMismatch`` on both ranks).
        """
        return mapped(self.recv_any(source, tag, out=out, timeout=timeout), lambda message: message[0])

    def recv_any(
        self, source: int | None = None, tag: Tag = 0, *, out: Any = None, timeout: float | None = None
    ) -> Handle[tuple[Any, int]]:
        """As ``recv``; the result is ``(array, rank of the sender)``."""
        self._check_open()
        if source is not None:
            self._check_other("source", source)
        target = None
        if out is not None:
            like = adapt(out)
            target = adapt_out(out, like.shape, like.dtype)
        return self._mailbox.recv(source, _key(tag), target, timeout)

    def send_object(self, value: Any, to: int, tag: Tag = 0, *, timeout: float | None = None) -> Handle[None]:
        """Send anything that msgpack can carry to rank ``to``, for its ``recv_object``."""
        return self.send(packed(value), to, f"object {tag}", timeout=timeout)

    def recv_object(self, source: int | None = None, tag: Tag = 0, *, timeout: float | None = None) -> Handle[Any]:
        """The next object with this tag from rank ``source``, or from any rank."""
        return mapped(self.recv(source, f"object {tag}", timeout=timeout), unpacked)

    def queue(self, name: str, source: int, target: int, *, capacity: int = 16) -> Queue:
        """An ordered queue of arrays from rank ``source`` to rank ``target``; both make their end of it.

        Args:
            name: the queue's name in this group.
            source: the rank that puts.
            target: the rank that gets.
            capacity: arrays that may be under way before ``put`` waits.
        """
        self._check_open()
        for what, rank in (("source", source), ("target", target)):
            self._check_rank(what, rank)
        if source == target:
            raise ConfigError("a queue joins two different ranks")
        if capacity < 1:
            raise ConfigError(f"a queue holds at least one array, not {capacity}")
        return Queue(self, name, source, target, capacity)

    def save(self, name: str, x: Any, *, version: int | None = None) -> int:
        """Keep a copy of ``x`` for others to ``request``; returns its version. The last two of a name are kept."""
        self._check_open()
        return self._blobs.save(name, x, version)

    async def request(self, name: str, source: int, *, version: int | None = None, timeout: float | None = None) -> Any:
        """A copy of what rank ``source`` saved as ``name``: its latest version, or the one asked for.

        Raises:
            CollectiveError: that rank has saved no such thing.
        """
        self._check_open()
        self._check_rank("source", source)
        return await self._blobs.request(name, source, version, timeout)

    def consensus(self, x: Any, name: str | None = None, *, timeout: float | None = None) -> Steps:
        """Whether all ranks hold the same bytes, shape and dtype; a handle of a bool. Cost: 32 bytes per rank."""
        with self._checks(name):
            array = adapt(x)
            about = f"{array.dtype.name} {array.shape}".encode()
            digest = hashlib.blake2b(array.flat.view(np.uint8).data, digest_size=32, key=hashlib.sha256(about).digest())
        everyone = self._all_gather_stacked(np.frombuffer(digest.digest(), np.uint8), name, None, timeout)
        return mapped(everyone, lambda table: bool((table == table[0]).all()))

    def _check_other(self, what: str, rank: Any) -> None:
        self._check_rank(what, rank)
        if rank == self._group.view.rank:
            raise ConfigError(f"{what} {rank} is this rank itself: a message needs two ranks")


class Queue:
    """One end of an ordered, bounded queue of arrays between two ranks; see ``Communicator.queue``."""

    def __init__(self, messages: Messages, name: str, source: int, target: int, capacity: int) -> None:
        self._messages = messages
        self._tag = f"queue {name}"
        self._source = source
        self._target = target
        self._room = asyncio.Semaphore(capacity)
        self._failure: BaseException | None = None

    async def put(self, x: Any, *, timeout: float | None = None) -> None:
        """Append a copy of ``x``; waits while ``capacity`` arrays have not been taken.

        Raises:
            ConfigError: this rank is not the source.
            CollectiveError: an earlier array could not be delivered.
        """
        rank = self._messages._group.view.rank
        if rank != self._source:
            raise ConfigError(f"rank {rank} cannot put: the queue's source is rank {self._source}")
        await self._room.acquire()
        if self._failure is not None:
            self._room.release()
            raise self._failure
        sent = self._messages.send(
            np.array(adapt(x).flat).reshape(np.shape(x)), self._target, self._tag, timeout=timeout
        )
        sent.add_done_callback(self._taken)

    async def get(self, *, timeout: float | None = None) -> Any:
        """The next array, as NumPy.

        Raises:
            ConfigError: this rank is not the target.
        """
        rank = self._messages._group.view.rank
        if rank != self._target:
            raise ConfigError(f"rank {rank} cannot get: the queue's target is rank {self._target}")
        return await self._messages.recv(self._source, self._tag, timeout=timeout)

    def _taken(self, sent: asyncio.Future[None]) -> None:
        self._room.release()
        if not sent.cancelled() and self._failure is None:
            self._failure = sent.exception()


def _key(tag: Tag) -> str:
    if isinstance(tag, (int, np.integer)):
        return f"#{tag}"
    if type(tag) is str and tag and "\0" not in tag and len(tag.encode()) <= 1000:
        return f"tag {tag}"
    raise ConfigError(f"a tag is a number or a short string that is not empty, not {tag!r}")
