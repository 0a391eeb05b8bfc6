"""Authentication by the token of the job, which is never sent.

The verifier draws a fresh challenge; the prover returns an HMAC-SHA256 (RFC 2104) over it and over a context that says
what the proof is for. A proof for one challenge or context is worthless for any other, so it can be neither replayed
nor reflected. The caller supplies randomness: this module is pure.

*Seals* on the frames of a connection reveal frames changed, forged, repeated, omitted or reordered on the way. A sealed
frame has the bytes of a plain one, and beside them::

    +--------+-------+--------+----------------+--------+---------+
    | prefix | check | header | payload digest | tag    | payload |
    |        | 4     |        | 8, if payload  | 16     |         |
    +--------+-------+--------+----------------+--------+---------+

Check and tag are BLAKE2b (RFC 7693) over the number of the frame and its parts, with a key that only the two ends know
(see ``handshake``). The check covers the prefix, so that a changed length cannot make a receiver wait for bytes that
were never sent; the tag covers prefix, header and payload digest. The caller digests payloads.

*Unauthenticated* connections at one port have a limit. A new connection is always let in, since a peer of the job
authenticates within milliseconds. The oldest connection of the address with the most of them is closed for it, so that
one address cannot keep the others out.

While connections are being closed there is a flood, and the port accepts more slowly: a flood takes little processor
time then, and every connection has longer to authenticate.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

PROOF_NBYTES = 32


SEPARATOR = b"\0"
"""Between the tokens of a job that has several: the first one proves, all of them are accepted."""


def tokens(token: bytes) -> list[bytes]:
    """Split a token of the job into the tokens that it holds."""
    return token.split(SEPARATOR)


def proof(token: bytes, challenge: bytes, context: bytes) -> bytes:
    """Return the 32 bytes that answer ``challenge`` (random, used once) and so prove knowledge of ``token``."""
    # The length separates challenge and context: else bytes could move from one to the other under the same proof.
    message = struct.pack(">Q", len(challenge)) + challenge + context
    return hmac.digest(tokens(token)[0], message, hashlib.sha256)


def proven(token: bytes, challenge: bytes, context: bytes, proof: bytes) -> bytes | None:
    """Return the token that made this answer to ``challenge``, or None; takes the same time for any wrong byte."""
    for one in tokens(token):
        if hmac.compare_digest(_expected(one, challenge, context), proof):
            return one
    return None


_expected = proof

CHECK_NBYTES = 4
DIGEST_NBYTES = 8
TAG_NBYTES = 16
SEAL_NBYTES = CHECK_NBYTES + TAG_NBYTES
MAX_SEAL_NBYTES = SEAL_NBYTES + DIGEST_NBYTES


class Seal:
    """Seal of one end in one direction, under 32 secret bytes for that direction of that connection alone."""

    __slots__ = ("_checks", "_tags")

    def __init__(self, key: bytes) -> None:
        # Copying a keyed state: 0.4 µs per seal; making a new one: 0.6.
        self._checks = hashlib.blake2b(key=key, digest_size=CHECK_NBYTES, person=b"prefix")
        self._tags = hashlib.blake2b(key=key, digest_size=TAG_NBYTES, person=b"frame")

    def check(self, number: int, prefix: bytes | memoryview) -> bytes:
        """Return the check of the prefix of a frame."""
        # The number makes a frame that is repeated, left out or moved fail as a changed one does.
        state = self._checks.copy()
        state.update(number.to_bytes(8, "little"))
        state.update(prefix)
        return state.digest()

    def tag(self, number: int, prefix: bytes | memoryview, rest: bytes | memoryview) -> bytes:
        """Return the tag of a frame: ``rest`` is its header and the digest of its payload."""
        state = self._tags.copy()
        state.update(number.to_bytes(8, "little"))
        state.update(prefix)
        state.update(rest)
        return state.digest()


def payload_seed(key: bytes) -> int:
    """Derive a secret 64-bit seed for digests of payloads from the key."""
    return int.from_bytes(hashlib.blake2b(key=key, digest_size=8, person=b"payloads").digest(), "little")


is_same = hmac.compare_digest
"""Whether two tags are equal; takes the same time whichever byte differs."""

K = TypeVar("K", bound=Hashable)

MAX_UNAUTHENTICATED = 64
MAX_OF_ONE_ADDRESS = 32


class Unauthenticated(Generic[K]):
    """Unauthenticated connections at one port: at most ``limit`` of them, and ``of_one`` from one address."""

    def __init__(self, limit: int = MAX_UNAUTHENTICATED, of_one: int = MAX_OF_ONE_ADDRESS) -> None:
        self._limit = limit
        self._of_one = of_one
        self._open: dict[K, Hashable] = {}  # in the order of their arrival
        self.is_flood = False  # the latest connection had another one closed

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: K, address: Hashable) -> K | None:
        """Add a connection; returns the one to be closed for it, if any. O(limit) if so."""
        # The new one always gets in: a peer of the job authenticates within milliseconds. One address that opens many
        # loses its own, so that it cannot keep the others out.
        evicted = None
        counts = Counter(self._open.values())
        if counts[address] >= self._of_one:
            evicted = self._oldest_of(address)
        elif len(self._open) >= self._limit:
            evicted = self._oldest_of(counts.most_common(1)[0][0])
        self.is_flood = evicted is not None
        if evicted is not None:
            del self._open[evicted]
        self._open[connection] = address
        return evicted

    def remove(self, connection: K) -> None:
        """Remove a connection that has authenticated or closed. Calling it again does nothing."""
        self._open.pop(connection, None)

    def _oldest_of(self, address: Hashable) -> K:
        return next(connection for connection, where in self._open.items() if where == address)
