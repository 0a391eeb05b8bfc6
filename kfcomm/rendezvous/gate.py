"""The server's side of signed requests: which to let through.

It remembers which numbers each client has used (as the anti-replay window of IPsec does, RFC 4303 section 3.4.3), so
that a request works once. Sans-IO: headers in, verdicts out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from kfcomm.core import auth
from kfcomm.rendezvous.signing import Ticket

_HEADER = re.compile(r"([0-9a-f]{32})\.([0-9]{1,15})\.([0-9a-f]{64})\.([0-9a-f]{64})")
_WINDOW = 1024
_MAX_CLIENTS = 1 << 17


@dataclass(slots=True)
class Gate:
    """Lets a request through once, if it is signed.

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
