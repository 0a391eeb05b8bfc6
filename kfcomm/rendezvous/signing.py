"""How requests to the store, and its answers, are signed; the token itself never travels.

The server draws a nonce when it starts and gives it to anyone who asks; it begins with the identity of the job, by
which a client knows a store that was started again from that of another job. A request carries the client's id, a
number that the client uses once, the digest of its body and the proof over all of these and the path, so that
it can be judged before a byte of the body is read, and works once (see `gate`). The answer is signed with the same
number: what does not know the token cannot pass for the store either.

Sans-IO: headers and bytes in, headers and verdicts out.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import NamedTuple

from kfcomm.core import auth

REQUEST_HEADER = "X-Kfcomm-Proof"
ANSWER_HEADER = "X-Kfcomm-Answer"
GREETING = b"kfcomm store "


IDENTITY_NBYTES = 16
_FRESH_NBYTES = 16


def nonce_of(identity: bytes) -> bytes:
    """A fresh nonce for a store of the job with this identity (`IDENTITY_NBYTES`)."""
    return identity + secrets.token_bytes(_FRESH_NBYTES)


def identity_of(nonce: bytes) -> bytes:
    """The inverse: whose store has drawn it."""
    return nonce[:IDENTITY_NBYTES]


class Ticket(NamedTuple):
    """One request: who sends it, its number, where to, the digest of its body, and the token that signs it."""

    client: str
    number: int
    path: str
    digest: bytes
    token: bytes

    @property
    def context(self) -> bytes:
        """What the proof of the request, and of its answer, is about."""
        return f"{self.client}.{self.number}.{self.path}.".encode() + self.digest


def request_header(nonce: bytes, ticket: Ticket) -> str:
    """The value of `REQUEST_HEADER` for one request."""
    signature = auth.proof(ticket.token, nonce, b"request " + ticket.context)
    return f"{ticket.client}.{ticket.number}.{ticket.digest.hex()}.{signature.hex()}"


def answer_header(nonce: bytes, ticket: Ticket, status: int, body: bytes) -> str:
    """The value of `ANSWER_HEADER` for the answer to one request, signed as that was."""
    return auth.proof(ticket.token, nonce, _answer_context(ticket, status, body)).hex()


def is_answer_valid(nonce: bytes, ticket: Ticket, status: int, body: bytes, header: str) -> bool:
    """Whether an answer comes from one who knows the token, to this very request."""
    if not re.fullmatch(r"[0-9a-f]{64}", header):
        return False
    return auth.proven(ticket.token, nonce, _answer_context(ticket, status, body), bytes.fromhex(header)) is not None


def digest_of(body: bytes) -> bytes:
    """32 bytes: SHA-256 of a body."""
    return hashlib.sha256(body).digest()


def _answer_context(ticket: Ticket, status: int, body: bytes) -> bytes:
    return b"answer " + ticket.context + status.to_bytes(2, "big") + digest_of(body)
