"""A name that was used before, with all that can be known of its next use worked out: an all_reduce of one kind.

A group keeps one for each name that is in use. A call that fits skips what the first one did: checks, plan, names,
signature, deadlines. Whatever does not fit, or is unusual, goes the long way, which alone knows what to make of it. All
belong to the strategy in force, and are there again when it comes again.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from kfcomm.core.deadlines import first_due_s
from kfcomm.core.machine import FOLD, FOLD_UP, INPUT, UP, Effects
from kfcomm.core.program import Lane
from kfcomm.runtime.operation import COPIED_NBYTES, Array, Operation

if TYPE_CHECKING:
    from kfcomm.collectives.group import Group
    from kfcomm.collectives.handle import Handle
    from kfcomm.collectives.plans import Plan
    from kfcomm.runtime.buffers import Payload

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
        "_dtype",
        "_is_flat",
        "_op",
        "_shape",
        "compiled",
        "engine",
        "first_s",
        "group",
        "is_small",
        "is_whole",
        "timeout_s",
        "work",
    )

    def __init__(self, group: Group, name: str | None, x: np.ndarray[Any, Any], op: str, plan: Plan) -> None:
        self.engine = group.engine
        self.group = group
        self._dtype = x.dtype
        self._shape = x.shape
        self._is_flat = x.ndim == 1
        self._op = op
        self.work = plan.work
        self.compiled = group.engine.router.compiled(group.view, name or "", plan.signature, plan.program, plan.sizes)
        self.is_small = plan.program.num_slots == 1 and 0 < x.nbytes <= COPIED_NBYTES
        self.is_whole = plan.program.num_slots == 1 and plan.work.is_partial_shared
        self.timeout_s = group.timeout_s
        self.first_s = first_due_s(group.timeout_s, group.engine.deadlines.stall_after_s)

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
        if self._is_flat:
            use = Use(self, handle, x, value, value)
        else:
            use = Use(self, handle, x.reshape(-1), value.reshape(-1), value)
        return use if self.engine.post_again(self.compiled, use) else None


class Use(Operation):
    """One use of a compiled name: an operation of which all is known but its number and its arrays.

    Attributes:
        is_whole: it is one chunk, and what is folded lies in the result.
    """

    is_whole = False
    def __init__(self, name: CompiledName, future: Any, source: Array, result: Array, value: Any) -> None:
        compiled = name.compiled
        program = compiled.program
        self.compiled = compiled
        self.program = program
        self.remaining = program.num_slots
        self._folded = bytearray(program.num_slots) if program.small_counts else [0] * program.num_slots
        if program.gate:
            self._gate = program.gate
        self.posted = compiled.posted
        if name.is_small:
            self.is_small = True
        if name.is_whole:
            self.is_whole = True
        self.stamp = name.group.plans.generation << 1
        self.engine = name.engine
        self.work = name.work
        self.future = future
        self._in = source
        self._out = result
        self.value = value
        self.posted_s = self.heard_s = now_s = monotonic()
        self.timeout_s = name.timeout_s
        self.due_s = now_s + name.first_s

    def start(self, effects: Effects) -> None:
        """See ``Machine.start``. It is no first use, and has no priority; if it is to be traced, it is none."""
        key = self.compiled.key
        self.engine.recorder.append((self.posted_s, "posted", key.name, self.seq, self.compiled.signature[0]))
        sends = self.program.first_sends
        if sends is None:
            super(Operation, self).start(effects)
        else:
            for to, lane, index in sends:
                self.engine.send(self, to, lane, index, UP, INPUT, None)

    def _fold(
        self, tag: int, lane: Lane, index: int, payload: Payload | memoryview, first: bool, effects: Effects
    ) -> None:
        if not self.is_whole or type(payload) is not memoryview or tag == FOLD_UP:
            super()._fold(tag, lane, index, payload, first, effects)
            return
        kernel, out = self._folding(), self._out
        own = self._in if first else out
        if tag == FOLD:
            kernel.fold(own, np.frombuffer(payload, out.dtype), out)
        else:
            kernel.last(own, np.frombuffer(payload, out.dtype), out, self.work.size)

    def _store(self, lane: Lane, index: int, payload: Payload | memoryview, effects: Effects) -> None:
        if type(payload) is memoryview and lane.count == len(self._out):
            self._out[:] = np.frombuffer(payload, self._out.dtype)
        else:
            super()._store(lane, index, payload, effects)
