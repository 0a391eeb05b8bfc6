"""Verbs whose shapes differ between ranks, and verbs that carry Python objects: two steps each.

The first step exchanges the shapes, under the name of the call. The second moves the data, under a key derived from
it. Each call always takes one sequence number of both, so that the steps of one call meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import msgpack
import numpy as np

from kfcomm.arrays import HostArray, OutList, adapt, is_list
from kfcomm.arrays.dtypes import dtype_name, dtype_of
from kfcomm.arrays.reduce import wire_dtype_of
from kfcomm.collectives.calling import MakePlan, Posting
from kfcomm.collectives.group import UNNAMED, later_key
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.objects import packed, unpacked
from kfcomm.collectives.on_device.through_host import Fetched, Out
from kfcomm.collectives.plans import Planner, Plans
from kfcomm.collectives.specs import ALL_GATHER, ALL_TO_ALL, BROADCAST, GATHER, CallOptions, row_elements
from kfcomm.collectives.steps import LaterSteps, Steps
from kfcomm.collectives.verbs import Verbs
from kfcomm.core.collective import GroupView, shown
from kfcomm.core.signature import split
from kfcomm.errors import CollectiveError, CollectiveMismatch, ConfigError
from kfcomm.strategies import StrategySpec
from kfcomm.types import Seconds, Verb

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
RECORD_NBYTES = 256
ROW_NBYTES = 9
"""The largest msgpack integer."""


Second: TypeAlias = "tuple[Posting, Callable[[Any], Any] | None]"
"""What a call posts in its second step, and what its caller gets of the result, if that is something else."""


class ExchangeVerbs(Verbs):
    """gather, all_gather, scatter and all_to_all in all their forms, and the verbs for objects."""

    def gather(
        self, x: Any, root: int = 0, name: str | None = None, *, concat: bool = False, out: Any = None,
        timeout: Seconds | None = None, priority: int = 0, stream: Any = None, strategy: StrategySpec | None = None,
    ) -> Handle[Any]:  # fmt: skip
        """Rank ``root`` gets the arrays of all ranks; the others get None.

        Args:
            x: array; the same dtype everywhere, and the same shape unless ``concat``. Or, without ``concat``, a list of
                arrays: see ``all_reduce``.
            root: rank in the group.
            name: see ``all_reduce``, also for ``timeout``.
            concat: join along the first axis, whose lengths may differ; else stack, with axis 0 the rank.
            out: where the root's result goes; perhaps a list, with an array for each rank.
            timeout: see ``all_reduce``.
            priority: see ``all_reduce``.
            stream: see ``all_reduce``.
            strategy: see ``all_reduce``.
        """
        if timeout is None and stream is None and strategy is None and not (priority or concat):
            again = self._again(x, name, (GATHER, type(root), root), out)
            if again is not None:
                return again
        options = CallOptions(None, root, out, timeout, priority, None, stream, strategy=strategy)
        if concat:
            return self._concatenated(GATHER, x, name, options)
        return self._collective(GATHER, x, name, options)

    def all_gather(
        self, x: Any, name: str | None = None, *, concat: bool = False, out: Any = None,
        timeout: Seconds | None = None, priority: int = 0, wire_dtype: Any = None, stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> Handle[Any]:  # fmt: skip
        """Every rank gets the arrays of all ranks; see ``gather``, and ``broadcast`` for ``wire_dtype``."""
        if (
            timeout is None and wire_dtype is None and stream is None and strategy is None
            and not (priority or concat)
        ):  # fmt: skip
            again = self._again(x, name, (ALL_GATHER,), out)
            if again is not None:
                return again
        options = CallOptions(None, None, out, timeout, priority, wire_dtype, stream, strategy=strategy)
        if concat:
            return self._concatenated(ALL_GATHER, x, name, options)
        return self._collective(ALL_GATHER, x, name, options)

    def scatter(
        self, x: Any = None, root: int = 0, name: str | None = None, *, out: Any = None, like: Any = None,
        timeout: Seconds | None = None, priority: int = 0, stream: Any = None, strategy: StrategySpec | None = None,
    ) -> Handle[Any]:  # fmt: skip
        """Rank r gets the r-th part, along the first axis, of the root's array.

        Args:
            x: on the root an array, shared out as evenly as possible (the first parts may be one row longer), or
                a list of arrays, one for each rank, of one dtype and equal but for their first dimensions. Ignored on
                the other ranks.
            root: rank in the group.
            name: see ``all_reduce``, also for ``timeout``.
            out: where the result goes; see ``all_reduce``. An array of the shape of one row takes a part of one row.
            like: elsewhere than on the root, an array of the kind that the result should have; see ``recv``.
            timeout: see ``all_reduce``.
            priority: see ``all_reduce``.
            stream: see ``all_reduce``.
            strategy: see ``all_reduce``.

        Returns:
            A handle; elsewhere than on the root its result is a NumPy array, unless ``out`` or ``like`` is given.
        """
        size = self._group.view.size
        options = CallOptions(None, root, out, timeout, priority, None, stream, strategy=strategy)
        with self._checks(name, options, steps=2) as (name, options):
            root = self._check_rank("root", root)
            array: HostArray | None = None
            rows: list[int] = []
            fetched: Fetched | None = None
            kind = self._devices.arrays.kind_like(like, stream)
            if self._group.view.rank == root:
                array, rows, fetched = self._parts(x, size, stream)
            fields = [] if array is None else [dtype_name(array.dtype), array.shape[1:], rows]
            record = _record(fields, RECORD_NBYTES + ROW_NBYTES * size)

        def second(told: Array) -> Second:
            (dtype_text, row, counts) = _fields(told)
            dtype, shape = dtype_of(dtype_text), tuple(row)
            mine = (counts[self._group.view.rank], *shape)
            source = HostArray(np.empty(0, dtype), (0,), kind, False) if array is None else array
            target = self._devices.arrays.out_of_host(out, mine, dtype, stream)
            plan = (Plans.plan, Planner.scatter, dtype, shape, root, tuple(counts))
            return Posting(plan, source, mine, target), None

        return self._two_steps(BROADCAST, record, name, options.but(root=root), second, fetched)

    def all_to_all(
        self, x: Any, name: str | None = None, *, out: Any = None, timeout: Seconds | None = None, priority: int = 0,
        stream: Any = None, strategy: StrategySpec | None = None,
    ) -> Handle[Any]:  # fmt: skip
        """Rank i gets the i-th part of every rank's ``x``, in rank order.

        Args:
            x: an array whose first dimension is a multiple of the group's size (the result has its shape), or a
                list of arrays, one for each rank, of one dtype and equal but for their first dimensions (the
                result is a list of arrays).
            name: see ``all_reduce``, also for ``timeout``.
            out: where the result goes; for a list a list of arrays, with the shapes of what is received.
            timeout: see ``all_reduce``.
            priority: see ``all_reduce``.
            stream: see ``all_reduce``.
            strategy: see ``all_reduce``.
        """
        if timeout is None and stream is None and strategy is None and not priority:
            again = self._again(x, name, (ALL_TO_ALL,), out)
            if again is not None:
                return again
        options = CallOptions(None, None, out, timeout, priority, None, stream, strategy=strategy)
        if not is_list(x):
            return self._collective(ALL_TO_ALL, x, name, options)
        size = self._group.view.size
        with self._checks(name, options, steps=2) as (name, options):
            if out is not None and not (is_list(out) and len(out) == size):
                raise ConfigError(f"expected a list of {size} arrays as out, got {type(out).__name__}")
            array, rows, fetched = self._parts(x, size, stream)
            record = _record([dtype_name(array.dtype), array.shape[1:], rows], RECORD_NBYTES + ROW_NBYTES * size)

        def second(told: Array) -> Second:
            said = [_fields(one) for one in told]
            _same(said, ALL_TO_ALL, name or UNNAMED, self._group.view)
            table = tuple(tuple(one[2]) for one in said)
            received = [line[self._group.view.rank] for line in table]
            row = array.shape[1:]
            plan = (Plans.plan, Planner.all_to_all, array.dtype, row, table)
            shape = (sum(received), *row)
            if out is not None:
                target = OutList.of(out, [(rows, *row) for rows in received], array.dtype)
                return Posting(plan, array, shape, target), None
            return Posting(plan, array, shape), lambda joined: _cut(joined, received, type(x))

        return self._two_steps(ALL_GATHER, record, name, options, second, fetched)

    # ---------------------------------------------------------------- objects

    def broadcast_object(
        self, value: Any = None, root: int = 0, name: str | None = None, *, timeout: Seconds | None = None,
        priority: int = 0, strategy: StrategySpec | None = None,
    ) -> Handle[Any]:  # fmt: skip
        """Every rank gets the root's ``value``: anything that msgpack can carry. Tuples arrive as lists."""
        options = CallOptions(root=root, timeout=timeout, priority=priority, strategy=strategy)
        with self._checks(name, options, steps=2) as (name, options):
            root = self._check_rank("root", root)
            mine = packed(value if self._group.view.rank == root else None)
            record = _record([mine.size], RECORD_NBYTES)

        def second(told: Array) -> Second:
            (count,) = _fields(told)
            array = adapt(mine if self._group.view.rank == root else np.zeros(count, np.uint8))
            plan = (Plans.plan, Planner.broadcast, array.dtype, array.shape, root)
            return Posting(plan, array, array.shape), unpacked

        return self._two_steps(BROADCAST, record, name, options.but(root=root), second)

    def all_gather_object(
        self, value: Any, name: str | None = None, *, timeout: Seconds | None = None, priority: int = 0,
        strategy: StrategySpec | None = None,
    ) -> Handle[Any]:  # fmt: skip
        """Every rank gets the list of all ranks' values."""
        options = CallOptions(timeout=timeout, priority=priority, strategy=strategy)
        return self._gathered_objects(ALL_GATHER, value, name, options)

    def gather_object(
        self, value: Any, root: int = 0, name: str | None = None, *, timeout: Seconds | None = None, priority: int = 0,
        strategy: StrategySpec | None = None,
    ) -> Handle[Any]:  # fmt: skip
        """Rank ``root`` gets the list of all ranks' values; the others get None."""
        options = CallOptions(root=root, timeout=timeout, priority=priority, strategy=strategy)
        return self._gathered_objects(GATHER, value, name, options)

    def scatter_object(
        self, values: Sequence[Any] | None = None, root: int = 0, name: str | None = None, *,
        timeout: Seconds | None = None, priority: int = 0, strategy: StrategySpec | None = None,
    ) -> Handle[Any]:  # fmt: skip
        """Rank r gets ``values[r]`` of the root's list; the other ranks' is ignored."""
        options = CallOptions(timeout=timeout, priority=priority, strategy=strategy)
        with self._checks(name, options, steps=2) as (name, options):
            root = self._check_rank("root", root)
            parts = None
            if self._group.view.rank == root:
                if values is None or len(values) != self._group.view.size:
                    raise ConfigError(f"scatter_object needs one value for each of {self._group.view.size} ranks")
                parts = [packed(value) for value in values]
        scattered = self.scatter(
            parts, root, name, timeout=timeout, priority=options.priority, strategy=options.strategy
        )
        return self._mapped(scattered, unpacked)

    def _gathered_objects(self, verb: Verb, value: Any, name: str | None, options: CallOptions) -> Handle[Any]:
        with self._checks(name, options, steps=2) as (name, options):
            mine = packed(value)
        return self._concatenated(verb, mine, name, options, _unpacked_each)

    # ---------------------------------------------------------------- two steps

    def _parts(self, x: Any, size: int, stream: Any) -> tuple[HostArray, list[int], Fetched | None]:
        """This rank's input: one flat array, the rows for each rank, and its copy from a device, if any."""
        if not is_list(x):
            array, fetched = self._devices.arrays.on_host(x, stream)
            row_elements(array.shape)
            return array, [rows for _, rows in split(array.shape[0], size)], fetched
        if len(x) != size:
            raise ConfigError(f"expected a list of {size} arrays, one for each rank, got {len(x)}")
        return self._devices.arrays.joined(x, stream)

    def _concatenated(
        self, verb: Verb, x: Any, name: str | None, options: CallOptions,
        outcome: Callable[[tuple[int, ...], Any], Any] | None = None,
    ) -> Handle[Any]:  # fmt: skip
        """Exchange dtype, row shape and number of rows among all ranks, and then move the rows.

        ``verb``: gather, or all_gather, which has no root. ``outcome``: makes the caller's result of all numbers of
        rows and the rows.
        """
        wire: np.dtype[Any] | None = None
        out, stream = options.out, options.stream
        with self._checks(name, options, steps=2) as (name, options):
            to = self._checked_root(verb, options.root)
            if options.wire_dtype is not None:
                x = adapt(x)
                wire = wire_dtype_of(options.wire_dtype, x.dtype)
            array, fetched = self._devices.arrays.on_host(x, stream)
            row_elements(array.shape)
            record = _record([dtype_name(array.dtype), array.shape[1:], [array.shape[0]], str(verb), to], RECORD_NBYTES)

        def second(told: Array) -> Second:
            said = [_fields(one) for one in told]
            _same(said, verb, name or UNNAMED, self._group.view)
            rows = tuple(one[2][0] for one in said)
            shape = (sum(rows), *array.shape[1:]) if to in (-1, self._group.view.rank) else None
            if shape is not None and is_list(out):
                target: Out | None = OutList.of(out, [(one, *array.shape[1:]) for one in rows], array.dtype)
            else:
                target = None if shape is None else self._devices.arrays.out_of_host(out, shape, array.dtype, stream)
            plan: MakePlan = (Plans.plan, Planner.all_gather, array.dtype, array.shape[1:], rows, wire)
            if verb is GATHER:
                plan = (Plans.plan, Planner.gather, array.dtype, array.shape[1:], to, rows)
            return Posting(plan, array, shape, target), outcome and partial(outcome, rows)

        return self._two_steps(ALL_GATHER, record, name, options, second, fetched)

    def _two_steps(
        self, verb: Verb, record: Array, name: str | None, options: CallOptions, second: Callable[[Any], Second],
        fetched: Fetched | None = None,
    ) -> Steps:  # fmt: skip
        """Send the record by ``verb``, from the root or from all; post the step that ``second`` makes of the records.

        It is posted in the order of the calls, on the graphs of the first step, and after its input has arrived from a
        device, if it has to.
        """
        group = self._group
        step = CallOptions(
            root=options.root, timeout=options.timeout, priority=options.priority, strategy=options.strategy,
            is_step=True,
        )  # fmt: skip
        steps = LaterSteps(self, name, step, [later_key(name or UNNAMED)])

        def then(told: Array, key: str) -> None:
            posting, outcome = second(told)
            steps.whole.end_as(steps.post(posting, key), group.engine.reactor, outcome)

        steps.follow(self._on_host(verb, record, name, step), then, None if fetched is None else fetched.here)
        if fetched is not None:
            steps.whole.when_done(group.engine.reactor, fetched.release)
        return steps.whole

    def _mapped(self, inner: Handle[Any], change: Callable[[Any], Any]) -> Steps:
        """A handle whose result is ``change`` of the inner one's."""
        engine = self._group.engine
        return Steps(loop=engine.loop).end_as(inner, engine.reactor, change)


def _record(fields: list[Any], nbytes: int) -> Array:
    packed = msgpack.packb(fields)
    if len(packed) > nbytes:
        raise ConfigError(f"the array has too many dimensions: its description exceeds {nbytes} bytes")
    record = np.zeros(nbytes, np.uint8)
    record[: len(packed)] = np.frombuffer(packed, np.uint8)
    return record


def _fields(record: Array) -> list[Any]:
    unpacker = msgpack.Unpacker(max_buffer_size=record.size)
    unpacker.feed(record.tobytes())
    fields = unpacker.unpack()
    if not isinstance(fields, list):
        raise CollectiveError("a peer sent an invalid description of its array")
    return fields


def _same(said: list[list[Any]], verb: Verb, key: str, view: GroupView) -> None:
    """Check that the records of all ranks agree, except for their rows."""
    for rank, one in enumerate(said):
        mine = [part for place, part in enumerate(one) if place != 2]
        first = [part for place, part in enumerate(said[0]) if place != 2]
        if mine != first:
            sides = f"{view.called(0)} has {_described(said[0], verb)}; {view.called(rank)} has {_described(one, verb)}"
            raise CollectiveMismatch(f"{shown(key)} differs between ranks: {sides}")


def _described(record: list[Any], verb: Verb) -> str:
    """A rank's record of its call as text; bounded, since it comes from a peer."""
    if verb is ALL_TO_ALL:
        return f"{verb} of lists of {record[0]} with rows of shape {tuple(record[1])}"[:200]
    dtype, row, rows, asked, root = record
    to = "" if root == -1 else f", root {root}"
    return f"{asked} of {dtype} {(*rows, *row)}, concat{to}"[:200]


def _cut(joined: Any, rows: Sequence[int], type_: type = list) -> Any:
    """The parts of an array, as a list or a tuple."""
    parts, at = [], 0
    for count in rows:
        parts.append(joined[at : at + count])
        at += count
    return tuple(parts) if issubclass(type_, tuple) else parts


def _unpacked_each(nbytes: Sequence[int], joined: Any) -> list[Any] | None:
    """The objects of all ranks, of their bytes end to end; None on a rank that gets no result."""
    return None if joined is None else [unpacked(one) for one in _cut(joined, nbytes)]
