"""Authentication by the token of the job, which is never sent.

The verifier draws a fresh challenge; the prover returns an HMAC-SHA256 (RFC 2104) over it and over a context that says
what the proof is for. A proof for one challenge or context is worthless for any other, so it can be neither replayed
nor reflected. The caller supplies randomness: this module is pure.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

PROOF_NBYTES = 32


SEPARATOR = b"\0"
"""Between the tokens of a job that has several: the first one proves, all of them are accepted."""


def tokens(token: bytes) -> list[bytes]:
    """Split a token of the job into the tokens that it holds."""
    return token.split(SEPARATOR)


def proof(token: bytes, challenge: bytes, context: bytes) -> bytes:
    """Return the answer to ``challenge`` that proves knowledge of ``token``.

    Args:
        token: secret shared by the job; of several, the first is used.
        challenge: random bytes of the verifier, at least 16, used once.
        context: what is proven, for example who answers and for which connection.

    Returns:
        32 bytes.
    """
    message = struct.pack(">Q", len(challenge)) + challenge + context
    return hmac.digest(tokens(token)[0], message, hashlib.sha256)


def proven(token: bytes, challenge: bytes, context: bytes, proof: bytes) -> bytes | None:
    """Return the token that made this answer to ``challenge``, or None; takes the same time for any wrong byte."""
    for one in tokens(token):
        if hmac.compare_digest(_expected(one, challenge, context), proof):
            return one
    return None


_expected = proof
