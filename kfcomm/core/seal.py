"""Seals on the frames of a connection: they reveal frames changed, forged, repeated, omitted or reordered on the way.

A sealed frame has the bytes of a plain one, and beside them::

    +--------+-------+--------+----------------+--------+---------+
    | prefix | check | header | payload digest | tag    | payload |
    |        | 4     |        | 8, if payload  | 16     |         |
    +--------+-------+--------+----------------+--------+---------+

Check and tag are BLAKE2b (RFC 7693) over the number of the frame and its parts, with a key that only the two ends know
(see ``handshake``). The check covers the prefix, so that a changed length cannot make a receiver wait for bytes that
were never sent; the tag covers prefix, header and payload digest. The caller digests payloads.
"""

from __future__ import annotations

import hashlib
import hmac

CHECK_NBYTES = 4
DIGEST_NBYTES = 8
TAG_NBYTES = 16
SEAL_NBYTES = CHECK_NBYTES + TAG_NBYTES
MAX_SEAL_NBYTES = SEAL_NBYTES + DIGEST_NBYTES


class Seal:
    """Seal of one end in one direction.

    Args:
        key: 32 secret bytes, for this direction of this connection alone.
    """

    __slots__ = ("_checks", "_tags")

    def __init__(self, key: bytes) -> None:
        # Copying a keyed state: 0.4 µs per seal; making a new one: 0.6.
        self._checks = hashlib.blake2b(key=key, digest_size=CHECK_NBYTES, person=b"prefix")
        self._tags = hashlib.blake2b(key=key, digest_size=TAG_NBYTES, person=b"frame")

    def check(self, number: int, prefix: bytes | memoryview) -> bytes:
        """Return the check of the prefix of a frame."""
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
