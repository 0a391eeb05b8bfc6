"""Calls of a program, and the steps in which ranks make them.

A call says what each rank of its group does (`Action`) and what that gives. Nothing here is random, and nothing here
runs anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from tests.programs.arrays import Array


class Pipe(NamedTuple):
    """A queue, as both its ends make it."""

    name: str
    source: int
    target: int
    capacity: int


@dataclass(slots=True)
class Action:
    """Part of one rank in a call.

    Attributes:
        verb: the method; begun by the one with ``_async`` in the blocking interface.
        args, options: what it is given.
        expected: its result; see `arrays.difference`.
        inputs: memory that the call must not change; it may be written to when the call is over.
        out: what must be returned itself, or None.
        pipe: the queue whose method it is; None: the communicator's.
        any_result: nothing is known of the result.
        series: of starts of one persistent collective; it is prepared with the arrays of the first.
    """

    verb: str
    args: Sequence[Any] = ()
    options: dict[str, Any] = field(default_factory=dict)
    expected: Any = None
    inputs: Sequence[Array] = ()
    out: Array | None = None
    pipe: Pipe | None = None
    any_result: bool = False
    series: int | None = None


class Call(Protocol):
    """One call of some or all ranks of a group. Its ``str`` is enough to make it again."""

    @property
    def names(self) -> Sequence[str]:
        """Name that must not be reused, in this group, before the call is over everywhere."""

    def action(self, rank: int) -> Action | None:
        """Part of this rank of the group, or None."""


@dataclass(frozen=True, slots=True)
class Do:
    """One call: ranks of the world for which ``blocks`` wait for it here, the others keep its handle.

    Attributes:
        number: of the call.
        comm: number of the communicator.
    """

    number: int
    comm: int
    call: Call
    blocks: tuple[bool, ...]

    def __str__(self) -> str:
        how = "".join("B" if blocks else "a" for blocks in self.blocks)
        return f"call {self.number}, communicator {self.comm}, {how}: {self.call}"


@dataclass(frozen=True, slots=True)
class Together:
    """Named calls that each rank begins in an order of its own."""

    dos: tuple[Do, ...]
    salt: int

    def __str__(self) -> str:
        return f"in an order of each rank's own ({self.salt}): " + "; ".join(map(str, self.dos))


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for the handles of these calls, where there are any, in an order of each rank's own."""

    numbers: tuple[int, ...]
    salt: int

    def __str__(self) -> str:
        return f"wait for calls {list(self.numbers)}, in an order of each rank's own ({self.salt})"


@dataclass(frozen=True, slots=True)
class Make:
    """Make communicators out of one.

    Attributes:
        parent: number of the communicator that is divided.
        made: the number of each new communicator, and its members, which are ranks of the parent.
        colors: for ``split``: what each rank of the parent gives, with its key; None: ``group``.
        name: of the groups.
        strategy: for ``group``.
    """

    parent: int
    made: tuple[tuple[int, tuple[int, ...]], ...]
    colors: tuple[tuple[int | None, int], ...] | None
    name: str
    strategy: str | None = None

    def __str__(self) -> str:
        way = "group" if self.colors is None else f"split {self.colors}"
        return f"{way} {self.name!r} of communicator {self.parent}, strategy {self.strategy}: {self.made}"


@dataclass(frozen=True, slots=True)
class Close:
    """Close a communicator of a group, on its members."""

    comm: int

    def __str__(self) -> str:
        return f"close communicator {self.comm}"


Step: TypeAlias = Do | Together | Wait | Make | Close


@dataclass(frozen=True, slots=True)
class Program:
    """Parts of all ranks.

    Attributes:
        seed, calls, size: what it was made from.
        steps: in their order.
        members: of each communicator, by its number: ranks of the world, by their rank in it.
    """

    seed: int
    calls: int
    size: int
    steps: tuple[Step, ...]
    members: tuple[tuple[int, ...], ...]
