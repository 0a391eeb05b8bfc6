"""Specifications of the verbs, one record each; options of one call.

Each record of `SPECS` has the properties by which verbs differ. Checks, cached plans, packing, persistent forms and the
path of device arrays read it, so a new verb needs a record here, a method of ``Planner`` and a public method.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Final, Self, TypeAlias, assert_never

from kfcomm.common.arguments import whole_number
from kfcomm.common.sizes import seconds_of
from kfcomm.core.signature import split
from kfcomm.errors import ConfigError
from kfcomm.types import Seconds, Verb

Shape: TypeAlias = tuple[int, ...]
Arguments: TypeAlias = tuple[Any, ...]
"""A verb, then its op, then the type of its root and its root, as far as it has them.

The type, since 1.0 and True equal 1: a value that only equals a rank is left to the full checks.
"""

LEAST_URGENT, MOST_URGENT = -(1 << 15), (1 << 15) - 1
"""The priorities that a call may have."""

# Looked up at each call: as attributes of the enum they would cost twice as much.
ALL_REDUCE: Final = Verb.ALL_REDUCE
REDUCE: Final = Verb.REDUCE
BROADCAST: Final = Verb.BROADCAST
GATHER: Final = Verb.GATHER
ALL_GATHER: Final = Verb.ALL_GATHER
REDUCE_SCATTER: Final = Verb.REDUCE_SCATTER
ALL_TO_ALL: Final = Verb.ALL_TO_ALL
BARRIER: Final = Verb.BARRIER


class ResultShape(Enum):
    """Rule for the shape of a result, given the shape of a rank's array."""

    SAME = auto()
    STACKED = auto()
    """One axis more, the first, with one place for each rank."""
    PART = auto()
    """This rank's share of the rows; the first shares may be one row longer."""
    EXCHANGED = auto()
    """The same, of a number of rows that the size of the group divides."""


@dataclass(frozen=True, slots=True)
class VerbSpec:
    """One verb."""

    verb: Verb
    shape: ResultShape = ResultShape.SAME  # rule for the shape of the result
    folds: bool = False  # an op combines the contributions
    is_rooted: bool = False
    for_root: bool = False  # only the root gets a result
    in_place: bool = False  # the result may be made in the memory of the input
    is_elementwise: bool = False  # element i of the result depends on elements i alone: a call may be cut anywhere
    differs: bool = False  # each rank gets another result: no rank can pass its own to one that lacks it

    @property
    def is_stacked(self) -> bool:
        """Whether the result has one axis more, for the ranks."""
        return self.shape is ResultShape.STACKED

    def input_at(self, rank: int, count: int) -> int | None:
        """Element of the result from which on the input, of ``count`` elements, may lie there; None: nowhere."""
        if self.is_stacked:
            return rank * count
        return 0 if self.in_place else None

    def arguments(self, op: Any, root: Any) -> Arguments:
        """Key by which two calls under one name are compared: if equal, the second may use the plan of the first."""
        found: Arguments = (self.verb, op) if self.folds else (self.verb,)
        return (*found, type(root), root) if self.is_rooted else found

    def gets(self, rank: int, root: int) -> bool:
        """Whether this rank gets a result."""
        return not self.for_root or rank == root

    def stacked(self, shape: Shape, size: int) -> Shape:
        """Shape of a result that is as large as what is given, or holds that of all ranks."""
        return (size, *shape) if self.is_stacked else shape

    def result_shape(self, shape: Shape, rank: int, size: int) -> Shape:
        """Return the shape of the result of a rank that gets one.

        Raises:
            ConfigError: an array of this shape cannot be shared out among so many ranks.
        """
        match self.shape:
            case ResultShape.SAME:
                return shape
            case ResultShape.STACKED:
                return (size, *shape)
            case ResultShape.PART:
                row_elements(shape)
                return (split(shape[0], size)[rank][1], *shape[1:])
            case ResultShape.EXCHANGED:
                row_elements(shape)
                if shape[0] % size:
                    raise ConfigError(
                        f"all_to_all shares {shape[0]} rows among {size} ranks: "
                        "give a multiple, or a list of arrays, one for each rank"
                    )
                return shape
            case _:
                assert_never(self.shape)


SPECS: Final[dict[Verb, VerbSpec]] = {
    spec.verb: spec
    for spec in (
        VerbSpec(ALL_REDUCE, folds=True, in_place=True, is_elementwise=True),
        VerbSpec(REDUCE, folds=True, is_rooted=True, for_root=True, in_place=True, is_elementwise=True),
        VerbSpec(BROADCAST, is_rooted=True, in_place=True, is_elementwise=True),
        VerbSpec(GATHER, ResultShape.STACKED, is_rooted=True, for_root=True),
        VerbSpec(ALL_GATHER, ResultShape.STACKED),
        VerbSpec(REDUCE_SCATTER, ResultShape.PART, folds=True, differs=True),
        VerbSpec(ALL_TO_ALL, ResultShape.EXCHANGED, differs=True),
        VerbSpec(BARRIER),
    )
}
"""These are also the verbs whose plans are cached by name; scatter and the verbs of two steps are made of them."""


def row_elements(shape: Shape) -> int:
    """Return the number of elements of one row, along the first axis.

    Raises:
        ConfigError: the array has no first axis.
    """
    if not shape:
        raise ConfigError("expected an array to divide along its first axis, got one without dimensions")
    return math.prod(shape[1:])


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options of a call as its caller gave them; each is described at ``Verbs.all_reduce``."""

    op: Any = None  # None in verbs without
    root: Any = None  # None in verbs without
    out: Any = None
    timeout: Seconds | None = None
    priority: int = 0
    wire_dtype: Any = None
    stream: Any = None
    weight: float | None = None
    shared: bool = False
    strategy: Any = None  # as given, until the call is checked; see ``Group.checked``
    is_step: bool = False  # a step of another verb, whose name it uses: its plan is not cached under that name

    @property
    def timeout_s(self) -> float | None:
        """The timeout in seconds; None for the communicator's."""
        return seconds_of(self.timeout)

    @property
    def has_limits(self) -> bool:
        """Whether the caller has given a timeout or a priority."""
        return self.timeout is not None or bool(self.priority)

    @property
    def is_repeatable(self) -> bool:
        """Whether a cached plan may serve: a caller has given no more than op, root, ``out``, a strategy and limits."""
        is_asked = self.wire_dtype is not None or self.stream is not None or self.weight is not None
        return not (is_asked or self.shared or self.is_step)

    @property
    def is_plain(self) -> bool:
        """Whether a caller has given no more than op, root, ``out`` and a strategy."""
        return self.is_repeatable and not self.has_limits

    def checked(self) -> Self:
        """Return the same options, with a plain priority.

        Raises:
            ConfigError: the timeout or the priority is not valid.
        """
        seconds_of(self.timeout)
        priority = checked_priority(self.priority)
        return self if priority is self.priority else replace(self, priority=priority)

    def but(self, **changes: Any) -> Self:
        """The same options with these changed."""
        return replace(self, **changes)

    def first_given(self, *names: str) -> str | None:
        """The first of these options that the caller has given."""
        return next((name for name in names if getattr(self, name) not in (None, False)), None)


PLAIN: Final = CallOptions()
"""Options of a call without any."""
STEP: Final = CallOptions(is_step=True)


def checked_priority(priority: Any) -> int:
    """Return a priority as ``int`` itself.

    Raises:
        ConfigError: it is not a whole number from -32768 to 32767.
    """
    number = whole_number(priority)
    if number is None or not LEAST_URGENT <= number <= MOST_URGENT:
        raise ConfigError(f"expected a whole number from {LEAST_URGENT} to {MOST_URGENT} as priority, got {priority!r}")
    return number
