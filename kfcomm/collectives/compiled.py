"""A name that was used before, with all that can be known of its next use worked out: a collective of one kind.

A group keeps one for each name that is in use. A call that fits skips what the first one did: checks, plan, names,
signature, deadlines. Whatever does not fit, or is unusual, goes the long way, which alone knows what to make of it. All
are forgotten when the strategy changes.

Compiled are verbs whose shapes every rank knows by itself, in calls with NumPy arrays and without a timeout, a priority
or a wire dtype of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from kfcomm.core.deadlines import first_due_s
from kfcomm.runtime.operation import Operation
from kfcomm.types import Verb

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfcomm.collectives.group import Group
    from kfcomm.collectives.handle import Handle
    from kfcomm.collectives.plans import Plan

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Shape: TypeAlias = tuple[int, ...]
Arguments: TypeAlias = tuple[Any, ...]
"""A verb, then its op, then the type of its root and its root, as far as it has them.

The type, since 1.0 and True equal 1, and what only equals a rank is for the long way to judge.
"""

# Looked up at each call: as attributes of the enum they would cost twice as much.
ALL_REDUCE: Final = Verb.ALL_REDUCE
REDUCE: Final = Verb.REDUCE
BROADCAST: Final = Verb.BROADCAST
GATHER: Final = Verb.GATHER
ALL_GATHER: Final = Verb.ALL_GATHER
REDUCE_SCATTER: Final = Verb.REDUCE_SCATTER
ALL_TO_ALL: Final = Verb.ALL_TO_ALL
BARRIER: Final = Verb.BARRIER

COMPILABLE: Final = frozenset((ALL_REDUCE, REDUCE, BROADCAST, GATHER, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BARRIER))
"""Verbs that can be compiled."""

IN_PLACE: Final = frozenset((ALL_REDUCE, REDUCE, BROADCAST))
"""Verbs whose result may be made in the memory of the input."""

NO_ARRAY: Final = np.empty(0, np.uint8)
"""What a verb is started with that takes no array."""

NOT_ALIKE: Final = object()
"""In place of a result: the call is not like the one before it, and nothing has begun."""

MAX_NAMES = 1 << 14
"""Of a group, compiled at a time, half a KiB each: more than this are hardly used again and again."""


class Compiled(ABC):
    """What is known of a name that was used before.

    Args:
        group: whose name it is.
        name: of the calls; None for those without one.
        arguments: of the first use.
        plan: of the first use.
    """

    __slots__ = (
        "_arguments",
        "_engine",
        "_first_s",
        "_key",
        "_plan",
        "_signature",
        "_timeout_s",
        "_view",
        "_work",
    )

    def __init__(self, group: Group, name: str | None, arguments: Arguments, plan: Plan) -> None:
        self._engine = group.engine
        self._view = group.view
        self._arguments = arguments
        self._plan = plan
        self._work = plan.work
        self._key = group.engine.router.key(group.view.id, name or "")
        self._signature = group.engine.router.same(plan.signature)
        self._timeout_s = group.timeout_s
        self._first_s = first_due_s(group.timeout_s, group.engine.deadlines.stall_after_s)

    @abstractmethod
    def start(self, x: Any, arguments: Arguments, out: Any, handle: Handle[Any] | None) -> Operation | None:
        """Begin a use with these arrays, or None if it is not like the first one. Nothing has happened then.

        Without a handle the caller waits for the operation itself.
        """

    @abstractmethod
    def use(self, x: Any, arguments: Arguments, out: Any) -> Use | None:
        """Uses with these very arrays again and again, or None if they are not like the first one."""


class CompiledBarrier(Compiled):
    """A name under which no arrays are exchanged; see ``Compiled``."""

    __slots__ = ("_use",)

    def __init__(self, group: Group, name: str | None, arguments: Arguments, plan: Plan) -> None:
        super().__init__(group, name, arguments, plan)
        self._use = Use(self, None)

    def start(self, x: Any, arguments: Arguments, out: Any, handle: Handle[Any] | None) -> Operation | None:
        """See ``Compiled.start``."""
        return self._use.start(handle) if arguments == self._arguments else None

    def use(self, x: Any, arguments: Arguments, out: Any) -> Use | None:
        """See ``Compiled.use``."""
        return self._use if arguments == self._arguments else None


class CompiledName(Compiled):
    """A name under which arrays are exchanged.

    Args:
        group: whose name it is.
        name: of the calls; None for those without one.
        arguments: of the first use.
        dtype: of the array of the first use.
        shape: of the array of the first use.
        gets: shape of this rank's result; None if it gets none.
        plan: of the first use.
    """

    __slots__ = ("_dtype", "_gets", "_is_flat", "_is_in_place", "_room", "_shape")

    def __init__(
        self, group: Group, name: str | None, arguments: Arguments, dtype: np.dtype[Any], shape: Shape,
        gets: Shape | None, plan: Plan,
    ) -> None:  # fmt: skip
        super().__init__(group, name, arguments, plan)
        self._dtype = dtype
        self._shape = shape
        self._gets = gets
        self._is_flat = len(shape) == 1 and (gets is None or len(gets) == 1)
        self._is_in_place = gets is not None and arguments[0] in IN_PLACE
        # One call either way, of something that is not Python: no test, no look-up of what is known.
        self._room: Callable[[], Any] = NoneType if gets is None else partial(np.empty, gets, dtype)

    def start(self, x: Any, arguments: Arguments, out: Any, handle: Handle[Any] | None) -> Operation | None:
        """See ``Compiled.start``."""
        if (
            arguments != self._arguments
            or x.dtype is not self._dtype
            or x.shape != self._shape
            or not x.flags.c_contiguous
        ):
            return None
        if out is None:
            try:
                value = self._room()
            except MemoryError:  # the other ranks have to be told
                return None
        elif out is x and self._is_in_place and x.flags.writeable:
            value = x
        elif self._takes(x, out):
            value = None if self._gets is None else out
        else:
            return None
        if self._is_flat:
            operation = Operation(handle, x, value, self._work, value=value)
        else:
            result = None if value is None else value.reshape(-1)
            operation = Operation(handle, x.reshape(-1), result, self._work, value=value)
        operation.timeout_s = self._timeout_s
        operation.due_s = operation.posted_s + self._first_s
        if self._engine.post_again(self._key, self._view, self._signature, self._plan, operation):
            return operation
        return None

    def use(self, x: Any, arguments: Arguments, out: Any) -> Use | None:
        """See ``Compiled.use``."""
        if arguments != self._arguments or x.dtype is not self._dtype:
            return None
        if x.shape != self._shape or not x.flags.c_contiguous:
            return None
        if self._gets is None:
            return Use(self, x)
        if out is None:
            return Use(self, x, room=self._room)
        if (out is x and self._is_in_place and x.flags.writeable) or self._takes(x, out):
            return Use(self, x, out)
        return None

    def _takes(self, x: Array, out: Any) -> bool:
        """Whether a result can be made in ``out``, which is ignored where there is none."""
        if self._gets is None:
            return True
        if type(out) is not np.ndarray or out.dtype is not self._dtype or out.shape != self._gets:
            return False
        # Two contiguous arrays share memory if their bounds do.
        return out.flags.c_contiguous and out.flags.writeable and not np.may_share_memory(x, out)


class Use:
    """Uses of a compiled name with arrays that stay the same: nothing is left to be checked or looked up.

    Args:
        compiled: the name.
        x: what this rank gives, if anything.
        value: where the result goes, and what the caller gets; None where this rank gets nothing, or with ``room``.
        room: makes a new array for each result.
    """

    __slots__ = (
        "_engine",
        "_first_s",
        "_key",
        "_plan",
        "_result",
        "_room",
        "_signature",
        "_source",
        "_timeout_s",
        "_value",
        "_view",
        "_work",
    )

    def __init__(
        self, compiled: Compiled, x: Array | None, value: Array | None = None, *,
        room: Callable[[], Array] | None = None,
    ) -> None:  # fmt: skip
        self._engine = compiled._engine
        self._view = compiled._view
        self._plan = compiled._plan
        self._work = compiled._work
        self._key = compiled._key
        self._signature = compiled._signature
        self._timeout_s = compiled._timeout_s
        self._first_s = compiled._first_s
        self._source = None if x is None else x.reshape(-1)
        self._value = value
        self._result = None if value is None else value.reshape(-1)
        self._room = room

    def start(self, handle: Handle[Any] | None) -> Operation | None:
        """Begin a use, or None if anything is unusual. Nothing has happened then."""
        if self._room is None:
            operation = Operation(handle, self._source, self._result, self._work, value=self._value)
        else:
            try:
                value = self._room()
            except MemoryError:  # the other ranks have to be told
                return None
            operation = Operation(handle, self._source, value.reshape(-1), self._work, value=value)
        operation.timeout_s = self._timeout_s
        operation.due_s = operation.posted_s + self._first_s
        if self._engine.post_again(self._key, self._view, self._signature, self._plan, operation):
            return operation
        return None
