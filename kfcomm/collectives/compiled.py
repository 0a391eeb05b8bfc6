"""A name that was used before, with all that can be known of its next use worked out: an all_reduce of one kind.

A group keeps one for each name that is in use. A call that fits skips what the first one did: checks, plan, names,
signature, deadlines. Whatever does not fit, or is unusual, goes the long way, which alone knows what to make of it. All
belong to the strategy in force, and are there again when it comes again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kfcomm.core.deadlines import first_due_s
from kfcomm.runtime.operation import Operation

if TYPE_CHECKING:
    from kfcomm.collectives.group import Group
    from kfcomm.collectives.handle import Handle
    from kfcomm.collectives.plans import Plan

MAX_NAMES = 1 << 14
"""Of a group, compiled at a time, half a KiB each: more than this are hardly used again and again."""


class CompiledName:
    """See the module.

    Args:
        group: whose name it is.
        name: of the calls; None for those without one.
        x: the array of the first use.
        op: as the caller gave it.
        plan: of the first use.
    """

    __slots__ = (
        "_compiled",
        "_dtype",
        "_engine",
        "_first_s",
        "_group",
        "_is_flat",
        "_op",
        "_plan",
        "_shape",
        "_timeout_s",
    )

    def __init__(self, group: Group, name: str | None, x: np.ndarray[Any, Any], op: str, plan: Plan) -> None:
        self._engine = group.engine
        self._group = group
        self._dtype = x.dtype
        self._shape = x.shape
        self._is_flat = x.ndim == 1
        self._op = op
        self._plan = plan
        self._compiled = group.engine.router.compiled(
            group.view, name or "", plan.signature, plan.program, plan.sizes
        )
        self._timeout_s = group.timeout_s
        self._first_s = first_due_s(group.timeout_s, group.engine.deadlines.stall_after_s)

    def start(self, x: np.ndarray[Any, Any], op: str, out: Any, handle: Handle[Any] | None) -> Operation | None:
        """Begin a use with this array, or None if it is not like the first one. Nothing has happened then."""
        if x.dtype is not self._dtype or x.shape != self._shape or not x.flags.c_contiguous:
            return None
        if op is not self._op and op != self._op:
            return None
        if out is None:
            try:
                value = np.empty(self._shape, self._dtype)
            except MemoryError:  # the other ranks have to be told
                return None
        elif out is x and x.flags.writeable:
            value = x
        else:
            return None
        plan = self._plan
        if self._is_flat:
            operation = Operation(handle, x, value, plan.work, value=value)
        else:
            operation = Operation(handle, x.reshape(-1), value.reshape(-1), plan.work, value=value)
        operation.timeout_s = self._timeout_s
        operation.due_s = operation.posted_s + self._first_s
        generation = self._group.plans.generation
        return operation if self._engine.post_again(self._compiled, operation, generation) else None
