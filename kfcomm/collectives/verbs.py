"""The verbs whose shapes every rank knows by itself: one collective each, begun before the call returns.

Each checks its arguments, finds its plan, allocates its result and posts. A call that fails its checks
raises at once, and fails the other ranks' calls under the same name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kfcomm.arrays import HostArray, OutList, adapt, adapt_out, holds_arrays, is_list, overlaps, same_memory
from kfcomm.arrays.kinds import NUMPY, READ_ONLY
from kfcomm.arrays.reduce import kernel, wire_dtype_of
from kfcomm.collectives.compiled import NO_ARRAY, CompiledBarrier, CompiledCall, CompiledName
from kfcomm.collectives.group import UNNAMED, Group, may_overlap
from kfcomm.collectives.handle import Handle, named
from kfcomm.collectives.on_device.calls import DeviceOrder
from kfcomm.collectives.on_device.through_host import Out
from kfcomm.collectives.on_device.verbs import DeviceVerbs
from kfcomm.collectives.plans import Plan, PlanKey, Plans
from kfcomm.collectives.specs import (
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    PLAIN,
    REDUCE,
    REDUCE_SCATTER,
    SPECS,
    Arguments,
    CallOptions,
    Shape,
    VerbSpec,
)
from kfcomm.common.arguments import checked_name, whole_number
from kfcomm.errors import ConfigError, KfcommError
from kfcomm.strategies import StrategySpec
from kfcomm.types import Op, Seconds, Verb

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
OPS = frozenset(Op)

MakePlan: TypeAlias = tuple[Any, ...]
"""``(make, *arguments)``: the plan is ``make(plans, *arguments)``. Not a closure, which costs four times as much."""


@dataclass(frozen=True, slots=True)
class Later:
    """A later step of a call: its key and use of it, and the plans under which the call began."""

    key: str
    seq: int
    plans: Plans


class Posting(NamedTuple):
    """A collective of this rank, ready to be posted except for the memory of its result."""

    plan: MakePlan  # see ``MakePlan``
    array: HostArray | None = None  # input of this rank, if any
    shape: Shape | None = None  # of this rank's result; None if it gets none
    target: Out | None = None  # the caller's memory for the result
    in_place: bool = False  # the result may be made in the memory of the input
    alike: Arguments | None = None  # with which the next use of the name may be made without checks; None: by none


class Checks:
    """Context manager of ``Verbs._checks``: four times as fast as a generator, which takes 2 µs."""

    __slots__ = ("_devices", "_group", "_key", "_steps", "name", "options")

    def __init__(self, group: Group, key: str, steps: int = 1, devices: DeviceVerbs | None = None) -> None:
        self._group = group
        self._key = key
        self._steps = steps
        self._devices = devices
        self.name: str | None = None
        self.options = PLAIN

    def __enter__(self) -> tuple[str | None, CallOptions]:
        return self.name, self.options

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception):
            return
        self._group.refuse(self._key, error, steps=self._steps)
        if self._devices is not None:
            self._devices.refused(self._key)
        told = as_config_error(error)
        if told is not error:
            raise told from error


class Verbs:
    """The collectives of one group. ``_group``, ``_devices`` and ``_check_open`` come from the communicator."""

    _group: Group
    _devices: DeviceVerbs

    def _check_open(self) -> None:
        raise AssertionError  # the communicator says whether it is open

    def all_reduce(
        self, x: Any, name: str | None = None, *, op: Any = Op.SUM, out: Any = None,
        timeout: Seconds | None = None, priority: int = 0, wire_dtype: Any = None, shared: bool = False,
        weight: float | None = None, stream: Any = None, strategy: StrategySpec | None = None,
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
                mean of those that are parallel, each array by itself; see "Algorithms".
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
            strategy: graphs of this call alone, as ``set_strategy`` takes them; the same on every rank. None: those in
                force. On devices it also means that the call goes through the hosts, along these graphs, where it would
                go by NCCL. A name, or rules made of names, costs nothing from the second call on; a ``Strategy`` is
                best made once. See "Strategies".

        Returns:
            A handle whose result has the shape and dtype of ``x``. On a device it is done when the result is ready on
            the caller's stream, for which the host has not waited.

        Raises:
            ConfigError: the arguments cannot work (also for the other ranks' calls: ``CollectiveAborted``).
            CollectiveMismatch, CollectiveTimeout, CollectiveAborted, PeerLost: from the handle.

        Cost: with n ranks and S bytes, ring: 2(n-1) steps, 2(n-1)/n·S bytes per rank; see "Algorithms".
        """
        # First the cached plan: a repeated call without options builds and checks nothing.
        if (
            timeout is None and wire_dtype is None and weight is None and stream is None and strategy is None
            and not (priority or shared)
        ):  # fmt: skip
            again = self._again(x, name, (ALL_REDUCE, op), out)
            if again is not None:
                return again
        options = CallOptions(op, None, out, timeout, priority, wire_dtype, stream, weight, shared, strategy)
        if weight is not None:
            from kfcomm.collectives.averages import average

            return average(self, x, name, options)
        if shared:
            return self._shared(x, name, options)
        if isinstance(op, str) and op == "adasum":
            from kfcomm.collectives.adasum import adasum_of

            return adasum_of(self, x, name, options)
        return self._collective(ALL_REDUCE, x, name, options)

    def _shared(self, x: Any, name: str | None, options: CallOptions) -> Handle[Any]:
        with self._checks(name) as (name, _):
            if options.out is not None:
                raise ConfigError("a shared result is an array of its own: give either shared or out")
            if self._devices.takes(x, options.stream):
                raise ConfigError("a shared result is in host memory: shared is not for arrays on a device")
        return self._on_host(ALL_REDUCE, x, name, options)

    def all_reduce_many(
        self, arrays: Mapping[str, Any], name: str | None = None, *, op: Any = Op.SUM,
        out: Mapping[str, Any] | None = None, timeout: Seconds | None = None, priority: int = 0,
        wire_dtype: Any = None, weight: float | None = None, stream: Any = None, strategy: StrategySpec | None = None,
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
            strategy: see ``all_reduce``.

        Returns:
            A handle whose result is ``out``, or maps the same names to the results, in the order of ``arrays``; those
            of small arrays share memory. If a part fails, the whole does; cancelling it cancels all.

        Raises:
            ConfigError: one of them cannot work (also for the other ranks' calls: ``CollectiveAborted``).

        Cost: per array about 2 µs and two copies where it has up to 64 KiB; else as ``all_reduce``.
        """
        options = CallOptions(op, None, out, timeout, priority, wire_dtype, stream, weight, strategy=strategy)
        if weight is not None:
            from kfcomm.collectives.averages import average_many

            return average_many(self, arrays, name, options)
        if isinstance(op, str) and op == "adasum":
            from kfcomm.collectives.adasum import adasum_many

            return adasum_many(self, arrays, name, options)
        from kfcomm.collectives.batches import reduce_mapping

        return reduce_mapping(self, arrays, name, options)

    def reduce(
        self, x: Any, root: int = 0, name: str | None = None, *, op: Any = Op.SUM, out: Any = None,
        timeout: Seconds | None = None, priority: int = 0, wire_dtype: Any = None, stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> Handle[Any]:  # fmt: skip
        """Rank ``root`` gets what ``all_reduce`` would give; the others get None. See ``all_reduce``.

        With a ``wire_dtype`` the result, which does not travel, is not rounded to it.
        """
        if timeout is None and wire_dtype is None and stream is None and strategy is None and not priority:
            again = self._again(x, name, (REDUCE, op, type(root), root), out)
            if again is not None:
                return again
        options = CallOptions(op, root, out, timeout, priority, wire_dtype, stream, strategy=strategy)
        return self._collective(REDUCE, x, name, options)

    def broadcast(
        self, x: Any, root: int = 0, name: str | None = None, *, out: Any = None, timeout: Seconds | None = None,
        priority: int = 0, wire_dtype: Any = None, stream: Any = None, strategy: StrategySpec | None = None,
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
            strategy: see ``all_reduce``.
        """
        if timeout is None and wire_dtype is None and stream is None and strategy is None and not priority:
            again = self._again(x, name, (BROADCAST, type(root), root), out)
            if again is not None:
                return again
        options = CallOptions(None, root, out, timeout, priority, wire_dtype, stream, strategy=strategy)
        return self._collective(BROADCAST, x, name, options)

    def reduce_scatter(
        self, x: Any, name: str | None = None, *, op: Any = Op.SUM, out: Any = None,
        timeout: Seconds | None = None, priority: int = 0, wire_dtype: Any = None, stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> Handle[Any]:  # fmt: skip
        """Rank r gets the r-th of ``size`` parts, along the first axis, of what ``all_reduce`` would give.

        Parts are as even as possible: the first ``len(x) % size`` are one row longer. A list holds one array for each
        rank, and rank r gets the sum of all ranks' r-th; their shapes may differ, but not between ranks. An ``out`` of
        the shape of one row takes a part of one row. See ``all_reduce``; with a ``wire_dtype`` the results, which do
        not travel, are not rounded to it.
        """
        if timeout is None and wire_dtype is None and stream is None and strategy is None and not priority:
            again = self._again(x, name, (REDUCE_SCATTER, op), out)
            if again is not None:
                return again
        options = CallOptions(op, None, out, timeout, priority, wire_dtype, stream, strategy=strategy)
        return self._collective(REDUCE_SCATTER, x, name, options)

    def barrier(
        self, name: str | None = None, *, timeout: Seconds | None = None, priority: int = 0,
        strategy: StrategySpec | None = None,
    ) -> Handle[None]:  # fmt: skip
        """Done when every rank has called it; see ``all_reduce``."""
        if timeout is None and strategy is None and not priority:
            again = self._again(NO_ARRAY, name, (BARRIER,), None)
            if again is not None:
                return again
        options = CallOptions(timeout=timeout, priority=priority, strategy=strategy)
        if strategy is not None:
            again = self._again_along(BARRIER, NO_ARRAY, name, options)
            if again is not None:
                return again
        with self._checks(name, options) as (name, options):
            posting = Posting((Plans.barrier, name or UNNAMED), alike=(BARRIER,))
        return self._begin(name, posting, options)

    # ---------------------------------------------------------------- shared by the verbs

    def _collective(
        self, verb: Verb, x: Any, name: str | None, options: CallOptions, handle: Handle[Any] | None = None
    ) -> Handle[Any]:
        """Make a call with all of its checks: the one place that chooses how it is carried out.

        ``handle``: to be returned; a new one if left out.
        """
        if options.strategy is not None:
            again = self._again_along(verb, x, name, options, handle)
            if again is not None:
                return again
        devices = self._devices
        # Looking into a list may raise, so it is done inside the checks; arrays are told apart by their type alone.
        if is_list(x):
            with self._checks(name, options) as (name, options):
                is_listed = holds_arrays(x)
            if is_listed:
                from kfcomm.collectives.batches import of_list

                return of_list(self, verb, x, name, options)
        if not devices.takes(x, options.stream):
            return self._on_host(verb, x, name, options, handle)
        with self._checks(name, options, on_device=True) as (name, options):
            devices.check(options.wire_dtype)
            spec, root = SPECS[verb], self._checked_root(verb, options.root)
            array = devices.read(x, options.stream)
            op = checked_op(options.op, array.dtype) if spec.folds else None
            kind = PlanKey(verb, array.dtype, array.shape, op, root)
            alike = spec.arguments(options.op if isinstance(options.op, Hashable) else op, options.root)
            order = DeviceOrder(
                kind, name or UNNAMED, overlapping=may_overlap(name), alike=alike, strategy=options.strategy
            )
            return devices.one(order, array, self._result_shape(spec, array.shape, root), options, handle)

    def _on_host(
        self, verb: Verb, x: Any, name: str | None, options: CallOptions, handle: Handle[Any] | None = None
    ) -> Handle[Any]:
        """Make a call on host memory; see ``_collective``."""
        spec, op = SPECS[verb], options.op
        with self._checks(name, options) as (name, options):
            root = self._checked_root(verb, options.root)
            array = adapt(x)
            chosen = checked_op(op, array.dtype) if spec.folds else None
            wire = None if options.wire_dtype is None else wire_dtype_of(options.wire_dtype, array.dtype)
            shape = self._result_shape(spec, array.shape, root)
            target = self._target(spec, options.out, shape, array)
        if options.shared:
            array = HostArray(array.flat, array.shape, READ_ONLY, array.is_view)
        kind = PlanKey(verb, array.dtype, array.shape, chosen, root, wire, options.shared)
        alike: Arguments | None = None
        if type(x) is np.ndarray and wire is None and not (options.is_step or options.shared):
            alike = spec.arguments(op if isinstance(op, Hashable) else chosen, options.root)
        posting = Posting((Plans.of, kind, name or UNNAMED), array, shape, target, spec.in_place, alike)
        return self._begin(name, posting, options, handle=handle)

    def _target(self, spec: VerbSpec, out: Any, shape: Shape | None, array: HostArray) -> Out | None:
        """The caller's memory for the result, if ``out`` was given: for a gather perhaps a list of arrays."""
        if out is None or shape is None:
            return None
        if spec.is_stacked and is_list(out):
            return OutList.of(out, [array.shape] * self._group.view.size, array.dtype)
        return adapt_out(out, shape, array.dtype)

    def _result_shape(self, spec: VerbSpec, shape: Shape, root: int) -> Shape | None:
        """Shape of this rank's result, given the shape of its array; None if it gets none."""
        view = self._group.view
        return spec.result_shape(shape, view.rank, view.size) if spec.gets(view.rank, root) else None

    def _checks(
        self, name: str | None, options: CallOptions = PLAIN, *, steps: int = 1, on_device: bool = False
    ) -> Checks:
        """Context in which an error also fails the other ranks' calls under this name.

        The block has the name and the options of the call made plain: ``with ... as (name, options)``.

        ``steps``: of the call, which fails at its place among the posts. ``on_device``: the paths of device arrays
        hear of it.
        """
        self._check_open()
        name = checked_name(name)
        checks = Checks(self._group, name or UNNAMED, steps, self._devices if on_device else None)
        checks.name, checks.options = name, options
        is_asked = options.timeout is not None or options.strategy is not None
        if is_asked or options.priority or type(options.priority) is not int:
            with checks:
                checks.options = self._group.checked(options)
        return checks

    def _again(
        self, x: Any, name: str | None, arguments: Arguments, out: Any, handle: Handle[Any] | None = None
    ) -> Handle[Any] | None:
        """Make a call without options, under a name whose last use was alike; return None if it needs all checks.

        See ``CompiledName``. ``handle``: to be returned; a new one if left out.
        """
        group = self._group
        if type(name) is not str:
            name = checked_name(name)
        compiled = group.compiled.get(name)
        if type(x) is not np.ndarray:
            if type(compiled) is not CompiledCall:
                return None
            made: Handle[Any] = Handle(loop=group.engine.loop) if handle is None else handle
            return made if compiled.call(x, arguments, out, made) else None
        if compiled is None:
            return self._when_agreed(x, name, arguments, out, handle) if group.waits else None
        if handle is None:
            handle = Handle(loop=group.engine.loop)
        operation = compiled.start(x, arguments, out, handle)
        return None if operation is None else named(handle, operation)

    def _again_along(
        self, verb: Verb, x: Any, name: str | None, options: CallOptions, handle: Handle[Any] | None = None
    ) -> Handle[Any] | None:
        """As ``_again``, for a call with a strategy of its own; None also while another is being agreed."""
        group = self._group
        if not options.is_plain:
            return None
        try:
            compiled = group.compiled.get(group.compiled_key(checked_name(name), options.strategy))
        except KfcommError:  # all checks find the same again, and tell the other ranks
            return None
        if compiled is None:
            return None
        arguments = SPECS[verb].arguments(options.op, options.root)
        made: Handle[Any] = Handle(loop=group.engine.loop) if handle is None else handle
        if type(x) is not np.ndarray:
            if type(compiled) is not CompiledCall:
                return None
            return made if compiled.call(x, arguments, options.out, made) else None
        operation = compiled.start(x, arguments, options.out, made)
        return None if operation is None else named(made, operation)

    def _when_agreed(
        self, x: Array, name: str | None, arguments: Arguments, out: Any, given: Handle[Any] | None
    ) -> Handle[Any] | None:
        """Make a cached call during an agreement on a strategy: one alike under the former needs no new check."""
        group = self._group
        former = group.former.get(name)
        if x is NO_ARRAY or former is None or not former.is_like(x, arguments, out):
            return None
        handle: Handle[Any] = Handle(loop=group.engine.loop) if given is None else given

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
            options = CallOptions(arguments[1] if SPECS[verb].folds else None, arguments[-1], out)
            try:
                self._on_host(verb, x, name, options, handle)
            except Exception as error:  # noqa: BLE001  the communicator was closed meanwhile: there is no caller to tell
                handle.set_exception(error)

        group.in_order(begin)
        return handle

    def _begin(
        self, name: str | None, posting: Posting, options: CallOptions, *, later: Later | None = None,
        handle: Handle[Any] | None = None,
    ) -> Handle[Any]:  # fmt: skip
        """Allocate the result and post; now, or once a strategy that is being agreed is decided.

        ``later``: for the later steps of a call, which are posted at once, under the plans of its first. ``handle``: to
        be returned; a new one if left out. ``alike``: common properties of calls under this name, if it can be
        compiled.
        """
        group = self._group
        made: Handle[Any] = Handle(loop=group.engine.loop) if handle is None else handle

        def post() -> None:
            plan, array, shape, target, in_place, alike = posting
            if later is None:
                key, seq, plans = name or UNNAMED, None, group.plans_along(options.strategy)
            else:
                key, seq, plans = later.key, later.seq, later.plans
            try:
                chosen = plan[0](plans, *plan[1:])
                result, value, outcome = room(chosen, array, shape, target, in_place)
            except Exception as error:  # noqa: BLE001  no memory for the result, perhaps: the other ranks are told
                made.seq = group.refuse_now(key, error, seq=seq)
                made.set_exception(error)
                return
            operation = chosen.operation(
                made, None if array is None else array.flat, result, chosen.work, value=value, finish=outcome,
                priority=options.priority,
            )  # fmt: skip
            one = chosen.post(group.view, key, plans.generation, may_overlap(name), seq)
            group.post(one, operation, made, options.timeout_s)
            if alike is not None and (array is None or array.is_view) and group.may_compile():
                group.compiled[group.compiled_key(name, options.strategy)] = (
                    CompiledBarrier(group, name, alike, chosen)
                    if array is None
                    else CompiledName(group, name, alike, chosen, (array.dtype, array.shape, shape))
                )

        # A later step never waits for a strategy that is being agreed: it runs under the plans of its first step, which
        # the other ranks may wait for before they call ``set_strategy``.
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

    def _checked_root(self, verb: Verb, root: Any) -> int:
        """The root of a call as a plain int; -1 for a verb without."""
        return self._check_rank("root", root) if SPECS[verb].is_rooted else -1

    def _check_rank(self, what: str, rank: Any) -> int:
        """``rank`` as a plain int, which is what travels."""
        size, number = self._group.view.size, whole_number(rank)
        if number is None or not 0 <= number < size:
            raise ConfigError(f"{what} {rank!r} is not a rank of this group (0 to {size - 1})")
        return number


def as_config_error(error: Exception) -> Exception:
    """Turn the ValueError or TypeError of an array library into ConfigError; return other errors unchanged."""
    if isinstance(error, (ValueError, TypeError)) and not isinstance(error, KfcommError):
        return ConfigError(str(error))
    return error


def checked_op(op: Any, dtype: np.dtype[Any]) -> Op:
    """Return the op, if it is valid for this dtype."""
    if not isinstance(op, str) or op not in OPS:
        from kfcomm.arrays.reduce.ops import op_of

        op = op_of(op, dtype)
    return kernel(op, dtype).op


def room(
    plan: Plan, array: HostArray | None, shape: Shape | None, target: Out | None, in_place: bool
) -> tuple[Array | None, Any, Callable[[Any], Any] | None]:
    """Return memory for the result, and the caller's result: see ``Operation`` for ``value`` and ``outcome``."""
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
