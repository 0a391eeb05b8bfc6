"""Cause of a failed collective: a value that travels to every rank, so that all raise the same error."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MAX_MESSAGE_CHARACTERS = 2000


class CauseKind(StrEnum):
    """Kinds of causes: each decides which error every rank raises."""

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
        rank: world rank that found it; for ``LOST`` the rank that is gone; for ``EPOCH`` the number of the next epoch.
        message: text of the error, ranks of the group included.
        arrived, missing: ranks known to have posted, and not known to have (timeouts); ``EPOCH``: the survivors.
    """

    kind: CauseKind
    rank: int
    message: str
    arrived: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()

    def to_wire(self) -> list[Any]:
        """Return msgpack-able fields."""
        message = self.message[:MAX_MESSAGE_CHARACTERS]
        return [str(self.kind), self.rank, message, list(self.arrived), list(self.missing)]

    @classmethod
    def from_wire(cls, fields: list[Any]) -> Cause:
        """Build it from fields of a peer; fields that do not fit become part of an ``INTERNAL`` cause."""
        try:
            kind, rank, message, arrived, missing = fields
            ranks = [rank, *arrived, *missing]
            if not isinstance(message, str) or not all(type(one) is int for one in ranks):
                raise ValueError(fields)
            return cls(CauseKind(kind), rank, message[:MAX_MESSAGE_CHARACTERS], tuple(arrived), tuple(missing))
        except (ValueError, TypeError):
            words = reprlib.repr(fields)[:200]
            return cls(CauseKind.INTERNAL, -1, f"aborted by a peer, for a reason that makes no sense: {words}")
