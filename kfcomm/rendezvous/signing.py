"""Signatures of requests to the store and of its answers; the token itself never travels.

The server draws a nonce when it starts and gives it to anyone who asks; it begins with the identity of the job, by
which a client knows a store that was started again from that of another job. A request carries the client's id, a
number that the client uses once, the digest of its body and the proof over all of these and the path, so that the
server can check it before it reads a byte of the body, and it works once. The answer is signed with the same number, so
that a server without the token cannot impersonate the store.

Sans-IO: headers and bytes in, headers and decisions out.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass, field
from typing import NamedTuple

from kfcomm.core import auth

REQUEST_HEADER = "X-Kfcomm-Proof"
ANSWER_HEADER = "X-Kfcomm-Answer"
GREETING = b"kfcomm store "
IDENTITY_NBYTES = 16
_FRESH_NBYTES = 16
_HEADER = re.compile(r"([0-9a-f]{32})\.([0-9]{1,15})\.([0-9a-f]{64})\.([0-9a-f]{64})")
_WINDOW = 1024
_MAX_CLIENTS = 1 << 17


def nonce_of(identity: bytes) -> bytes:
    """A fresh nonce for a store of the job with this identity (`IDENTITY_NBYTES`)."""
    return identity + secrets.token_bytes(_FRESH_NBYTES)


def identity_of(nonce: bytes) -> bytes:
    """The inverse: identity of the job whose store drew the nonce."""
    return nonce[:IDENTITY_NBYTES]


class Ticket(NamedTuple):
    """One request: client, number, path, digest of the body, and the token that signs it."""

    client: str
    number: int
    path: str
    digest: bytes
    token: bytes

    @property
    def context(self) -> bytes:
        """Text that the proofs of the request and its answer sign."""
        return f"{self.client}.{self.number}.{self.path}.".encode() + self.digest


def request_header(nonce: bytes, ticket: Ticket) -> str:
    """The value of `REQUEST_HEADER` for one request."""
    signature = auth.proof(ticket.token, nonce, b"request " + ticket.context)
    return f"{ticket.client}.{ticket.number}.{ticket.digest.hex()}.{signature.hex()}"


def answer_header(nonce: bytes, ticket: Ticket, status: int, body: bytes) -> str:
    """The value of `ANSWER_HEADER` for the answer to one request, signed as that was."""
    return auth.proof(ticket.token, nonce, _answer_context(ticket, status, body)).hex()


def is_answer_valid(nonce: bytes, ticket: Ticket, status: int, body: bytes, header: str) -> bool:
    """Whether an answer to this very request was signed with the token."""
    if not re.fullmatch(r"[0-9a-f]{64}", header):
        return False
    return auth.proven(ticket.token, nonce, _answer_context(ticket, status, body), bytes.fromhex(header)) is not None


def digest_of(body: bytes) -> bytes:
    """32 bytes: SHA-256 of a body."""
    return hashlib.sha256(body).digest()


def _answer_context(ticket: Ticket, status: int, body: bytes) -> bytes:
    return b"answer " + ticket.context + status.to_bytes(2, "big") + digest_of(body)


@dataclass(slots=True)
class Authenticator:
    """The server's check of signed requests, each of which passes once.

    It remembers which numbers each client has used, as the anti-replay window of IPsec does (RFC 4303 section 3.4.3).

    Memory: 200 bytes per client that has proven the token; none for others.
    """

    token: bytes
    nonce: bytes
    _windows: dict[str, _Window] = field(default_factory=dict)

    def admit(self, path: str, header: str) -> Ticket | None:
        """The request that ``header`` signs; None to refuse it."""
        match = _HEADER.fullmatch(header)
        if match is None:
            return None
        unproven = Ticket(match[1], int(match[2]), path, bytes.fromhex(match[3]), b"")
        token = auth.proven(self.token, self.nonce, b"request " + unproven.context, bytes.fromhex(match[4]))
        if token is None:
            return None
        ticket = unproven._replace(token=token)
        if ticket.client not in self._windows and len(self._windows) >= _MAX_CLIENTS:
            return None
        window = self._windows.setdefault(ticket.client, _Window())
        return ticket if window.take(ticket.number) else None


@dataclass(slots=True)
class _Window:
    """Recently used numbers: bit ``i`` of ``seen`` stands for ``highest - i``."""

    highest: int = -1
    seen: int = 0

    def take(self, number: int) -> bool:
        """Mark ``number`` as used; return whether it was new."""
        ahead = number - self.highest
        if ahead > 0:
            self.seen = 1 | (self.seen << ahead if ahead < _WINDOW else 0) & ((1 << _WINDOW) - 1)
            self.highest = number
            return True
        if -ahead >= _WINDOW or self.seen >> -ahead & 1:
            return False
        self.seen |= 1 << -ahead
        return True
