"""The built-in strategies, each as the graphs that it makes of a layout.

Costs are those of one all_reduce that is shared out among the pairs, as `kfcomm.strategies.cost.measure` counts them:
steps; bytes of the busiest rank per byte of the message; the same of the busiest host's port. There are n ranks on h
hosts, p of them on the busiest host and p₀ on the first one; c is the greatest number of edges of one graph between a
host and others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from kfcomm.core.exchange import Exchange
from kfcomm.core.graph import Graph, GraphPair
from kfcomm.strategies.base import Direct, Strategy
from kfcomm.types import Layout


def star(layout: Layout) -> Strategy:
    """One star around rank 0; does not look at hosts.

    Fewest steps and messages, all of them through one rank: for short messages among few ranks.

    Cost: 2 steps, n−1 bytes, n−p₀ bytes between hosts. Source: KungFu's ``STAR``.
    """
    return Strategy("star", (GraphPair.of(star_around(layout.size, 0)),))


def ring(layout: Layout) -> Strategy:
    """One pair of chains for each rank; neighbours are neighbours by rank, whatever their hosts.

    Pair r reduces along r+1 → r+2 → … → r and broadcasts along r → r+1 → … → r−1 (modulo n). Together the pairs load
    every rank alike: least bytes, most steps, for long messages.

    Cost: 2(n−1) steps, 2(n−1)/n bytes, 2(n−1)/n · c bytes between hosts. Source: P. Patarasuk and X. Yuan, "Bandwidth
    optimal all-reduce algorithms for clusters of workstations" (2009); KungFu's ``RING``.
    """
    ranks, alone = tuple(range(layout.size)), _alone(layout.size)

    def pair(root: int) -> GraphPair:
        onwards = ranks[root:] + ranks[:root]
        return GraphPair(_chain_along((root, *reversed(onwards[1:])), alone), _chain_along(onwards, alone))

    return Strategy("ring", tuple(map(pair, ranks)))


def clique(layout: Layout) -> Strategy:
    """One star around each rank; does not look at hosts.

    Fewest steps and least bytes at once, paid for with n(n−1) links and as many messages: for ranks that are cheap to
    reach, as through shared memory.

    Cost: 2 steps, 2(n−1)/n bytes, max 2p(n−p)/n bytes between hosts. Source: KungFu's ``CLIQUE``.
    """
    return Strategy("clique", _stars(layout.size))


def direct(layout: Layout) -> Strategy:
    """Every rank makes its result of all contributions, added in the order of the ranks.

    Where ranks share memory no message is needed: each shows its contribution and reads those of the others (see
    ``transports.shm.slots``). Elsewhere every rank sends a short message to every other, one step where a star has two,
    if a host has a processor for each of its ranks; else messages go along a star around rank 0, 2(n−1) instead of
    n(n−1), with the same bits. Messages of more than `base.DIRECT_NBYTES` go along the graphs of `chain_star`, with the
    same bits in shared memory. Other verbs go as in `clique` (short, without slots) or as in `chain_star` (long).

    Cost: 1 step, n−1 bytes, max p(n−p) bytes between hosts; in shared memory bytes are read, not sent.
    """
    return _direct_of(layout, _stars(layout.size), chain_star(layout).pairs)


def _direct_of(layout: Layout, stars: Sequence[GraphPair], chain_stars: Sequence[GraphPair]) -> Strategy:
    # A star takes 2(n−1) messages in place of n(n−1): less work, which counts where ranks share processors.
    has_a_processor_each = not layout.num_cpus or max(Counter(layout.hosts).values()) <= layout.num_cpus
    return Strategy(
        "direct",
        tuple(stars),
        direct=Direct.ONE_STEP if has_a_processor_each else Direct.STAR,
        for_long=Strategy("direct", tuple(chain_stars), direct=Direct.CHAINS),
    )


def chain_star(layout: Layout) -> Strategy:
    """A chain towards each rank and a star from it; does not look at hosts.

    Pair r reduces along the chain r+1 → r+2 → … → r, as in a ring, and broadcasts along the star around r: the fewest
    copies in shared memory. For long messages on one host with more ranks than processors, where every copy costs all
    ranks time.

    Cost: n steps, 2(n−1)/n bytes, max ((n−1)c + p(n−p))/n bytes between hosts. Source: this project's measurements
    (see "Performance").
    """
    ranks, alone = tuple(range(layout.size)), _alone(layout.size)

    def pair(root: int) -> GraphPair:
        upwards = ranks[root + 1 :] + ranks[:root]
        # In a chain a rank folds straight into the memory that it passes on, and a star shows the result to all at
        # once: n+1 copies for each pair, where a ring and a clique make 2n−1.
        return GraphPair(_chain_along((root, *reversed(upwards)), alone), star_around(len(ranks), root))

    return Strategy("chain_star", tuple(map(pair, ranks)))


def tree(layout: Layout) -> Strategy:
    """A star of stars: ranks under their host's master (its first rank), masters under the first one.

    Each host's data crosses the network once.

    Cost: at most 4 steps, max(p₀+h−2, p) bytes, h−1 bytes between hosts. Source: KungFu's ``TREE``.
    """
    return Strategy("tree", (GraphPair.of(_hierarchy(layout, _star_edges(layout.num_hosts))),))


def binary_tree(layout: Layout) -> Strategy:
    """All ranks in heap order: rank i is above ranks 2i+1 and 2i+2; does not look at hosts.

    Few steps, and at most three edges at any rank: for short messages among many ranks.

    Cost: 2⌊log₂n⌋ steps, at most 3 bytes, c bytes between hosts. Source: KungFu's ``BINARY_TREE``.
    """
    return Strategy("binary_tree", (GraphPair.of(Graph.from_edges(layout.size, _heap_edges(layout.size))),))


def binary_tree_star(layout: Layout) -> Strategy:
    """Ranks under their host's master; the masters in heap order of their hosts.

    Cost: at most 2⌊log₂h⌋+2 steps, at most p+2 bytes, at most 3 bytes between hosts. Source: KungFu's
    ``BINARY_TREE_STAR``, its default for several hosts.
    """
    return Strategy("binary_tree_star", (GraphPair.of(_hierarchy(layout, _heap_edges(layout.num_hosts))),))


def multi_binary_tree_star(layout: Layout) -> Strategy:
    """One binary tree of stars for each host; pair k begins with host k, which loads all masters alike.

    Cost: at most 2⌊log₂h⌋+2 steps, p−1+2(h−1)/h bytes, 2(h−1)/h bytes between hosts. Source: KungFu's
    ``MULTI_BINARY_TREE_STAR``.
    """
    hosts = layout.num_hosts
    trees = (_hierarchy(layout, _heap_edges(hosts, offset)) for offset in range(hosts))
    return Strategy("multi_binary_tree_star", tuple(map(GraphPair.of, trees)))


def double_tree(layout: Layout) -> Strategy:
    """Two binary trees of the hosts' masters, half a message each: who is above others in one is a leaf in the other.

    So all hosts send and receive alike, as in a ring, in steps that grow with log h: for long messages among many
    hosts. Subtrees are blocks of neighbouring hosts. Ranks are under their host's master; on one host the trees are
    those of its ranks.

    Cost: at most 2⌈log₂(⌊h/2⌋+1)⌉+2 steps, at most p+1 bytes, at most 2 bytes between hosts. Source: P. Sanders,
    J. Speck and J. L. Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009); NCCL's
    double binary trees.
    """
    if layout.num_hosts == 1:
        layout = Layout.even(layout.size, layout.size)
    hosts = layout.num_hosts
    # Odd places are above others: a mirror makes them even ones if their number is even, a turn by one if it is odd.
    turned = [(host + 1) % hosts if hosts % 2 else hosts - 1 - host for host in range(hosts)]
    places = list(range(hosts)), sorted(range(hosts), key=turned.__getitem__)
    trees = (_hierarchy(layout, [(at[a], at[b]) for a, b in _inorder_edges(hosts)]) for at in places)
    return Strategy("double_tree", tuple(map(GraphPair.of, trees)))


def _inorder_edges(size: int) -> list[tuple[int, int]]:
    """A binary tree of least depth, numbered from left to right, whose even places are its leaves."""
    edges: list[tuple[int, int]] = []

    def join(first: int, leaves: int) -> int:
        """Join the places of so many leaves, from ``first`` on; return the uppermost."""
        if leaves == 1:
            return first
        left = (leaves + 1) // 2
        top = first + 2 * left - 1
        edges.extend((top, join(at, number)) for at, number in ((first, left), (top + 1, leaves - left)))
        return top

    join(0, size // 2 + 1)
    # The tree has an odd number of places. Of an even number the last one has a leaf less.
    return [(above, below) for above, below in edges if below < size]


def multi_star(layout: Layout) -> Strategy:
    """One star of stars for each host; as `tree`, with the load of its centre shared by all masters.

    Cost: at most 4 steps, p−1+2(h−1)/h bytes, 2(h−1)/h bytes between hosts. Source: KungFu's ``MULTI_STAR``.
    """
    hosts = layout.num_hosts
    trees = (_hierarchy(layout, _star_edges(hosts, centre)) for centre in range(hosts))
    return Strategy("multi_star", tuple(map(GraphPair.of, trees)))


def binomial(layout: Layout) -> Strategy:
    """Recursive halving and doubling, as one rotated binomial tree for each rank.

    Pair r is the binomial tree over the labels v, in which the parent of v is v without its lowest bit set, and label 0
    is rank r. If n is a power of two, label v is rank r xor v; then in all pairs together rank i talks to i xor 1,
    i xor 2, i xor 4, … only, with parts of 1/2, 1/4, 1/8, … of the message: recursive halving on the way up, doubling
    on the way down. For n = m·2^b with m odd, the lower b bits of label and rank are combined by xor and the rest by
    addition modulo m: the same bytes, over more links. Least bytes in few steps. Subtrees are blocks of neighbouring
    ranks, so that ranks numbered host by host reduce inside their hosts first.

    Cost: 2⌊log₂n⌋ steps, 2(n−1)/n bytes, at least 2(h−1)/h bytes between hosts; exactly that for hosts of 2^b ranks,
    numbered host by host. Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication
    operations in MPICH" (2005).
    """
    return Strategy("binomial", tuple(_rotated_binomial(layout.size, root) for root in range(layout.size)))


def _rotated_binomial(size: int, root: int) -> GraphPair:
    block = size & -size  # the largest power of two that divides the size

    def at(label: int) -> int:
        above = (root // block + label // block) % (size // block)
        return above * block + (root % block ^ label % block)

    # Clearing the lowest bit of a label gives its parent in the binomial tree.
    reduce = Graph.from_edges(size, [(at(label & (label - 1)), at(label)) for label in range(1, size)])
    # Small subtrees are ready first and folded first; large ones need the result first and are sent to first.
    large_first = tuple([below[::-1] for below in reduce.children])
    return GraphPair(reduce, Graph(reduce.parents, large_first, reduce.root))


def halving_doubling(layout: Layout) -> Strategy:
    """Recursive halving and doubling in few messages: the parts that go the same way in one step travel as one.

    As `binomial`, with 2⌈log₂n⌉ messages a rank in place of 2(n−1), for any number of ranks (see
    `kfcomm.core.exchange`). Ranks reduce inside their hosts first, if these have equally many. Other verbs go along the
    graph of `binary_tree_star`.

    Cost: 2(⌈log₂p⌉+⌈log₂h⌉) steps, 2(n−1)/n bytes, 2(h−1)/h bytes between hosts, for hosts of equally many ranks; of
    others 2⌈log₂n⌉ steps. Sources: as of `kfcomm.core.exchange`.
    """
    groups: list[list[int]] = [[] for _ in range(layout.num_hosts)]
    for rank, host in enumerate(layout.hosts):
        groups[host].append(rank)
    most = max(map(len, groups))
    order = [group[place] for place in range(most) for group in groups if place < len(group)]
    is_even = len(order) == most * len(groups)
    exchange = Exchange(tuple(order), (most, len(groups)) if is_even else (len(order),))
    return Strategy("halving_doubling", binary_tree_star(layout).pairs, exchange=exchange)


def dissemination(layout: Layout) -> Strategy:
    """Every rank gets all contributions in ⌈log₂n⌉ steps, and adds them in the order of the ranks.

    In each step a rank passes on what it has, to the rank 1, 2, 4, ... before it: half the steps of a tree. For short
    messages among many hosts, with the bits of `direct`. Messages of more than 16 KiB, and other verbs, go along a
    star. On one host it is as `direct` where ranks share memory.

    Cost: ⌈log₂n⌉ steps, n−1 bytes. Sources: D. Hensgen, R. Finkel and U. Manber, "Two algorithms for barrier
    synchronization" (1988); J. Bruck et al., "Efficient algorithms for all-to-all communications in multiport
    message-passing systems" (1997).
    """
    if layout.num_hosts == 1:  # slots have the bits of a star around each rank
        return replace(direct(layout), name="dissemination", direct=Direct.DISSEMINATION)
    return Strategy("dissemination", (GraphPair.of(star_around(layout.size, 0)),), direct=Direct.DISSEMINATION)


def _stars(size: int) -> tuple[GraphPair, ...]:
    return tuple(GraphPair.of(star_around(size, centre)) for centre in range(size))


def star_around(size: int, centre: int) -> Graph:
    """A star around one rank, others ascending."""
    children: list[tuple[int, ...]] = [()] * size
    children[centre] = (*range(centre), *range(centre + 1, size))
    return Graph((centre,) * size, tuple(children), centre)


def _alone(size: int) -> tuple[tuple[int], ...]:
    # n chains of n ranks each: one shared tuple for each rank takes a third of the memory.
    return tuple((rank,) for rank in range(size))


def _chain_along(order: Sequence[int], alone: Sequence[tuple[int]]) -> Graph:
    """A chain through all ranks in this order, the root first; ``alone[r]`` is ``(r,)``."""
    parents = [order[0]] * len(order)
    children: list[tuple[int, ...]] = [()] * len(order)
    for above, below in zip(order, order[1:], strict=False):
        parents[below], children[above] = above, alone[below]
    return Graph(tuple(parents), tuple(children), order[0])


def _star_edges(size: int, centre: int = 0) -> Iterator[tuple[int, int]]:
    return ((centre, other) for other in range(size) if other != centre)


def _heap_edges(size: int, offset: int = 0) -> Iterator[tuple[int, int]]:
    """A complete binary tree in heap order (i above 2i+1 and 2i+2), all indices rotated by ``offset``."""
    return ((((below - 1) // 2 + offset) % size, (below + offset) % size) for below in range(1, size))


def _hierarchy(layout: Layout, host_edges: Iterable[tuple[int, int]]) -> Graph:
    """A star inside each host around its master; the masters joined by a tree of hosts, ``(parent, child)`` pairs."""
    masters = layout.masters
    local = [(masters[host], rank) for rank, host in enumerate(layout.hosts) if rank != masters[host]]
    between = [(masters[above], masters[below]) for above, below in host_edges]
    # Local ranks come first among the children, since their data arrives first.
    return Graph.from_edges(layout.size, local + between)


class BuiltinStrategy(NamedTuple):
    """A strategy for every layout, with its cost formula."""

    build: Callable[[Layout], Strategy]  # makes the graphs; its name is the strategy's
    formula: str  # the cost in words; n ranks on h hosts, p on the busiest host, p₀ on the first one
    pair_per_rank: bool = False  # it has as many pairs as ranks, so that its graphs take memory in n²

    @property
    def name(self) -> str:
        """The name that users write."""
        return self.build.__name__


# The order is that of the documentation, and ``auto`` breaks ties by it.
ALGORITHMS: Final = (
    BuiltinStrategy(star, "steps 2; bytes n−1; between hosts n−p₀"),
    BuiltinStrategy(ring, "steps 2(n−1); bytes 2(n−1)/n; between hosts 2(n−1)/n · c", pair_per_rank=True),
    BuiltinStrategy(clique, "steps 2; bytes 2(n−1)/n; between hosts max 2p(n−p)/n", pair_per_rank=True),
    BuiltinStrategy(direct, "steps 1; bytes n−1; between hosts max p(n−p)", pair_per_rank=True),
    BuiltinStrategy(chain_star, "steps n; bytes 2(n−1)/n; between hosts max ((n−1)c + p(n−p))/n", pair_per_rank=True),
    BuiltinStrategy(tree, "steps ≤ 4; bytes max(p₀+h−2, p); between hosts h−1"),
    BuiltinStrategy(binary_tree, "steps 2⌊log₂n⌋; bytes ≤ 3; between hosts c"),
    BuiltinStrategy(binary_tree_star, "steps ≤ 2⌊log₂h⌋+2; bytes ≤ p+2; between hosts ≤ 3"),
    BuiltinStrategy(multi_binary_tree_star, "steps ≤ 2⌊log₂h⌋+2; bytes p−1+2(h−1)/h; between hosts 2(h−1)/h"),
    BuiltinStrategy(double_tree, "steps ≤ 2⌈log₂(⌊h/2⌋+1)⌉+2; bytes ≤ p+1; between hosts ≤ 2"),
    BuiltinStrategy(multi_star, "steps ≤ 4; bytes p−1+2(h−1)/h; between hosts 2(h−1)/h"),
    BuiltinStrategy(binomial, "steps 2⌊log₂n⌋; bytes 2(n−1)/n; between hosts ≥ 2(h−1)/h", pair_per_rank=True),
    BuiltinStrategy(halving_doubling, "steps 2(⌈log₂p⌉+⌈log₂h⌉); bytes 2(n−1)/n; between hosts ≥ 2(h−1)/h"),
    BuiltinStrategy(dissemination, "steps ⌈log₂n⌉; bytes n−1; between hosts by the numbering of ranks"),
)


def build_all(layout: Layout, algorithms: Iterable[BuiltinStrategy] = ALGORITHMS) -> list[Strategy]:
    """Build several of them, in their order; they share the graphs that they have in common.

    Of hosts with one rank each, those are left out whose graphs another one has: ``tree``, ``binary_tree_star`` and
    ``multi_star`` are ``star``, ``binary_tree`` and ``clique`` then.
    """
    is_alone = layout.num_hosts == layout.size
    built: dict[str, Strategy] = {}
    for algorithm in algorithms:
        if algorithm.build in (direct, chain_star) and {"ring", "clique"} <= built.keys():
            # A rank's chain and its star: see `ring`, `clique` and `chain_star`.
            stars = built["clique"].pairs
            pairs = tuple(
                GraphPair(along.reduce, star.broadcast)
                for along, star in zip(built["ring"].pairs, stars, strict=True)
            )  # fmt: skip
            if algorithm.build is direct:
                built["direct"] = _direct_of(layout, stars, pairs)
            else:
                known = built.get("direct")
                shared = known.for_long.pairs if known is not None and known.for_long is not None else pairs
                built["chain_star"] = Strategy("chain_star", shared)
        elif not (is_alone and algorithm.build in (tree, binary_tree_star, multi_star)):
            built[algorithm.name] = algorithm.build(layout)
    return list(built.values())
