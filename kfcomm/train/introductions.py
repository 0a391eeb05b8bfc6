"""Comparison of what the ranks have been given, before their first exchange: all of them raise the same error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from kfcomm.collectives.handle import looked_at
from kfcomm.errors import CollectiveMismatch, ConfigError
from kfcomm.train.procedure import Comm, Procedure, call

DIFFERENT = "the ranks agree in different ways"


def refuse(comm: Comm, said: str, problem: str, *names: str) -> NoReturn:
    """Raise the fault of a rank's numbers, and report it in the checks that the other ranks will come to."""
    for name in names:
        introduce(comm, said, name, problem)
    raise ConfigError(f"{said}: {problem}")


def introduce(comm: Comm, said: str, name: str, problem: str | None = None) -> Any:
    """Begin to exchange reports; return a handle of the reports of all ranks, for `check_alike`."""
    tell = getattr(comm, "all_gather_object_async", comm.all_gather_object)
    told = tell([said, problem], name)
    # The caller may raise first, and read no result: that must not be reported as an unread error.
    told.add_done_callback(looked_at)
    return told


def introduction(rank: int, said: str, name: str, wrong: str = DIFFERENT) -> Procedure[None]:
    """Check that all ranks report the same: of their algorithm, or of the subject of ``wrong``; see `check_alike`."""
    told = yield call("all_gather_object", [said, None], name)
    check_alike(rank, said, told, name, wrong)


def check_alike(rank: int, said: str, told: Sequence[Any], name: str, wrong: str = DIFFERENT) -> None:
    """Compare the reports of all ranks: the algorithm of each, and its fault (a `ConfigError`)."""
    for other, (way, problem, *_) in enumerate(told):
        if problem is not None:
            raise ConfigError(f"rank {other} has {way}: {problem}; rank {rank} has {said}")
    unlike = next((other for other, one in enumerate(told) if one[0] != told[0][0]), None)
    if unlike is not None:
        raise CollectiveMismatch(f"{wrong}: rank 0 has {told[0][0]}; rank {unlike} has {told[unlike][0]}", key=name)
