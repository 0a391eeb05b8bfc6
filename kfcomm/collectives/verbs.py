"""Verbs whose shapes every rank knows without messages: one collective each, begun before the call returns.

Each checks its arguments, finds its plan, allocates its result and posts. A call that fails its checks
raises at once, and fails the other ranks' calls under the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from kfcomm.collectives.calling import Posting, VerbCalls
from kfcomm.collectives.compiled import NO_ARRAY
from kfcomm.collectives.group import UNNAMED
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.plans import Plans
from kfcomm.collectives.specs import (
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    REDUCE,
    REDUCE_SCATTER,
    CallOptions,
)
from kfcomm.errors import ConfigError
from kfcomm.strategies import StrategySpec
from kfcomm.types import Op, Seconds

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
OPS = frozenset(Op)


class Verbs(VerbCalls):
    """The collectives of one group."""

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
                raise ConfigError("expected shared or out, got both: a shared result has its own memory")
            self._devices.refuse("a shared result", [x], options.stream)
        return self._on_host(ALL_REDUCE, x, name, options)

    def all_reduce_many(
        self, arrays: Mapping[str, Any], name: str | None = None, *, op: Any = Op.SUM,
        out: Mapping[str, Any] | None = None, timeout: Seconds | None = None, priority: int = 0,
        wire_dtype: Any = None, weight: float | None = None, stream: Any = None, strategy: StrategySpec | None = None,
    ) -> Handle[dict[str, Any]]:  # fmt: skip
        """``all_reduce`` of every value of a mapping in few collectives: arrays of one dtype travel together.

        Every rank gives the same names, each with the same shape and dtype; the order of the mapping does not matter.
        Arrays of ``empty`` are copied like others.
        It meets calls of ``all_reduce_many`` alone, never an ``all_reduce`` of one of the names.

        Args:
            arrays: by name; of any shapes and dtypes.
            name: the collective's name; None: the first of the names of ``arrays``, in their order as text.
            op: see ``all_reduce``, also for what follows.
            out: where the results go, by the same names; any may be the array itself. An array in the memory of
                another's ``out`` is copied first, and refused on a device.
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
        if strategy is not None or options.has_limits:
            again = self._again_with(BARRIER, NO_ARRAY, name, options)
            if again is not None:
                return again
        with self._checks(name, options) as (name, options):
            posting = Posting((Plans.barrier, name or UNNAMED), alike=(BARRIER,))
        return self._begin(name, posting, options)
