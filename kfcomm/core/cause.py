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

    kind: CauseKind
    rank: int  # world rank that found it; LOST: the rank that is gone; EPOCH: the number of the next epoch
    message: str
    arrived: tuple[int, ...] = ()  # TIMEOUT: ranks known to have posted; EPOCH: the survivors
    missing: tuple[int, ...] = ()  # TIMEOUT: ranks not known to have posted

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
            return cls(CauseKind.INTERNAL, -1, f"aborted by a peer, which sent an invalid reason: {words}")


def error_of(cause: Cause, name: str, title: str, story: Sequence[str] = ()) -> KfcommError:
    """Return a new error for a collective called ``name`` (for people: ``title``) that failed for this cause."""
    # New at each call: every waiter raises its own, with its own traceback. Only a defect shows the story.
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
