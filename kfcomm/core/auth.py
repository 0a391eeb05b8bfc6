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


def proof(token: bytes, challenge: bytes, context: bytes) -> bytes:
    """The answer to ``challenge`` of one who knows ``token``.

    Args:
        token: secret shared by the job.
        challenge: random bytes drawn by the one who asks, at least 16, used once.
        context: what is proven, for example who answers and to which end.

    Returns:
        32 bytes.
    """
    message = struct.pack(">Q", len(challenge)) + challenge + context
    return hmac.digest(token, message, hashlib.sha256)


def is_valid(token: bytes, challenge: bytes, context: bytes, proof: bytes) -> bool:
    """Whether ``proof`` answers ``challenge``; takes the same time whichever byte is wrong."""
    return hmac.compare_digest(_expected(token, challenge, context), proof)


_expected = proof
