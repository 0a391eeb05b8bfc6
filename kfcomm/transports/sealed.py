"""Sealed frames on a stream; ``core.seal`` has their format.

A frame gets its number, and so its seal, when it leaves, since queued frames may be overtaken or dropped. Frames that
the kernel did not take are sealed again later, with a new number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kfcomm.common.imports import lacking
from kfcomm.core.auth import CHECK_NBYTES, DIGEST_NBYTES, SEAL_NBYTES, TAG_NBYTES, Seal, is_same, payload_seed
from kfcomm.core.frame import PREFIX_NBYTES, Header, decode_header, decode_prefix
from kfcomm.core.handshake import Keys
from kfcomm.errors import ConfigError, RemoteProtocolError
from kfcomm.transports.base import Owner
from kfcomm.transports.outbox import Frame, Outbox, StreamOptions
from kfcomm.types import override

Digest = Callable[[Any], bytes]
"""Function from a payload to `DIGEST_NBYTES` bytes."""


def payload_digest(key: bytes) -> Digest:
    """Return XXH3 with a secret seed: some 20 GB/s, and without the seed an attacker cannot aim for a collision.

    Raises:
        ConfigError: the library is missing.
    """
    try:
        from xxhash import xxh3_64_digest
    except ModuleNotFoundError:
        raise ConfigError(lacking("checksum=True", "xxhash")) from None
    seed = payload_seed(key)
    return lambda payload: xxh3_64_digest(payload, seed=seed)


class SealedOutbox(Outbox):
    """Send queue of a link with seals. ``digest`` is None where no frame has a payload."""

    __slots__ = ("_digest", "_heads", "_next", "_seal")

    def __init__(self, options: StreamOptions, key: bytes, digest: Digest | None) -> None:
        super().__init__(options)
        self._seal = Seal(key)
        self._digest = digest
        self._next = 0
        self._heads: list[bytes] = []

    @override
    def put(
        self, header: Header, head: bytes, payload: memoryview | None, owner: Owner | None, priority: int = 0
    ) -> None:
        if payload and self._digest is not None:
            head += self._digest(payload)
        # A placeholder for the seal, so that all lengths are right.
        super().put(header, head + bytes(SEAL_NBYTES), payload, owner, priority)

    def take_only(self) -> Frame | None:
        """None: a frame is sealed in ``gather``."""
        return None

    @override
    def gather(self) -> tuple[list[Frame], list[Any], int]:
        batch, _, total = super().gather()
        number = self._next
        self._heads = heads = []
        buffers: list[Any] = []
        for head, payload, _, _, header, _ in batch:
            sealed = head
            if header is not None:
                sealed = self._sealed(number, head)
                number += 1
            heads.append(sealed)
            buffers += (sealed, payload) if payload else (sealed,)
        if len(buffers) == len(heads):  # no payload among them
            buffers = [b"".join(heads)] if heads else []
        return batch, buffers, total

    @override
    def advance(self, batch: Sequence[Frame], moved: int, done: deque[Owner]) -> int:
        finished = super().advance(batch, moved, done)
        if batch:
            self._next -= batch[0][4] is None  # it had its number already
        self._next += finished
        cut = self._cut
        if cut is not None:
            self._next += 1
            begun = batch[finished]
            if begun[4] is not None:
                self._cut = (self._heads[finished][begun[2] - cut[2] :], *cut[1:])
        return finished

    def _sealed(self, number: int, head: bytes) -> bytes:
        prefix, rest = head[:PREFIX_NBYTES], head[PREFIX_NBYTES:-SEAL_NBYTES]
        return prefix + self._seal.check(number, prefix) + rest + self._seal.tag(number, prefix, rest)


class SealedReader:
    """Reader of sealed frames, in order: it checks every head before any other code reads it."""

    __slots__ = ("_digest", "_due", "_next", "_seal")

    def __init__(self, key: bytes, digest: Digest | None) -> None:
        self._seal = Seal(key)
        self._digest = digest
        self._next = 0
        self._due = b""

    def decode_head(self, data: memoryview, start: int, end: int) -> tuple[Header, int, int] | None:
        """Decode a frame whose head is complete, and check its seal, and that of its payload once it is complete.

        Raises:
            RemoteProtocolError: the frame was changed, or is not the next one.
        """
        begin = start + PREFIX_NBYTES + CHECK_NBYTES
        if end < begin:
            return None
        prefix = data[start : start + PREFIX_NBYTES]
        if not is_same(self._seal.check(self._next, prefix), data[start + PREFIX_NBYTES : begin]):
            raise self._changed()
        header_nbytes, payload_nbytes = decode_prefix(prefix)
        digest = begin + header_nbytes
        tag = digest + DIGEST_NBYTES if payload_nbytes else digest
        body = tag + TAG_NBYTES
        if end < body:
            return None
        if not is_same(self._seal.tag(self._next, prefix, data[begin:tag]), data[tag:body]):
            raise self._changed()
        self._due = bytes(data[digest:tag])
        if payload_nbytes and body + payload_nbytes <= end:
            self.check(data[body : body + payload_nbytes])
        self._next += 1
        return decode_header(data[begin:digest]), payload_nbytes, body

    def check(self, payload: memoryview) -> None:
        """Check the payload of the head that was decoded last. Raises `RemoteProtocolError`: it was changed."""
        if self._digest is None:
            raise RemoteProtocolError("a payload came where none is sent")
        if self._digest(payload) != self._due:
            raise self._changed()

    def _changed(self) -> RemoteProtocolError:
        return RemoteProtocolError(f"frame {self._next} was changed on its way, or is not the next one that was sent")


class Seals:
    """Seals of one end of a connection, for both directions. Raises `ConfigError` as `payload_digest` does."""

    def __init__(self, keys: Keys, *, has_payloads: bool) -> None:
        self._keys = keys
        self._has_payloads = has_payloads
        self.reader = SealedReader(keys.incoming, self._digest(keys.incoming))

    def outbox(self, options: StreamOptions) -> SealedOutbox:
        """Return the send queue of a link."""
        return SealedOutbox(options, self._keys.outgoing, self._digest(self._keys.outgoing))

    def _digest(self, key: bytes) -> Digest | None:
        return payload_digest(key) if self._has_payloads else None
