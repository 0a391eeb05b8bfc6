"""Plans: signature, program, kernels and sizes of a verb with its arguments, for the engine.

A plan does not depend on the key or the data, so plans are cached: a loop that exchanges the same tensors at every step
makes each plan once. Nor does it depend on the generation of its strategy, so a strategy that is set again finds its
plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from kfcomm.arrays.dtypes import dtype_name
from kfcomm.arrays.reduce import Wire, kernel, wire_of
from kfcomm.collectives.specs import Shape, row_elements
from kfcomm.core import program as programs
from kfcomm.core.collective import GroupView, ItemSizes, Post
from kfcomm.core.exchange import dissemination, halving_doubling
from kfcomm.core.graph import GraphPair
from kfcomm.core.program import Program
from kfcomm.core.signature import WHOLE_BELOW, Signature, pair_of, split
from kfcomm.engine import shown
from kfcomm.engine.executors import HOSTED_NBYTES, hub_of
from kfcomm.engine.memory import Work
from kfcomm.engine.operation import Operation
from kfcomm.engine.wired import WiredOperation, WiredWork
from kfcomm.errors import InternalError
from kfcomm.strategies import AnyStrategy, Direct, Strategy
from kfcomm.strategies.base import DIRECT_NBYTES
from kfcomm.strategies.chunks import ChunkSizes
from kfcomm.transports.shm.slots import word_of
from kfcomm.types import Op, Verb

if TYPE_CHECKING:
    from kfcomm.collectives.compiled import Compiled, CompiledKey

CHUNK_NBYTES = 1 << 19
"""Of a chunk, where depth does not count (see ``strategies.chunks``): large enough that its way through Python costs
little, small enough to stay in the cache."""


MAX_PLANS = 4096

WireDtype: TypeAlias = "np.dtype[Any] | None"
"""In what numbers travel, where that is not what they are."""

Shares: TypeAlias = tuple[int, ...]
"""Of a ``Strategy``."""


class PlanKey(NamedTuple):
    """One kind of collective whose result shape every rank knows by itself; the key of its plan in the cache."""

    verb: Verb
    dtype: np.dtype[Any]
    shape: Shape  # of the caller's array
    op: Op | None = None  # of verbs that fold
    root: int = -1  # -1 in verbs without
    wire: WireDtype = None  # see ``WireDtype``; None for gather and all_to_all
    is_shared: bool = False  # the result of an all_reduce is one array for all ranks of a host, where possible


@dataclass(frozen=True, slots=True)
class Plan:
    """One kind of collective, ready to be posted."""

    signature: Signature  # value that all ranks must agree on
    program: Program  # of this rank
    sizes: ItemSizes  # bytes per element on the wire
    work: Work
    result_count: int  # elements on this rank; -1 without a result
    operation: type[Operation] = Operation

    def post(
        self, view: GroupView, key: str, generation: int, overlapping: bool = False, seq: int | None = None
    ) -> Post:
        """Return a call of it in a group under a key, for the router; see `Post`."""
        return Post(view, key, self.signature, self.program, self.sizes, generation, overlapping, seq)

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """Dtype of input and result; None without data."""
        return self.work.dtype


@dataclass(frozen=True, slots=True)
class Planner:
    """Makes the plans of one group under one strategy, of generation 0."""

    rank: int
    size: int
    strategy: AnyStrategy
    chunks: ChunkSizes  # of the group
    local: tuple[int, ...] = ()  # ranks of the group on this host, if there are several, and others elsewhere

    def ways(self, dtype: np.dtype[Any], shape: Shape, wire: WireDtype = None) -> tuple[int, Shares]:
        """Number of graphs that an all_reduce may take as a whole, and their shares of the keys; one if it is split."""
        count, _, graphs = self._prepare(dtype, shape, wire)
        if graphs.direct and wire is None:
            return 1, ()
        return (len(graphs.pairs), graphs.shares) if graphs.is_whole or count < WHOLE_BELOW else (1, ())

    def all_reduce(self, kind: PlanKey, way: int) -> Plan:
        """Every rank gets the fold of all inputs; ``way`` is one of ``ways``."""
        plan = self._all_reduce(kind, way)
        return replace(plan, signature=plan.signature._replace(memory="shared")) if kind.is_shared else plan

    def _all_reduce(self, kind: PlanKey, way: int) -> Plan:
        _, dtype, shape, op, _, wire, is_shared = kind
        count, chunk, graphs = self._prepare(dtype, shape, wire)
        if graphs.direct and wire is None:
            is_one_step = graphs.sends_at_once(count * dtype.itemsize)
            program = (
                self._one_step(count, chunk, graphs)
                if is_one_step
                else programs.all_reduce(self.rank, graphs.pairs_of_direct, count, chunk)
            )
            plan = self._plan(PlanKey(Verb.ALL_REDUCE, dtype, shape, op), program, graphs, count)
            is_long = graphs.direct is Direct.CHAINS
            work = shown.all_reduced(
                plan.work, count, is_one_step=is_one_step, is_turned=is_long, is_shared=is_long and is_shared
            )
            return replace(plan, work=work)
        if graphs.exchange is not None and not graphs.is_whole and self.size > 1:
            program = halving_doubling(self.rank, graphs.exchange, count, chunk)
            return self._plan(PlanKey(Verb.ALL_REDUCE, dtype, shape, op, wire=wire), program, graphs, count)
        is_whole = graphs.is_whole or count < WHOLE_BELOW
        pairs, shares = ((graphs.pairs[way],), ()) if is_whole else (graphs.pairs, graphs.shares)
        program = programs.all_reduce(self.rank, pairs, count, chunk, shares)
        program = programs.windowed(program, self.chunks.window(graphs, chunk * dtype.itemsize))
        plan = self._plan(PlanKey(Verb.ALL_REDUCE, dtype, shape, op, wire=wire), program, graphs, count)
        return plan if wire is not None or is_shared else self._hosted(plan, pairs, count)

    def reduce(self, dtype: np.dtype[Any], shape: Shape, op: Op, root: int, wire: WireDtype = None) -> Plan:
        """The root gets the fold of all inputs."""
        count, chunk, graphs = self._prepare(dtype, shape, wire)
        program = programs.reduce(self.rank, graphs.rooted(root), count, chunk)
        kept = count if self.rank == root else -1
        plan = self._plan(PlanKey(Verb.REDUCE, dtype, shape, op, root, wire), program, graphs, kept)
        return _in_slots(plan, graphs, wire, shown.reduced, count, self.rank, root)

    def reduce_scatter(self, dtype: np.dtype[Any], shape: Shape, op: Op, wire: WireDtype = None) -> Plan:
        """Rank r gets the r-th of ``size`` parts, along the first axis, of the fold of all inputs."""
        chunk, graphs = self._prepare_parts(dtype, math.prod(shape), wire)
        row = row_elements(shape)
        counts = [rows * row for _, rows in split(shape[0], self.size)]
        program = self._scattering(graphs, counts, chunk, wire)
        plan = self._plan(PlanKey(Verb.REDUCE_SCATTER, dtype, shape, op, wire=wire), program, graphs, counts[self.rank])
        return self._scattered(plan, graphs, wire, counts)

    def reduce_scatter_parts(
        self, dtype: np.dtype[Any], shapes: tuple[Shape, ...], op: Op, wire: WireDtype = None
    ) -> Plan:
        """Rank r gets the fold of the r-th of the arrays, one of these shapes for each rank, that lie end to end."""
        counts = [math.prod(shape) for shape in shapes]
        total = (sum(counts),)
        chunk, graphs = self._prepare_parts(dtype, sum(counts), wire)
        program = self._scattering(graphs, counts, chunk, wire)
        kept = counts[self.rank]
        plan = self._plan(PlanKey(Verb.REDUCE_SCATTER, dtype, total, op, wire=wire), program, graphs, kept, shapes)
        return self._scattered(plan, graphs, wire, counts)

    def broadcast(self, dtype: np.dtype[Any], shape: Shape, root: int, wire: WireDtype = None) -> Plan:
        """Every rank gets the root's input."""
        count, chunk, graphs = self._prepare(dtype, shape, wire)
        program = programs.broadcast(self.rank, graphs.rooted(root), count, chunk)
        plan = self._plan(PlanKey(Verb.BROADCAST, dtype, shape, root=root, wire=wire), program, graphs, count)
        return _in_slots(plan, graphs, wire, shown.broadcast, (count,), self.rank, root)

    def gather(self, dtype: np.dtype[Any], shape: Shape, root: int, rows: tuple[int, ...] = ()) -> Plan:
        """Plan a gather: the root gets all inputs in rank order.

        ``rows`` are their first dimensions where these differ; then ``shape`` is that of one row.
        """
        counts, chunk, graphs = self._prepare_rows(dtype, shape, rows)
        program = programs.gather(self.rank, graphs.rooted(root), counts, chunk)
        kept = sum(counts) if self.rank == root else -1
        plan = self._plan(PlanKey(Verb.GATHER, dtype, shape, root=root), program, graphs, kept, rows)
        return _in_slots(plan, graphs, None, shown.gathered, counts, self.rank, root)

    def all_gather(
        self, dtype: np.dtype[Any], shape: Shape, rows: tuple[int, ...] = (), wire: WireDtype = None
    ) -> Plan:
        """Every rank gets all inputs in rank order; see ``gather`` for ``rows``."""
        counts, chunk, graphs = self._prepare_rows(dtype, shape, rows, wire)
        program = programs.all_gather(self.rank, graphs.rooted, counts, chunk)
        plan = self._plan(PlanKey(Verb.ALL_GATHER, dtype, shape, wire=wire), program, graphs, sum(counts), rows)
        if _is_in_windows(graphs, wire):
            return replace(plan, work=shown.gathered_in_windows(plan.work, counts, self.rank))
        return _in_slots(plan, graphs, wire, shown.gathered, counts, self.rank)

    def scatter(self, dtype: np.dtype[Any], shape: Shape, root: int, rows: tuple[int, ...]) -> Plan:
        """Rank r gets ``rows[r]`` rows, each of ``shape``, of the root's input."""
        counts, chunk, graphs = self._prepare_rows(dtype, shape, rows)
        program = programs.scatter(self.rank, graphs.rooted(root), counts, chunk)
        plan = self._plan(PlanKey(Verb.SCATTER, dtype, shape, root=root), program, graphs, counts[self.rank], rows)
        return _in_slots(plan, graphs, None, shown.broadcast, counts, self.rank, root)

    def all_to_all(self, dtype: np.dtype[Any], shape: Shape, rows: tuple[tuple[int, ...], ...]) -> Plan:
        """Rank i sends ``rows[i][j]`` rows, each of ``shape``, to rank j."""
        row = math.prod(shape)
        chunk, graphs = self._prepare_parts(dtype, sum(map(sum, rows)) // self.size * row)
        counts = [[number * row for number in line] for line in rows]
        program = programs.all_to_all(self.rank, counts, chunk)
        kept = sum(line[self.rank] for line in counts)
        plan = self._plan(PlanKey(Verb.ALL_TO_ALL, dtype, shape), program, graphs, kept, rows)
        return _in_slots(plan, graphs, None, shown.exchanged, counts, self.rank)

    def barrier(self, name: str) -> Plan:
        """Plan a barrier, which has no data."""
        graphs = self.strategy.select(0)
        signature = Signature(Verb.BARRIER, "", (), "", -1, graphs.name, graphs.digest)
        if graphs.direct:
            is_one_step = graphs.sends_at_once(0)
            work = shown.all_reduced(Work(None, None, self.size, in_result=True), 0, is_one_step=is_one_step)
            program = self._one_step(0, 1, graphs) if is_one_step else programs.barrier(self.rank, graphs.pairs[0])
            return Plan(signature, program, ItemSizes(1, 1), work, -1)
        pair = graphs.pairs[pair_of(name, len(graphs.pairs), graphs.shares)]
        program = programs.barrier(self.rank, pair)
        plan = Plan(signature, program, ItemSizes(1, 1), Work(None, None, self.size, in_result=False), -1)
        return self._hosted(plan, (pair,), 0)

    def elsewhere(self, kind: PlanKey, path: str, counts: tuple[Any, ...], memory: str) -> Plan:
        """Plan a collective of device memory, which a path carries out: to the engine it has no chunks.

        Args:
            kind: of the call.
            path: name of the path; ranks of a group take the same one.
            counts: further values that must be the same everywhere.
            memory: see ``Signature``.
        """
        op = "" if kind.op is None else str(kind.op)
        signature = Signature(
            str(kind.verb), dtype_name(kind.dtype), kind.shape, op, kind.root, path, counts=counts, memory=memory
        )  # fmt: skip
        program = programs.elsewhere(self.rank, self.size)
        return Plan(signature, program, ItemSizes(1, 1), Work(None, None, self.size, in_result=False), -1)

    def _scattering(self, graphs: Strategy, counts: Sequence[int], chunk: int, wire: WireDtype) -> Program:
        # Chains do not lead from the hub of a slot to every rank, and links show ranks the heaps of others.
        with_signals = _is_in_windows(graphs, wire) and self.size > 2
        return programs.reduce_scatter(self.rank, graphs.rooted, counts, chunk, with_signals=with_signals)

    def _scattered(self, plan: Plan, graphs: Strategy, wire: WireDtype, counts: Sequence[int]) -> Plan:
        """Return the plan of a reduce_scatter for slots, if it can be."""
        if _is_in_windows(graphs, wire):
            return replace(plan, work=shown.reduce_scattered_in_windows(plan.work, counts, self.rank))
        return _in_slots(plan, graphs, wire, shown.reduce_scattered, counts, self.rank)

    def _hosted(self, plan: Plan, pairs: Sequence[GraphPair], count: int) -> Plan:
        """Return the plan with this host's part in a slot, if the graphs make a star of the host."""
        is_short = count * plan.work.item <= HOSTED_NBYTES
        hub = hub_of(pairs, self.local) if self.local and is_short else None
        if hub is None:
            return plan
        work = shown.hosted(plan.work, count, self.local, hub, self.rank)
        return replace(plan, work=work)

    def _prepare(self, dtype: np.dtype[Any], shape: Shape, wire: WireDtype = None) -> tuple[int, int, Strategy]:
        count = math.prod(shape)
        nbytes = count * (wire or dtype).itemsize
        graphs = self.strategy.select(nbytes)
        chunk_nbytes = graphs.chunk_nbytes or min(CHUNK_NBYTES, self.chunks.of(graphs, nbytes))
        return count, chunk_elements(dtype, chunk_nbytes), graphs

    def _prepare_parts(self, dtype: np.dtype[Any], count: int, wire: WireDtype = None) -> tuple[int, Strategy]:
        """Chunk and graphs of verbs that send a part for each rank at once: so ports are busy, whatever the depth."""
        graphs = self.strategy.select(count * (wire or dtype).itemsize)
        return chunk_elements(dtype, graphs.chunk_nbytes), graphs

    def _prepare_rows(
        self, dtype: np.dtype[Any], shape: Shape, rows: tuple[int, ...], wire: WireDtype = None
    ) -> tuple[list[int], int, Strategy]:
        row = math.prod(shape)
        counts = [row * number for number in rows or (1,) * self.size]
        return counts, *self._prepare_parts(dtype, max(counts), wire)

    def _one_step(self, count: int, chunk_elements: int, graphs: Strategy) -> Program:
        """Every rank gets the inputs of all ranks."""
        if graphs.direct is Direct.DISSEMINATION and self.size > 1:
            return dissemination(self.rank, self.size, count, chunk_elements)
        return programs.all_gather(self.rank, graphs.rooted, (count,) * self.size, chunk_elements)

    def _plan(
        self, kind: PlanKey, program: Program, graphs: Strategy, result_count: int, counts: tuple[Any, ...] = ()
    ) -> Plan:
        verb, dtype, shape, op, root, wire, _ = kind
        folds = None if op is None else kernel(op, dtype)
        sizes = ItemSizes(dtype.itemsize, (dtype if folds is None else folds.accumulate_dtype).itemsize)
        signature = Signature(
            str(verb), dtype_name(dtype), shape, "" if op is None else str(op), root, graphs.name, graphs.digest,
            program.chunk_elements, counts=counts,
        )  # fmt: skip
        # Folded where the result goes, if this rank gets one of the same size.
        in_result = verb in (Verb.ALL_REDUCE, Verb.REDUCE) and result_count >= 0
        plan = Plan(signature, program, sizes, Work(folds, dtype, self.size, in_result=in_result), result_count)
        return plan if wire is None else _wired(plan, wire_of(op, dtype, wire))


def _is_in_windows(graphs: Strategy, wire: WireDtype) -> bool:
    """Whether a long array goes through slots in windows."""
    return graphs.direct is Direct.CHAINS and wire is None


def _in_slots(
    plan: Plan, graphs: Strategy, wire: WireDtype, work_of: Callable[..., shown.SharedWork], *how: Any
) -> Plan:
    """Return the plan for slots, if the strategy is direct and all of it is short."""
    # Numbers that travel in another dtype are converted on their way to a link, and a slot has none.
    if not graphs.goes_whole or wire is not None:
        return plan
    work = work_of(plan.work, *how)
    if work.cut.count * work.item > DIRECT_NBYTES:  # of parts, together
        return plan
    return replace(plan, work=work)


def _wired(plan: Plan, wire: Wire) -> Plan:
    """A plan whose chunks travel in another dtype."""
    itemsize = wire.wire_dtype.itemsize
    signature = plan.signature._replace(wire_dtype=dtype_name(wire.wire_dtype))
    work = WiredWork(plan.work.kernel, plan.work.dtype, plan.work.size, in_result=plan.work.in_result, wire=wire)
    sizes = ItemSizes(itemsize, itemsize)
    return replace(plan, signature=signature, sizes=sizes, work=work, operation=WiredOperation)


def agreement(rank: int, tree: GraphPair, strategy: AnyStrategy) -> Plan:
    """Plan a barrier of ranks that agree on a strategy.

    It runs along a tree of its own, and without a generation: ranks that no longer agree can agree again.
    """
    signature = Signature(Verb.SET_STRATEGY, strategy=strategy.name, graphs=strategy.digest)
    return Plan(signature, programs.barrier(rank, tree), ItemSizes(1, 1), Work(None, None, 1, in_result=False), -1)


class Plans:
    """The plans of one generation of a group's strategies. Calls that began under it keep it.

    Attributes:
        planner: makes missing plans.
        generation: number of the strategy in the group; 0 for the first.
        stamp: the generation as operations carry it; see ``core.collective``.
        first_word: word in a slot for the first window of a name's first use.
        compiled: cached plans by name, and by strategy of calls that have one of their own.
    """

    __slots__ = ("_plans", "_ways", "compiled", "first_word", "generation", "planner", "stamp")

    def __init__(self, planner: Planner, generation: int = 0) -> None:
        self.planner = planner
        self.generation = generation
        self.stamp = generation << 1
        self.first_word = word_of(0, generation)
        self.compiled: dict[CompiledKey, Compiled] = {}
        self._plans: dict[Hashable, Plan] = {}
        self._ways: dict[Hashable, tuple[list[Plan | None], Shares]] = {}

    def again(self, generation: int) -> Plans:
        """The same plans for a later generation of the same strategy."""
        later = copy(self)
        later.generation = generation
        later.stamp = generation << 1
        later.first_word = word_of(0, generation)
        return later

    def plan(self, make: Callable[..., Plan], *what: Hashable) -> Plan:
        """The plan ``make(planner, *what)``, made when it is first needed."""
        key = (make, *what)
        plan = self._plans.get(key)
        return self._store(key, make(self.planner, *what)) if plan is None else plan

    def of(self, kind: PlanKey, key: str) -> Plan:
        """The plan of a verb with arrays whose result shape every rank knows by itself; ``key``: of the call."""
        verb, dtype, shape, op, root, wire, _ = kind
        if verb is Verb.ALL_REDUCE:
            return self._all_reduce(kind, key)
        plan = self._plans.get(kind)
        if plan is not None:
            return plan
        make = self.planner
        match verb:
            case Verb.REDUCE if op is not None:
                plan = make.reduce(dtype, shape, op, root, wire)
            case Verb.REDUCE_SCATTER if op is not None:
                plan = make.reduce_scatter(dtype, shape, op, wire)
            case Verb.BROADCAST:
                plan = make.broadcast(dtype, shape, root, wire)
            case Verb.ALL_GATHER:
                plan = make.all_gather(dtype, shape, (), wire)
            case Verb.GATHER:
                plan = make.gather(dtype, shape, root)
            case Verb.ALL_TO_ALL:
                plan = make.all_to_all(dtype, shape[1:], ((shape[0] // make.size,) * make.size,) * make.size)
            case _:
                raise InternalError(f"no plan for {kind}")
        return self._store(kind, plan)

    def barrier(self, name: str) -> Plan:
        """The plan for a barrier, made at each."""
        return self.planner.barrier(name)

    def _all_reduce(self, kind: PlanKey, key: str) -> Plan:
        """One of several plans, where the key decides which graph pair is taken."""
        found = self._ways.get(kind)
        if found is None:
            if len(self._ways) >= MAX_PLANS:
                self._ways.clear()
            number, shares = self.planner.ways(kind.dtype, kind.shape, kind.wire)
            found = self._ways[kind] = [None] * number, shares
        ways, shares = found
        way = pair_of(key, len(ways), shares) if len(ways) > 1 else 0
        plan = ways[way]
        if plan is None:
            plan = ways[way] = self.planner.all_reduce(kind, way)
        return plan

    def _store(self, key: Hashable, plan: Plan) -> Plan:
        # Emptied as a whole: to find the plan that was not used for longest would cost each call.
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        self._plans[key] = plan
        return plan


def chunk_elements(dtype: np.dtype[Any], nbytes: int = 0) -> int:
    """Elements of one chunk of ``nbytes`` bytes; by default, of `CHUNK_NBYTES`."""
    return max(1, (nbytes or CHUNK_NBYTES) // dtype.itemsize)
