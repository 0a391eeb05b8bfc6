"""Collectives as the tests mean them: what a rank posts, what it gives, and what NumPy says must come out."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kfcomm.core import program as programs
from kfcomm.core.collective import GroupView, ItemSizes, Post
from kfcomm.core.graph import Graph, GraphPair
from kfcomm.core.program import Program
from kfcomm.core.signature import Signature, num_chunks, share_out, split
from kfcomm.strategies import Strategy
from kfcomm.types import Verb

ITEM = np.dtype(np.float32)
VERBS = [verb for verb in Verb if verb is not Verb.SET_STRATEGY]
ROOTED = {Verb.REDUCE, Verb.BROADCAST, Verb.GATHER, Verb.SCATTER}


@dataclass(frozen=True)
class Spec:
    """One collective. Counts are elements: of all, of each rank, or of each pair of ranks, as the verb has it.

    ``members`` are world ranks in group order; ``wide``: partial results travel as float64.
    """

    name: str
    verb: Verb
    members: tuple[int, ...]
    pairs: tuple[GraphPair, ...]
    counts: tuple[int, ...] = (0,)
    root: int = 0
    chunk: int = 4
    wide: bool = False
    overlapping: bool = False
    generation: int = 0
    salt: int = 0
    shares: tuple[int, ...] = ()
    with_signals: bool = False
    window: int = 0
    strategy: Strategy = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", Strategy("custom", self.pairs, shares=self.shares))

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def count(self) -> int:
        return self.counts[0]

    @property
    def group_id(self) -> bytes:
        return bytes(self.members)

    @property
    def accumulate(self) -> np.dtype:
        return np.dtype(np.float64) if self.wide else ITEM

    @property
    def sizes(self) -> ItemSizes:
        return ItemSizes(ITEM.itemsize, self.accumulate.itemsize)

    @property
    def signature(self) -> Signature:
        shape = (sum(self.counts),) if self.verb is Verb.REDUCE_SCATTER else (self.count,)
        root = self.root if self.verb in ROOTED else -1
        return Signature(
            str(self.verb), "float32", shape, "sum", root, "custom", self.strategy.digest, self.chunk, self.counts,
        )  # fmt: skip

    def rows(self, rank: int) -> list[int]:
        """all_to_all: how much ``rank`` sends to each."""
        return list(self.counts[rank * self.size : (rank + 1) * self.size])

    @property
    def parts(self) -> list[tuple[int, int]]:
        """all_reduce: what each pair carries."""
        shares = self.strategy.shares
        return share_out(self.count, shares) if shares else split(self.count, len(self.pairs))

    def program(self, rank: int) -> Program:
        """The program of one rank."""
        rooted = self.strategy.rooted
        match self.verb:
            case Verb.ALL_REDUCE:
                whole = programs.all_reduce(rank, self.pairs, self.count, self.chunk, self.strategy.shares)
                return programs.windowed(whole, self.window)
            case Verb.REDUCE:
                return programs.reduce(rank, rooted(self.root), self.count, self.chunk)
            case Verb.BROADCAST:
                return programs.broadcast(rank, rooted(self.root), self.count, self.chunk)
            case Verb.GATHER:
                return programs.gather(rank, rooted(self.root), self.counts, self.chunk)
            case Verb.SCATTER:
                return programs.scatter(rank, rooted(self.root), self.counts, self.chunk)
            case Verb.ALL_GATHER:
                return programs.all_gather(rank, rooted, self.counts, self.chunk)
            case Verb.REDUCE_SCATTER:
                return programs.reduce_scatter(rank, rooted, self.counts, self.chunk, with_signals=self.with_signals)
            case Verb.ALL_TO_ALL:
                return programs.all_to_all(rank, [self.rows(one) for one in range(self.size)], self.chunk)
            case Verb.SEND:
                return programs.send(rank, self.count, self.chunk)
            case _:
                return programs.barrier(rank, self.pairs[0])

    def post(self, group: GroupView, seq: int | None = None) -> Post:
        """This collective as a member posts it."""
        program = self.program(group.rank)
        return Post(group, self.name, self.signature, program, self.sizes, self.generation, self.overlapping, seq)

    def source(self, rank: int) -> np.ndarray:
        """Contribution of a rank: numbers of very different sizes, so that the order of addition matters."""
        length = self._input_count(rank)
        seed = hashlib.blake2b(repr((self.name, self.salt, rank)).encode(), digest_size=8).digest()
        numbers = np.random.default_rng(int.from_bytes(seed))
        return (numbers.standard_normal(length) * 10.0 ** numbers.integers(-3, 4, length)).astype(ITEM)

    def result_count(self, rank: int) -> int:
        """Elements that a rank gets."""
        at_root = rank == self.root
        match self.verb:
            case Verb.ALL_REDUCE | Verb.BROADCAST:
                return self.count
            case Verb.REDUCE:
                return self.count if at_root else 0
            case Verb.GATHER:
                return sum(self.counts) if at_root else 0
            case Verb.ALL_GATHER:
                return sum(self.counts)
            case Verb.SCATTER | Verb.REDUCE_SCATTER:
                return self.counts[rank]
            case Verb.ALL_TO_ALL:
                return sum(self.rows(one)[rank] for one in range(self.size))
            case Verb.SEND:
                return self.count if rank == 1 else 0
            case _:
                return 0

    def expected(self, rank: int) -> np.ndarray:
        """The oracle, bit for bit."""
        ranks = range(self.size)
        sources = [self.source(one) for one in ranks]
        nothing = np.empty(0, ITEM)
        match self.verb:
            case Verb.ALL_REDUCE:
                parts = zip(self.pairs, self.parts, strict=True)
                return np.concatenate([self._fold(pair.reduce, sources, at, count) for pair, (at, count) in parts])
            case Verb.REDUCE:
                graph = self.strategy.rooted(self.root).reduce
                return self._fold(graph, sources, 0, self.count) if rank == self.root else nothing
            case Verb.REDUCE_SCATTER:
                graph = self.strategy.rooted(rank).reduce
                return self._fold(graph, sources, sum(self.counts[:rank]), self.counts[rank])
            case Verb.BROADCAST:
                return sources[self.root]
            case Verb.GATHER:
                return np.concatenate(sources) if rank == self.root else nothing
            case Verb.ALL_GATHER:
                return np.concatenate(sources)
            case Verb.SCATTER:
                at = sum(self.counts[:rank])
                return sources[self.root][at : at + self.counts[rank]]
            case Verb.ALL_TO_ALL:
                starts = [sum(self.rows(one)[:rank]) for one in ranks]
                return np.concatenate([sources[one][starts[one] : starts[one] + self.rows(one)[rank]] for one in ranks])
            case Verb.SEND:
                return sources[0] if rank == 1 else nothing
            case _:
                return nothing

    def cost(self) -> tuple[int, int]:
        """``(chunks, payload bytes)`` that all ranks together send: the closed numbers of the table of programs."""
        edges = self.size - 1
        pair = self.strategy.rooted(self.root)
        match self.verb:
            case Verb.ALL_REDUCE:
                parts = list(zip(self.pairs, self.parts, strict=True))
                costs = [self._folding(one.reduce, count) for one, (_, count) in parts]
                costs += [self._moving(count, edges) for _, (_, count) in parts]
            case Verb.REDUCE:
                costs = [self._folding(pair.reduce, self.count), (edges, 0)]
            case Verb.BROADCAST:
                costs = [(edges, 0), self._moving(self.count, edges)]
            case Verb.GATHER | Verb.SCATTER:
                hops = [len(pair.broadcast.path(rank)) - 1 for rank in range(self.size)]
                costs = [*map(self._moving, self.counts, hops), (edges, 0)]
            case Verb.ALL_GATHER:
                costs = [self._moving(count, edges) for count in self.counts]
            case Verb.REDUCE_SCATTER:
                costs = [self._folding(self.strategy.rooted(rank).reduce, n) for rank, n in enumerate(self.counts)]
                costs += [(edges, 0)] * (self.size * self.with_signals)
            case Verb.ALL_TO_ALL:
                costs = [self._moving(n, at // self.size != at % self.size) for at, n in enumerate(self.counts)]
            case Verb.SEND:
                costs = [self._moving(self.count, 1), (1, 0)]
            case _:
                costs = [(2 * edges, 0)]
        return sum(chunks for chunks, _ in costs), sum(nbytes for _, nbytes in costs)

    def _moving(self, count: int, times: int) -> tuple[int, int]:
        """The cost of sending so many elements over so many edges."""
        return times * num_chunks(count, self.chunk), times * count * ITEM.itemsize

    def _folding(self, graph: Graph, count: int) -> tuple[int, int]:
        """The cost of reducing: leaves send inputs, all others partial results."""
        senders = [rank for rank in range(self.size) if rank != graph.root]
        items = [self.accumulate if graph.children[rank] else ITEM for rank in senders]
        return len(senders) * num_chunks(count, self.chunk), count * sum(item.itemsize for item in items)

    def _input_count(self, rank: int) -> int:
        at_root = rank == self.root
        match self.verb:
            case Verb.ALL_REDUCE | Verb.REDUCE:
                return self.count
            case Verb.REDUCE_SCATTER:
                return sum(self.counts)
            case Verb.BROADCAST:
                return self.count if at_root else 0
            case Verb.GATHER | Verb.ALL_GATHER:
                return self.counts[rank]
            case Verb.SCATTER:
                return sum(self.counts) if at_root else 0
            case Verb.ALL_TO_ALL:
                return sum(self.rows(rank))
            case Verb.SEND:
                return self.count if rank == 0 else 0
            case _:
                return 0

    def _fold(self, graph: Graph, sources: list[np.ndarray], at: int, count: int) -> np.ndarray:
        def below(rank: int) -> np.ndarray:
            own = sources[rank][at : at + count].astype(self.accumulate)
            return functools.reduce(np.add, map(below, graph.children[rank]), own)

        return below(graph.root).astype(ITEM)


# ---------------------------------------------------------------- random ones


def tree(rnd: random.Random, size: int, root: int) -> Graph:
    """A random spanning tree, anywhere between a star and a chain, with its children in random order."""
    ranks = [rank for rank in range(size) if rank != root]
    rnd.shuffle(ranks)
    ranks.insert(0, root)
    reach = rnd.choice([1, 2, size])
    edges = []
    for place in range(1, size):
        first = max(0, place - reach) if rnd.random() < 0.8 else 0
        edges.append((ranks[rnd.randrange(first, place)], ranks[place]))
    rnd.shuffle(edges)
    return Graph.from_edges(size, edges)


def pair(rnd: random.Random, size: int) -> GraphPair:
    """A random pair; half of them use one tree in both directions."""
    root = rnd.randrange(size)
    reduce = tree(rnd, size, root)
    return GraphPair.of(reduce) if rnd.random() < 0.5 else GraphPair(reduce, tree(rnd, size, root))


def pairs(rnd: random.Random, size: int) -> tuple[GraphPair, ...]:
    """One to three random pairs."""
    return tuple(pair(rnd, size) for _ in range(rnd.choice([1, 1, 2, 3])))


def spec(
    rnd: random.Random,
    name: str,
    members: tuple[int, ...],
    ways: Callable[[random.Random, int], tuple[GraphPair, ...]] = pairs,
    largest: int = 24,
) -> Spec:
    """A random collective of any verb among these ranks."""
    verb = rnd.choice([verb for verb in VERBS if verb is not Verb.SEND or len(members) == 2])
    return of_verb(rnd, verb, name, members, ways(rnd, len(members)), largest)


def of_verb(
    rnd: random.Random, verb: Verb, name: str, members: tuple[int, ...], ways: tuple[GraphPair, ...], largest: int
) -> Spec:
    """A random collective of one verb."""
    size = len(members)
    many = {Verb.ALL_TO_ALL: size * size}.get(verb, size)
    if verb in (Verb.ALL_REDUCE, Verb.REDUCE, Verb.BROADCAST, Verb.SEND):
        many = 1
    if verb is Verb.ALL_TO_ALL:
        largest = max(1, largest // size)
    counts = tuple(rnd.choice([0, rnd.randrange(largest), largest]) for _ in range(many))
    return Spec(
        name,
        verb,
        members,
        ways,
        (0,) if verb is Verb.BARRIER else counts,
        root=rnd.randrange(size),
        chunk=rnd.choice([1 + largest // 6, 7, 1000]),
        wide=rnd.random() < 0.3,
        salt=rnd.randrange(1000),
        shares=rnd.choice([(), tuple(rnd.choice([1, 2, 30]) for _ in ways)]),
        with_signals=verb is Verb.REDUCE_SCATTER and sum(counts) % 2 == 1,
        window=sum(counts) % 4,
    )
