"""Planned faults: each strikes a rank just before one of its own calls, so that every run of a test is the same.

A rank with a planned fault gets its communicator inside `watched`, which counts the calls. Other ranks get theirs
plain.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

FaultKind = Literal["kill", "unplug", "stop"]


class Killed(BaseException):
    """The rank was killed. Its program must not catch this: a killed process runs nothing."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        rank: that it strikes.
        call: before which of its calls: a number, counted from 0, or a name (its first use). Calls of
            groups are not counted.
        kind: ``kill`` ends the process. ``unplug`` breaks every open link of the rank, which lives and may open new
            ones: in one process. ``stop`` stops the process (SIGSTOP): in several processes.
    """

    rank: int
    call: int | str
    kind: FaultKind = "kill"


class FaultPlan:
    """Faults of one world; each comes once."""

    def __init__(self, *faults: Fault) -> None:
        self.faults = faults

    def of(self, rank: int) -> tuple[Fault, ...]:
        """Faults of one rank."""
        return tuple(fault for fault in self.faults if fault.rank == rank)

    def check(self, size: int, kinds: tuple[FaultKind, ...]) -> None:
        """Refuse impossible faults.

        Raises:
            ValueError: a rank that the world does not have, or a kind that it cannot bring about.
        """
        for fault in self.faults:
            if not 0 <= fault.rank < size:
                raise ValueError(f"{fault}: the world has {size} ranks")
            if fault.kind not in kinds:
                raise ValueError(f"{fault}: this world can {' or '.join(kinds)} a rank, not {fault.kind} it")


class _Watched:
    """A communicator whose calls are counted."""

    def __init__(self, comm: Any, faults: tuple[Fault, ...], strike: Callable[[FaultKind], None]) -> None:
        self._comm = comm
        self._left = list(faults)
        self._strike = strike
        self._count = 0

    def __getattr__(self, word: str) -> Any:
        found = getattr(self._comm, word)
        if word.startswith("_") or not inspect.ismethod(found) or not _is_call(found.__func__):
            return found
        return functools.partial(self._call, found)

    def _call(self, verb: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        name = kwargs.get("name")
        # The name may be given by position.
        if args and name is None:
            name = inspect.signature(verb).bind_partial(*args, **kwargs).arguments.get("name")
        number, self._count = self._count, self._count + 1
        for fault in [one for one in self._left if one.call == (name if isinstance(one.call, str) else number)]:
            self._left.remove(fault)  # first, since a strike may raise
            self._strike(fault.kind)
        return verb(*args, **kwargs)


@functools.cache
def _is_call(function: Callable[..., Any]) -> bool:
    """Whether this is a verb of a communicator: those have a name or a tag."""
    return not {"name", "tag"}.isdisjoint(inspect.signature(function).parameters)


def watched(comm: Any, faults: tuple[Fault, ...], strike: Callable[[FaultKind], None]) -> Any:
    """``comm``, with ``strike(kind)`` called before the calls that ``faults`` name."""
    return _Watched(comm, faults, strike) if faults else comm
