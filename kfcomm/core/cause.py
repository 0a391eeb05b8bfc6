"""Why a collective failed: a value that travels to every rank, so that all tell the same story."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MAX_MESSAGE_CHARACTERS = 2000


class CauseKind(StrEnum):
    """What kind of error each rank raises."""

    MISMATCH = "mismatch"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    LOST = "lost"
    EPOCH = "epoch"
    LINK = "link"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Cause:
    """A failure of one collective.

    Attributes:
        kind: decides the type of the error.
        rank: world rank where it was found, or, for ``LOST``, which rank is gone; for ``EPOCH`` the next epoch.
        message: the whole story in words, ranks of the group included.
        arrived, missing: ranks known to have posted, and not known to have (timeouts); ``EPOCH``: those that go on.
    """

    kind: CauseKind
    rank: int
    message: str
    arrived: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()

    def to_wire(self) -> list[Any]:
        """As msgpack-able fields."""
        message = self.message[:MAX_MESSAGE_CHARACTERS]
        return [str(self.kind), self.rank, message, list(self.arrived), list(self.missing)]

    @classmethod
    def from_wire(cls, fields: list[Any]) -> Cause:
        """From fields that a peer sent; anything that does not fit becomes part of an ``INTERNAL`` cause."""
        try:
            kind, rank, message, arrived, missing = fields
            ranks = [rank, *arrived, *missing]
            if not isinstance(message, str) or not all(type(one) is int for one in ranks):
                raise ValueError(fields)
            return cls(CauseKind(kind), rank, message[:MAX_MESSAGE_CHARACTERS], tuple(arrived), tuple(missing))
        except (ValueError, TypeError):
            words = reprlib.repr(fields)[:200]
            return cls(CauseKind.INTERNAL, -1, f"aborted by a peer, for a reason that makes no sense: {words}")
