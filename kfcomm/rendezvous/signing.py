"""How requests to the store, and its answers, are signed; the token itself never travels.

The server draws a nonce when it starts and gives it to anyone who asks. A request carries the client's id, a
number that the client uses once, the digest of its body and the proof over all of these and the path, so that
it can be judged before a byte of the body is read. The server remembers which numbers each client has used
(as the anti-replay window of IPsec does, RFC 4303 section 3.4.3), so that a request works once. Its answer is
signed with the same number: what does not know the token cannot pass for the store either.

Sans-IO: headers and bytes in, headers and verdicts out.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field

from kfcomm.core import auth

REQUEST_HEADER = "X-Kfcomm-Proof"
ANSWER_HEADER = "X-Kfcomm-Answer"
GREETING = b"kfcomm store "

_HEADER = re.compile(r"([0-9a-f]{32})\.([0-9]{1,15})\.([0-9a-f]{64})\.([0-9a-f]{64})")
_WINDOW = 1024
_MAX_CLIENTS = 1 << 17


@dataclass(frozen=True, slots=True)
class Ticket:
    """One request: who sends it, its number, where to, and the digest of its body."""

    client: str
    number: int
    path: str
    digest: bytes

    @property
    def context(self) -> bytes:
        """What the proof of the request, and of its answer, is about."""
        return f"{self.client}.{self.number}.{self.path}.".encode() + self.digest


def request_header(token: bytes, nonce: bytes, ticket: Ticket) -> str:
    """The value of `REQUEST_HEADER` for one request."""
    signature = auth.proof(token, nonce, b"request " + ticket.context)
    return f"{ticket.client}.{ticket.number}.{ticket.digest.hex()}.{signature.hex()}"


def answer_header(token: bytes, nonce: bytes, ticket: Ticket, status: int, body: bytes) -> str:
    """The value of `ANSWER_HEADER` for the answer to one request."""
    return auth.proof(token, nonce, _answer_context(ticket, status, body)).hex()


def is_answer_valid(token: bytes, nonce: bytes, ticket: Ticket, status: int, body: bytes, header: str) -> bool:
    """Whether an answer comes from one who knows the token, to this very request."""
    if not re.fullmatch(r"[0-9a-f]{64}", header):
        return False
    return auth.is_valid(token, nonce, _answer_context(ticket, status, body), bytes.fromhex(header))


def digest_of(body: bytes) -> bytes:
    """32 bytes: SHA-256 of a body."""
    return hashlib.sha256(body).digest()


def _answer_context(ticket: Ticket, status: int, body: bytes) -> bytes:
    return b"answer " + ticket.context + status.to_bytes(2, "big") + digest_of(body)


@dataclass(slots=True)
class Gate:
    """The server's side: lets a request through once, if it is signed.

    Memory: 200 bytes per client that has proven the token; none for others.
    """

    token: bytes
    nonce: bytes
    _windows: dict[str, _Window] = field(default_factory=dict)

    def admit(self, path: str, header: str) -> Ticket | None:
        """The request that ``header`` signs, or None if it must be refused."""
        match = _HEADER.fullmatch(header)
        if match is None:
            return None
        ticket = Ticket(match[1], int(match[2]), path, bytes.fromhex(match[3]))
        if not auth.is_valid(self.token, self.nonce, b"request " + ticket.context, bytes.fromhex(match[4])):
            return None
        if ticket.client not in self._windows and len(self._windows) >= _MAX_CLIENTS:
            return None
        window = self._windows.setdefault(ticket.client, _Window())
        return ticket if window.take(ticket.number) else None


@dataclass(slots=True)
class _Window:
    """The numbers seen of late: bit ``i`` of ``seen`` stands for ``highest - i``."""

    highest: int = -1
    seen: int = 0

    def take(self, number: int) -> bool:
        """Whether ``number`` is new; it is not the next time."""
        ahead = number - self.highest
        if ahead > 0:
            self.seen = 1 | (self.seen << ahead if ahead < _WINDOW else 0) & ((1 << _WINDOW) - 1)
            self.highest = number
            return True
        if -ahead >= _WINDOW or self.seen >> -ahead & 1:
            return False
        self.seen |= 1 << -ahead
        return True
