"""Errors of failed collectives, made from the cause that every rank has."""

from __future__ import annotations

from collections.abc import Sequence

from kfcomm.core.cause import Cause, CauseKind
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
        case CauseKind.INTERNAL:
            return InternalError(f"{title} failed: {message}", story=story)
