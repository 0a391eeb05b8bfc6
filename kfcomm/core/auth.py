"""Proof that a peer knows the token of the job, without sending it.

The one who asks draws a fresh challenge; the one who answers returns an HMAC-SHA256 (RFC 2104) over it and
over a context that says what the proof is for. A proof for one challenge or context is worthless for any
other, so it can be neither replayed nor turned around. Randomness is the caller's: this module is pure.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

PROOF_NBYTES = 32


SEPARATOR = b"\0"
"""Between the tokens of a job that has several: the first one proves, all of them are accepted."""


def tokens(token: bytes) -> list[bytes]:
    """The tokens in one."""
    return token.split(SEPARATOR)


def proof(token: bytes, challenge: bytes, context: bytes) -> bytes:
    """The answer to ``challenge`` of one who knows ``token``.

    Args:
        token: secret shared by the job; of several the first.
        challenge: random bytes drawn by the one who asks, at least 16, used once.
        context: what is proven, for example who answers and to which end.

    Returns:
        32 bytes.
    """
    message = struct.pack(">Q", len(challenge)) + challenge + context
    return hmac.digest(tokens(token)[0], message, hashlib.sha256)


def proven(token: bytes, challenge: bytes, context: bytes, proof: bytes) -> bytes | None:
    """Which of the tokens has made this answer to ``challenge``; takes the same time whichever byte is wrong."""
    for one in tokens(token):
        if hmac.compare_digest(_expected(one, challenge, context), proof):
            return one
    return None


_expected = proof
