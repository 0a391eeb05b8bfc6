"""Steps of a call of a verb: its checks, its plan, the memory of its result and its post.

`VerbCalls` is the common part of all verbs; `Posting` is a checked call, ready to be posted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from kfcomm.arrays import HostArray, OutList, adapt, adapt_out, holds_arrays, is_list, overlaps, same_memory
from kfcomm.arrays.kinds import NUMPY, READ_ONLY
from kfcomm.arrays.reduce import kernel, wire_dtype_of
from kfcomm.collectives.compiled import NO_ARRAY, Compiled, CompiledBarrier, CompiledCall, CompiledKey, CompiledName
from kfcomm.collectives.group import UNNAMED, Group, may_overlap
from kfcomm.collectives.handle import Handle, named
from kfcomm.collectives.on_device.calls import DeviceOrder
from kfcomm.collectives.on_device.through_host import Out
from kfcomm.collectives.on_device.verbs import DeviceVerbs
from kfcomm.collectives.plans import PlanKey, Plans
from kfcomm.collectives.specs import (
    PLAIN,
    SPECS,
    Arguments,
    CallOptions,
    Shape,
    VerbSpec,
)
from kfcomm.common.arguments import checked_name, whole_number
from kfcomm.errors import ConfigError, KfcommError
from kfcomm.types import Op, Verb

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
    input_at: int | None = None  # element of the result from which on the input may lie there; None: nowhere
    alike: Arguments | None = None  # with which the next use of the name may be made without checks; None: by none


class Checks:
    """Context manager of ``VerbCalls._checks``: four times as fast as a generator, which takes 2 µs."""

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


class VerbCalls:
    """Calls of one group. ``_group``, ``_devices`` and ``_check_open`` come from the communicator."""

    _group: Group
    _devices: DeviceVerbs

    def _check_open(self) -> None:
        raise AssertionError  # the communicator says whether it is open

    def _collective(
        self, verb: Verb, x: Any, name: str | None, options: CallOptions, handle: Handle[Any] | None = None
    ) -> Handle[Any]:
        """Make a call with all of its checks: the one place that chooses how it is carried out.

        ``handle``: to be returned; a new one if left out.
        """
        if options.strategy is not None or options.has_limits:
            again = self._again_with(verb, x, name, options, handle)
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
            array = devices.arrays.read(x, options.stream)
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
        input_at = spec.input_at(self._group.view.rank, array.size)
        posting = Posting((Plans.of, kind, name or UNNAMED), array, shape, target, input_at, alike)
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
            if compiled is None or not compiled.is_on_device:
                return None
            # As in ``_again_on_device``, without a frame of its own.
            made: Handle[Any] = Handle(loop=group.engine.loop) if handle is None else handle
            launched = compiled.start(x, arguments, out, made)
            if launched is not None:
                made._seq = launched.seq
                return made
            return made if cast("CompiledCall", compiled).call(x, arguments, out, made) else None
        if compiled is None:
            return self._when_agreed(x, name, arguments, out, handle) if group.waits else None
        if handle is None:
            handle = Handle(loop=group.engine.loop)
        operation = compiled.start(x, arguments, out, handle)
        return None if operation is None else named(handle, operation)

    def _again_on_device(
        self, compiled: Compiled, x: Any, arguments: Arguments, out: Any, handle: Handle[Any] | None
    ) -> Handle[Any] | None:
        """As ``_again``, for an array that is not NumPy's."""
        if not compiled.is_on_device:
            return None
        if handle is None:
            handle = Handle(loop=self._group.engine.loop)
        operation = compiled.start(x, arguments, out, handle)
        if operation is not None:
            handle._seq = operation.seq
            return handle
        return handle if cast("CompiledCall", compiled).call(x, arguments, out, handle) else None

    def _again_with(
        self, verb: Verb, x: Any, name: str | None, options: CallOptions, handle: Handle[Any] | None = None
    ) -> Handle[Any] | None:
        """As ``_again``, for a call with a strategy, timeout or priority; None also while a strategy is agreed."""
        group = self._group
        if not options.is_repeatable:
            return None
        try:
            compiled = cached_plan(group, group.compiled_key(checked_name(name), options.strategy), options)
        except KfcommError:  # all checks find the same again, and tell the other ranks
            return None
        if compiled is None:
            return None
        arguments = SPECS[verb].arguments(options.op, options.root)
        if type(x) is not np.ndarray:
            return self._again_on_device(compiled, x, arguments, options.out, handle)
        made: Handle[Any] = Handle(loop=group.engine.loop) if handle is None else handle
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
            plan, array, shape, target, input_at, alike = posting
            if later is None:
                key, seq = name or UNNAMED, None
                plans = group.plans_along(options.strategy, key)
            else:
                key, seq, plans = later.key, later.seq, later.plans
            try:
                chosen = plan[0](plans, *plan[1:])
                result, value, outcome = result_memory(chosen.result_count, array, shape, target, input_at)
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
            if alike is not None and (array is None or array.is_view) and group.may_compile(plans):
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


def cached_plan(group: Group, key: CompiledKey, options: CallOptions) -> Compiled | None:
    """Return the cached plan under a key, with the timeout and the priority of a call; None if there is none.

    Raises:
        ConfigError: the timeout or the priority is not valid.
    """
    compiled = group.compiled.get(key)
    return compiled.limited(options.checked()) if compiled is not None and options.has_limits else compiled


def checked_op(op: Any, dtype: np.dtype[Any]) -> Op:
    """Return the op, if it is valid for this dtype."""
    if not isinstance(op, str) or op not in OPS:
        from kfcomm.arrays.reduce.ops import op_of

        op = op_of(op, dtype)
    return kernel(op, dtype).op


def result_memory(
    count: int, array: HostArray | None, shape: Shape | None, target: Out | None, input_at: int | None
) -> tuple[Array | None, Any, Callable[[Any], Any] | None]:
    """Return memory for the result, and the caller's result: see ``Operation`` for ``value`` and ``outcome``.

    ``count``: elements of the result. ``input_at``: see `Posting`.
    """
    if array is None or shape is None:
        return None, None, None
    if target is None:
        result = np.empty(count, array.dtype)
        value = result if len(shape) == 1 else result.reshape(shape)
        return result, value, None if array.kind is NUMPY else array.kind.restore
    flat, given = target.flat, array.flat
    is_in_place = input_at is not None and same_memory(flat[input_at : input_at + given.size], given)
    if not is_in_place and (overlaps(flat, given) or same_memory(flat, given)):
        scratch = np.empty(count, array.dtype)

        def copied(target: Out) -> Any:
            np.copyto(flat, scratch)
            return target.finish()

        return scratch, target, copied
    return flat, target, _finish


def _finish(target: Out) -> Any:
    return target.finish()
