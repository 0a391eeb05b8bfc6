"""Cause of a failed collective, a value that travels to every rank, and the error that all raise for it."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kfcomm.core.collective import name_of
from kfcomm.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    EpochChanged,
    InternalError,
    KfcommError,
    PeerLost,
)

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
    """A failure of one collective."""

    kind: CauseKind  # decides the type of the error
    # world rank that found it; for ``LOST`` the rank that is gone; for ``EPOCH`` the number of the next epoch
    rank: int
    message: str  # text of the error, ranks of the group included
    # arrived, missing: ranks known to have posted, and not known to have (timeouts); ``EPOCH``: the survivors
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


def error_of(cause: Cause, name: str, title: str, story: Sequence[str] = ()) -> KfcommError:
    """The error for a collective called ``name`` that failed for this cause; a new one at each call.

    ``title`` is the name for people; ``story`` is used for defects only.
    """
    message, key = cause.message, name_of(name)
    match cause.kind:
        case CauseKind.MISMATCH:
            return CollectiveMismatch(message, key=key)
        case CauseKind.TIMEOUT:
            return CollectiveTimeout(message, key=key, arrived=cause.arrived, missing=cause.missing)
        case CauseKind.CANCELLED | CauseKind.REFUSED:
            return CollectiveAborted(message, key=key)
        case CauseKind.LOST:
            return PeerLost(f"{title} failed: {message}", key=key, rank=cause.rank)
        case CauseKind.EPOCH:
            return EpochChanged(f"{title} failed: {message}", key=key, epoch=cause.rank, members=cause.arrived)
        case CauseKind.LINK:
            return CollectiveError(f"{title} failed: {message}", key=key)
        case _:  # INTERNAL
            return InternalError(f"{title} failed: {message}", story=story)
