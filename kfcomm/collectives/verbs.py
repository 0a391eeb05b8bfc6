"""The verbs whose shapes every rank knows by itself: one collective each, begun before the call returns.

Each checks its arguments, finds its plan, makes room for the result and posts. A call that fails its checks
raises at once, and fails the other ranks' calls under the same name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from kfcomm.arrays import HostArray, OutList, adapt, adapt_out, holds_arrays, is_list, overlaps, same_memory
from kfcomm.arrays.kinds import NUMPY, READ_ONLY
from kfcomm.arrays.reduce import kernel, wire_dtype_of
from kfcomm.collectives.compiled import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    GATHER,
    IN_PLACE,
    NO_ARRAY,
    REDUCE,
    REDUCE_SCATTER,
    Arguments,
)
from kfcomm.collectives.group import UNNAMED, Group, checked_priority, may_overlap
from kfcomm.collectives.handle import Handle, named
from kfcomm.collectives.on_device.calls import Order
from kfcomm.collectives.on_device.through_host import Out
from kfcomm.collectives.on_device.verbs import DeviceVerbs
from kfcomm.collectives.plans import Plan, Plans, Shape, row_elements
from kfcomm.common.arguments import checked_name, whole_number
from kfcomm.common.sizes import seconds_of
from kfcomm.core.chunk import split
from kfcomm.core.collective import GroupView
from kfcomm.errors import ConfigError, KfcommError
from kfcomm.types import Op, Seconds, Verb

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
OPS = frozenset(Op)
FOLDING = frozenset((ALL_REDUCE, REDUCE, REDUCE_SCATTER))
"""Verbs with an op."""
ROOTED = frozenset((REDUCE, BROADCAST, GATHER))
"""Verbs with a root, of those of which every rank knows the shape of the result by itself."""

MakePlan: TypeAlias = tuple[Any, ...]
"""``(make, *arguments)``: the plan is ``make(plans, *arguments)``. Not a closure, which costs four times as much."""


@dataclass(frozen=True, slots=True)
class Later:
    """A later step of a call: its key and use of it, and the plans under which the call began."""

    key: str
    seq: int
    plans: Plans


class Checks:
    """The block of ``Verbs._checks``: four times as quick as a generator in its place, which takes 2 µs."""

    __slots__ = ("_devices", "_group", "_key", "_later", "_name", "_steps", "priority")

    def __init__(
        self, group: Group, key: str, steps: int = 1, later: Later | None = None, devices: DeviceVerbs | None = None,
        name: str | None = None,
    ) -> None:  # fmt: skip
        self._group = group
        self._key = key
        self._steps = steps
        self._later = later
        self._devices = devices
        self._name = name
        self.priority = 0

    def __enter__(self) -> tuple[str | None, int]:
        return self._name, self.priority

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception):
            return
        if self._later is None:
            self._group.refuse(self._key, error, steps=self._steps)
        else:
            self._group.refuse_now(self._later.key, error, seq=self._later.seq)
        if self._devices is not None:
            self._devices.refused(self._key)
        if isinstance(error, (ValueError, TypeError)) and not isinstance(error, KfcommError):
            raise ConfigError(str(error)) from error


class Verbs:
    """The collectives of one group. ``_group``, ``_devices`` and ``_check_open`` come from the communicator."""

    _group: Group
    _devices: DeviceVerbs

    def _check_open(self) -> None:
        raise AssertionError  # the communicator says whether it is open

    def all_reduce(
        self, x: Any, name: str | None = None, *, op: Any = Op.SUM, out: Any = None,
        timeout: Seconds | None = None, priority: int = 0, wire_dtype: Any = None, shared: bool = False,
        weight: float | None = None, stream: Any = None,
    ) -> Handle[Any]:  # fmt: skip
        """Every rank gets ``x[0] ∘ x[1] ∘ ...``, element by element; the same bits on every rank.

        Args:
            x: array of any shape and supported dtype; the same shape and dtype on every rank. Not modified, and
                not to be modified before the handle is done. Or a list of arrays, as many on every rank: all of them
                are reduced, in few collectives, and a list of results comes back (into the list ``out``, if given).
            name: the collective's name: ranks need not call in the same order. None: the group's next number.
            op: ``sum``, ``avg``, ``min``, ``max``, ``prod``, and for integers and bool ``and``, ``or``, ``xor``;
                or what others have for these: ``"mean"``, ``np.add``, ``torch.distributed.ReduceOp.SUM``, ``MPI.SUM``.
                Or ``adasum``, for floating point numbers in host memory: the sum of gradients that are orthogonal, the
                mean of those that are parallel, each array by itself; see "Ways to agree".
            out: where the result goes (may be ``x``); else it is a new array of the kind of ``x``. Of the dtype of the
                result, and of its shape or one that joins or splits neighbouring axes of it.
            timeout: seconds, or a ``timedelta``; None for the communicator's.
            priority: -32768 to 32767, larger is more urgent: on every link this rank's chunks of a more urgent call go
                before those of others, also of others that were under way first. It changes no result; see "Let
                what is urgent go first".
            wire_dtype: ``"float16"`` or ``"bfloat16"``, as a name or as a dtype of NumPy, torch or ml_dtypes, the same
                on every rank: what travels is rounded to it, which
                takes half the bytes of float32. For float32, float64, and that dtype itself. Sums, averages and
                products are accumulated in float32, and every rank gets the same bits, rounded. With n ranks and
                u = ``2**-11`` for float16, ``2**-8`` for bfloat16, a sum is wrong by at most about
                (n + 1)·u·(abs(x[0]) + abs(x[1]) + ...), less where sums go through fewer ranks; beyond 65504 float16
                is infinite. See "Send fewer bytes". For arrays in host memory.
            shared: the result is a NumPy array that cannot be written to: one for all ranks of a host, where the group
                shares memory and the message is long; else each has its own. The same on every rank, and not with
                ``out``. See "Arrays that need no copy". For arrays in host memory.
            weight: for ``op="avg"``: the result is the sum of all ``weight·x`` over the sum of all weights. This rank's
                own, a finite number from 0 on (how many samples ``x`` is the mean of, say); at 0 it gives nothing,
                whatever ``x`` holds. All ranks give one, or none does. For one array in host memory. Costs a copy of
                ``x``.
            stream: for arrays in the memory of a device, the caller's stream there: what was put on it before this call
                is done before ``x`` is read. None: the one on which the calling thread works now. See "GPUs".

        Returns:
            A handle whose result has the shape and dtype of ``x``. On a device it is done when the result is ready on
            the caller's stream, for which the host has not waited.

        Raises:
            ConfigError: the arguments cannot work (also for the other ranks' calls: ``CollectiveAborted``).
            CollectiveMismatch, CollectiveTimeout, CollectiveAborted, PeerLost: from the handle.

        Cost: with n ranks and S bytes, ring: 2(n-1) steps, 2(n-1)/n·S bytes per rank; see "Algorithms".
        """
        if weight is not None:
            from kfcomm.collectives.weighted import average

            refused = {"shared": shared, "wire_dtype": wire_dtype, "stream": stream}
            return average(self, x, name, weight, out, timeout, priority, op=op, refused=refused)
        if shared:
            return self._shared(x, name, out, timeout, priority, stream, op, wire_dtype)
        again = self._again(x, name, (ALL_REDUCE, op), out, timeout, priority, stream, wire_dtype)
        if again is not None:
            return again
        if isinstance(op, str) and op == "adasum":
            from kfcomm.collectives.batches import adasum_of

            return adasum_of(self, x, name, out, timeout, priority, wire_dtype, stream)
        return self._collective(ALL_REDUCE, x, name, out, timeout, priority, stream, op=op, wire_dtype=wire_dtype)

    def _shared(
        self, x: Any, name: str | None, out: Any, timeout: Seconds | None, priority: int, stream: Any, op: Any,
        wire_dtype: Any,
    ) -> Handle[Any]:  # fmt: skip
        with self._checks(name) as (name, _):
            if out is not None:
                raise ConfigError("a shared result is an array of its own: give either shared or out")
            if self._devices.takes(x, stream):
                raise ConfigError("a shared result is in host memory: shared is not for arrays on a device")
        return self._on_host(
            ALL_REDUCE, x, name, None, timeout, priority, op=op, wire_dtype=wire_dtype, is_step=True, is_shared=True
        )

    def all_reduce_many(
        self, arrays: Mapping[str, Any], name: str | None = None, *, op: Any = Op.SUM,
        out: Mapping[str, Any] | None = None, timeout: Seconds | None = None, priority: int = 0,
        wire_dtype: Any = None, weight: float | None = None, stream: Any = None,
    ) -> Handle[dict[str, Any]]:  # fmt: skip
        """``all_reduce`` of every value of a mapping in few collectives: small arrays travel together.

        Every rank gives the same names, each with the same shape and dtype; the order of the mapping does not matter.
        It meets calls of ``all_reduce_many`` alone, never an ``all_reduce`` of one of the names.

        Args:
            arrays: by name; of any shapes and dtypes.
            name: the collective's name; None: the first of the names of ``arrays``, in their order as text.
            op: see ``all_reduce``, also for what follows.
            out: where the results go, by the same names; any may be the array itself.
            timeout: see ``all_reduce``.
            priority: see ``all_reduce``.
            wire_dtype: see ``all_reduce``.
            weight: see ``all_reduce``; one for all of the arrays.
            stream: see ``all_reduce``.

        Returns:
            A handle whose result is ``out``, or maps the same names to the results, in the order of ``arrays``; those
            of small arrays share memory. If a part fails, the whole does; cancelling it cancels all.

        Raises:
            ConfigError: one of them cannot work (also for the other ranks' calls: ``CollectiveAborted``).

        Cost: per array about 2 µs and two copies where it has up to 64 KiB; else as ``all_reduce``.
        """
        if weight is not None:
            from kfcomm.collectives.weighted import average_many

            refused = {"wire_dtype": wire_dtype, "stream": stream}
            return average_many(self, arrays, name, weight, out, timeout, priority, op=op, refused=refused)
        from kfcomm.collectives.batches import reduce_mapping

        return reduce_mapping(self, arrays, name, op, out, timeout, priority, wire_dtype, stream)

    def reduce(
        self, x: Any, root: int = 0, name: str | None = None, *, op: Any = Op.SUM, out: Any = None,
        timeout: Seconds | None = None, priority: int = 0, wire_dtype: Any = None, stream: Any = None,
    ) -> Handle[Any]:  # fmt: skip
        """Rank ``root`` gets what ``all_reduce`` would give; the others get None. See ``all_reduce``.

        With a ``wire_dtype`` the result, which does not travel, is not rounded to it.
        """
        again = self._again(x, name, (REDUCE, op, type(root), root), out, timeout, priority, stream, wire_dtype)
        if again is not None:
            return again
        return self._collective(
            REDUCE, x, name, out, timeout, priority, stream, op=op, root=root, wire_dtype=wire_dtype
        )

    def broadcast(
        self, x: Any, root: int = 0, name: str | None = None, *, out: Any = None, timeout: Seconds | None = None,
        priority: int = 0, wire_dtype: Any = None, stream: Any = None,
    ) -> Handle[Any]:  # fmt: skip
        """Every rank gets the ``x`` of rank ``root``.

        Args:
            x: an array of the same shape and dtype on every rank; only the root's values matter. Or a list of arrays:
                see ``all_reduce``.
            root: rank in the group.
            name: see ``all_reduce``, also for ``out`` and ``timeout``.
            out: where the result goes; may be ``x``.
            timeout: see ``all_reduce``.
            priority: see ``all_reduce``.
            wire_dtype: as in ``all_reduce``: every rank, the root included, gets each number rounded once, wrong by at
                most abs(x)·u.
            stream: see ``all_reduce``.
        """
        again = self._again(x, name, (BROADCAST, type(root), root), out, timeout, priority, stream, wire_dtype)
        if again is not None:
            return again
        return self._collective(BROADCAST, x, name, out, timeout, priority, stream, root=root, wire_dtype=wire_dtype)

    def reduce_scatter(
        self, x: Any, name: str | None = None, *, op: Any = Op.SUM, out: Any = None,
        timeout: Seconds | None = None, priority: int = 0, wire_dtype: Any = None, stream: Any = None,
    ) -> Handle[Any]:  # fmt: skip
        """Rank r gets the r-th of ``size`` parts, along the first axis, of what ``all_reduce`` would give.

        Parts are as even as possible: the first ``len(x) % size`` are one row longer. A list holds one array for each
        rank, and rank r gets the sum of all ranks' r-th; their shapes may differ, but not between ranks. An ``out`` of
        the shape of one row takes a part of one row. See ``all_reduce``; with a ``wire_dtype`` the results, which do
        not travel, are not rounded to it.
        """
        again = self._again(x, name, (REDUCE_SCATTER, op), out, timeout, priority, stream, wire_dtype)
        if again is not None:
            return again
        return self._collective(REDUCE_SCATTER, x, name, out, timeout, priority, stream, op=op, wire_dtype=wire_dtype)

    def barrier(self, name: str | None = None, *, timeout: Seconds | None = None, priority: int = 0) -> Handle[None]:
        """Done when every rank has called it."""
        again = self._again(NO_ARRAY, name, (BARRIER,), None, timeout, priority)
        if again is not None:
            return again
        with self._checks(name, timeout, priority) as (name, priority):
            pass

        return self._begin(
            name, None, None, None, timeout, priority, (Plans.barrier, name or UNNAMED), alike=(BARRIER,)
        )

    # ---------------------------------------------------------------- shared by the verbs

    def _collective(
        self, verb: Verb, x: Any, name: str | None, out: Any, timeout: Seconds | None, priority: int, stream: Any, *,
        op: Any = None, root: Any = None, wire_dtype: Any = None, handle: Handle[Any] | None = None,
    ) -> Handle[Any]:  # fmt: skip
        """The long way of a verb of which every rank knows the shape of the result by itself.

        ``op``, ``root``: ignored by verbs without. ``handle``: what is returned; a new one if left out.
        """
        devices = self._devices
        if is_list(x):
            with self._checks(name, timeout, priority) as (name, priority):
                is_listed = holds_arrays(x)
            if is_listed:
                from kfcomm.collectives.batches import of_list

                return of_list(
                    self, verb, x, name, out, timeout, priority, stream, op=op, root=root, wire_dtype=wire_dtype
                )
        if not devices.takes(x, stream):
            return self._on_host(
                verb, x, name, out, timeout, priority, op=op, root=root, wire_dtype=wire_dtype, handle=handle
            )
        with self._checks(name, timeout, priority, devices=devices) as (name, priority):
            devices.check(wire_dtype)
            to = self._check_rank("root", root) if verb in ROOTED else -1
            array = devices.read(x, stream)
            chosen = checked_op(op, array.dtype) if verb in FOLDING else None
            shape = _result_shape(verb, array.shape, self._group.view, to)
            order = Order(verb, name or UNNAMED, array.dtype, array.shape, chosen, to, overlapping=may_overlap(name))
            return devices.one(order, array, shape, out, seconds_of(timeout), priority, handle)

    def _on_host(
        self, verb: Verb, x: Any, name: str | None, out: Any, timeout: Seconds | None, priority: int, *,
        op: Any = None, root: Any = None, wire_dtype: Any = None, handle: Handle[Any] | None = None,
        is_step: bool = False, is_shared: bool = False,
    ) -> Handle[Any]:  # fmt: skip
        """As ``_collective``, of host memory; ``is_step``: of a call of another verb, which is never compiled.

        ``is_shared``: all ranks get one result, of an all_reduce.
        """
        with self._checks(name, timeout, priority) as (name, priority):
            to = self._check_rank("root", root) if verb in ROOTED else -1
            array = adapt(x)
            chosen = checked_op(op, array.dtype) if verb in FOLDING else None
            wire = None if wire_dtype is None else wire_dtype_of(wire_dtype, array.dtype)
            shape = _result_shape(verb, array.shape, self._group.view, to)
            target = self._target(verb, out, shape, array)
        if is_shared:
            array = HostArray(array.flat, array.shape, READ_ONLY, array.is_view)
        plan = (Plans.of, verb, array.dtype, array.shape, chosen, to, name or UNNAMED, wire, is_shared)
        alike: Arguments | None = None
        if type(x) is np.ndarray and wire is None and not is_step:
            alike = (verb,) if chosen is None else (verb, op if isinstance(op, Hashable) else chosen)
            if verb in ROOTED:
                alike += (type(root), root)
        return self._begin(
            name, array, shape, target, timeout, priority, plan, in_place=verb in IN_PLACE, handle=handle, alike=alike
        )

    def _target(self, verb: Verb, out: Any, shape: Shape | None, array: HostArray) -> Out | None:
        """Where the result goes, if the caller says so: for a gather perhaps a list, with an array for each rank."""
        if out is None or shape is None:
            return None
        if verb in (GATHER, ALL_GATHER) and is_list(out):
            return OutList.of(out, [array.shape] * self._group.view.size, array.dtype)
        return adapt_out(out, shape, array.dtype)

    def _checks(
        self, name: str | None, timeout: Seconds | None = None, priority: int = 0, *, steps: int = 1,
        later: Later | None = None, devices: DeviceVerbs | None = None,
    ) -> Checks:  # fmt: skip
        """What fails in the block of this fails the other ranks' calls too; the error is this call's.

        The block has the name and the priority of the call made plain: ``with ... as (name, priority)``.

        ``steps``: of the call. ``later``: the block is about its later step, which fails at once; else the call
        fails at its place among the posts. ``devices``: these are told, too.
        """
        try:
            self._check_open()
            name = checked_name(name)
        except KfcommError as error:
            if later is not None:
                self._group.refuse_now(later.key, error, seq=later.seq)
            raise
        checks = Checks(self._group, name or UNNAMED, steps, later, devices, name)
        if timeout is not None or priority or type(priority) is not int:
            with checks:
                seconds_of(timeout)
                checks.priority = checked_priority(priority)
        return checks

    def _again(
        self, x: Any, name: str | None, arguments: Arguments, out: Any, timeout: Seconds | None, priority: int,
        stream: Any = None, wire_dtype: Any = None,
    ) -> Handle[Any] | None:  # fmt: skip
        """A call under a name whose last use was alike; None if it has to go the long way. See ``CompiledName``."""
        if timeout is not None or priority or wire_dtype is not None or stream is not None or type(x) is not np.ndarray:
            return None
        group = self._group
        if type(name) is not str:
            name = checked_name(name)
        compiled = group.compiled.get(name)
        if compiled is None:
            return self._when_agreed(x, name, arguments, out) if group.waits else None
        handle: Handle[Any] = Handle(loop=group.engine.loop)
        operation = compiled.start(x, arguments, out, handle)
        return None if operation is None else named(handle, operation)

    def _when_agreed(self, x: Array, name: str | None, arguments: Arguments, out: Any) -> Handle[Any] | None:
        """The same while a strategy is being agreed: what was alike under the one before need not be checked again."""
        group = self._group
        former = group.former.get(name)
        if x is NO_ARRAY or former is None or not former.is_like(x, arguments, out):
            return None
        handle: Handle[Any] = Handle(loop=group.engine.loop)

        def begin() -> None:
            if handle.cancelled():
                handle.seq = group.refuse_now(name or UNNAMED, asyncio.CancelledError())
                return
            compiled = group.compiled.get(name)  # if the strategy has come again
            operation = None if compiled is None else compiled.start(x, arguments, out, handle)
            if operation is not None:
                named(handle, operation)
                return
            verb = arguments[0]
            op, root = arguments[1] if verb in FOLDING else None, arguments[-1]
            try:
                self._on_host(verb, x, name, out, None, 0, op=op, root=root, handle=handle)
            except Exception as error:  # noqa: BLE001  the communicator was closed meanwhile: there is no caller to tell
                handle.set_exception(error)

        group.in_order(begin)
        return handle

    def _begin(
        self, name: str | None, array: HostArray | None, shape: Shape | None, target: Out | None,
        timeout: Seconds | None, priority: int, plan: MakePlan, *, in_place: bool = False, later: Later | None = None,
        handle: Handle[Any] | None = None, alike: Arguments | None = None,
    ) -> Handle[Any]:  # fmt: skip
        """Post now, or after a verdict on the strategy, with room for a result of ``shape``.

        ``shape``: None if this rank gets no result. ``later``: for the later steps of a call, which are posted at once,
        under the plans of its first. ``handle``: what is returned; a new one if left out. ``alike``: what a next call
        under this name needs to have in common with this one, if its name can be compiled.
        """
        group = self._group
        timeout_s = seconds_of(timeout)
        made: Handle[Any] = Handle(loop=group.engine.loop) if handle is None else handle

        def post() -> None:
            if later is None:
                key, seq, plans = name or UNNAMED, None, group.plans
            else:
                key, seq, plans = later.key, later.seq, later.plans
            try:
                chosen = plan[0](plans, *plan[1:])
                result, value, outcome = room(chosen, array, shape, target, in_place)
            except Exception as error:  # noqa: BLE001  no memory for the result, perhaps: the other ranks are told
                made.seq = group.refuse_now(key, error, seq=seq)
                made.set_exception(error)
                return
            group.post(
                chosen, key, overlapping=may_overlap(name), source=None if array is None else array.flat, result=result,
                value=value, outcome=outcome, timeout_s=timeout_s, priority=priority, handle=made, seq=seq,
                generation=plans.generation,
            )  # fmt: skip
            if alike is not None and (array is None or array.is_view):
                group.compile(name, alike, array, shape, chosen)

        if later is not None or not group.waits:
            post()
            return made

        def begin() -> None:
            if made.cancelled():
                made.seq = group.refuse_now(name or UNNAMED, asyncio.CancelledError())
                return
            post()

        group.in_order(begin)
        return made

    def _check_rank(self, what: str, rank: Any) -> int:
        """``rank`` as a plain int, which is what travels."""
        size, number = self._group.view.size, whole_number(rank)
        if number is None or not 0 <= number < size:
            raise ConfigError(f"{what} {rank!r} is not a rank of this group (0 to {size - 1})")
        return number


def _result_shape(verb: Verb, shape: Shape, view: GroupView, root: int) -> Shape | None:
    """What this rank gets of an array of this shape; None if it gets nothing."""
    if verb in (REDUCE, GATHER) and view.rank != root:
        return None
    if verb in (GATHER, ALL_GATHER):
        return (view.size, *shape)
    if verb is REDUCE_SCATTER:
        row_elements(shape)
        return (split(shape[0], view.size)[view.rank][1], *shape[1:])
    if verb is ALL_TO_ALL:
        row_elements(shape)
        if shape[0] % view.size:
            raise ConfigError(
                f"all_to_all shares {shape[0]} rows among {view.size} ranks: "
                "give a multiple, or a list of arrays, one for each rank"
            )
    return shape


def checked_op(op: Any, dtype: np.dtype[Any]) -> Op:
    """The op that is meant, if it has a meaning for this dtype."""
    if not isinstance(op, str) or op not in OPS:
        from kfcomm.arrays.reduce.ops import op_of

        op = op_of(op, dtype)
    return kernel(op, dtype).op


def room(
    plan: Plan, array: HostArray | None, shape: Shape | None, target: Out | None, in_place: bool
) -> tuple[Array | None, Any, Callable[[Any], Any] | None]:
    """Memory for the result, and what the caller gets: see ``Operation`` for ``value`` and ``outcome``."""
    if array is None or shape is None:
        return None, None, None
    if target is None:
        result = np.empty(plan.result_count, plan.dtype)
        value = result if len(shape) == 1 else result.reshape(shape)
        return result, value, None if array.kind is NUMPY else array.kind.restore
    flat = target.flat
    if overlaps(flat, array.flat) or (not in_place and same_memory(flat, array.flat)):
        scratch = np.empty(plan.result_count, plan.dtype)

        def copied(target: Out) -> Any:
            np.copyto(flat, scratch)
            return target.finish()

        return scratch, target, copied
    return flat, target, _finish


def _finish(target: Out) -> Any:
    return target.finish()
