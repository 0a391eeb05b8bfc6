"""Packed trees: several trees with different roots, weighted by the measured rates of ports and links.

The model: a host sends and receives at most at the rates of its port, whatever the ranks on it and the trees do at the
same time. Of each byte a host sends at least one copy, its part of the sum, and receives at least
one; and all h hosts together send at least 2(h−1), since each needs to hear, directly or not, of each other (that is
gossip by one-way calls). With ports of ``s[i]`` and ``r[i]`` bytes/s, S bytes thus take at least

    bound = S · max(1/s[i], 1/r[i] of each host i, 2(h−1) / Σs, 2(h−1) / Σr).

Flat trees reach it. In a tree with root ``u`` every other host sends its S to ``u``, and ``u`` sends the result to
``v``, which sends it to all others (or does so itself, where v = u). Then ``u`` receives h−2 copies more than the one
that every host receives, and ``v`` sends h−2 copies more than one. If root ``i`` has the weight x[i] among the trees,
and ``i`` is ``v`` with the weight y[i],

    time of i's port = S · max((1 + (h−2)·y[i]) / s[i], (1 + (h−2)·x[i]) / r[i]),

so that each host is given what its port has left in the time of the bound: y[i] ∝ bound·s[i]/S − 1, and x[i] likewise.
A host as slow as the bound is a leaf of all trees; with equal hosts all are roots, and the trees are a clique. Where
ports send as fast as they receive, x = y, and every tree is a star with two steps. Where one host alone is what takes
long, fewer roots than there might be are enough, and end sooner: chunks that arrive one after the other are passed on
earlier than chunks of many trees that arrive together.

A link between two hosts that is slower than both their ports is left alone, unless what these trees would send on it
takes longer than the bound. Then hosts go a way round it, below a third one, and the weights are found by
multiplicative weights, over stars, such trees, ports and links.

Where hosts are unlike, `packing_lp` also finds trees with at most two or three hosts below each. The packing is taken
whose busiest port needs the least time.

With several ranks on a host each is in turn the one through which the others of its host speak; if all hosts are roots,
there are as many copies of each tree.

Sources: Z. Zhang, C. Wu and Z. Li, "Near-optimal topology-adaptive parameter synchronization in distributed DNN
training" (INFOCOM 2021); G. Wang et al., "Blink: fast and generic collectives for distributed ML" (MLSys 2020), whose
packing is by multiplicative weights too; F. Harary and A. Schwenk, "The communication problem on graphs and digraphs"
(1974) for the 2(h−1) calls of gossip.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Final

from kfcomm.core.graph import Graph, GraphPair
from kfcomm.strategies.base import Strategy
from kfcomm.strategies.matrices import Matrix, rates_of
from kfcomm.strategies.packing_lp import MAX_HOSTS, Tree, loads_of, packed_with_fans
from kfcomm.types import Layout, Rates

_ENOUGH: Final = 0.8  # of the bound's time may the ports of roots be busy where another host is what takes long
_AS_GOOD: Final = 1.05  # times the bound: what measurements are about as exact as
_LEAST_SHARE: Final = 0.02  # of the largest; a tree with less costs more in messages than it carries
_PARTS: Final = 1000  # of the largest share: how finely a message is cut
_MOST_PAIRS: Final = 128  # as with `auto`: above it, not every rank of a host gets trees of its own
_ROUNDS: Final = 1000  # of multiplicative weights
_PRICE_STEP: Final = 0.1
_FANS: Final = (2, 3)
"""Hosts below one, at most, in further trees for hosts that are unlike."""
_UNLIKE: Final = 1.25
"""Between the fastest port and the slowest link: below it senders count as alike."""
_NEAR: Final = 1.01
_ABOUT_EQUAL: Final = 1.03
_DETOUR_BELOW: Final = 0.5  # of what the ports at its ends could do: then a link is worth going round


def packed_trees(layout: Layout, bandwidth: Matrix, *, name: str = "packed_trees") -> Strategy:
    """Trees that fill the ports of the hosts, with a message shared out among them by what each can carry.

    Between hosts; where all ranks are on one host, every rank counts as a host with a port of its own.

    Args:
        layout: where the ranks are.
        bandwidth: bytes/s from rank (row) to rank (column), each pair measured alone; the diagonal does not matter.
        name: of the strategy.

    Raises:
        ConfigError: the matrix is not square or of another size than the layout, or an entry is not above 0 and finite.

    Cost:
        2 steps between hosts (3 where ports send and receive at unlike rates, 4 round a slow link) and 2 inside of
        them; time ``bound_seconds`` by the model, but for latencies. Up to h trees, or if all hosts are roots h for
        each of a host's p ranks.
    """
    nodes = ports_of(layout)
    return packed_by(nodes, rates_of(nodes, bandwidth), name=name)


def packings(layout: Layout, rates: Rates) -> list[Strategy]:
    """Candidates of `auto` for hosts with these rates: with few senders to each host, and with few steps."""
    strategies = [_of_trees(layout, rates, packed, "packed_trees") for packed in _packings(rates)]
    return list({one.digest: one for one in strategies}.values())


def packed_by(nodes: Layout, rates: Rates, *, name: str = "packed_trees") -> Strategy:
    """As `packed_trees`, of the rates of hosts."""
    found = _packings(rates)
    seconds = [_busiest(packed, rates) for packed in found]
    best = next(place for place, one in enumerate(seconds) if one <= _ABOUT_EQUAL * min(seconds))
    return _of_trees(nodes, rates, found[best], name)


def _packings(rates: Rates) -> list[list[tuple[Tree, float]]]:
    """Packings with the fewest steps, and, where senders are unlike, those with few of them."""
    flat, bound = _packed(rates), bound_of(rates)
    hosts = len(rates.send)
    slowest = min(min(row[:a] + row[a + 1 :]) for a, row in enumerate(rates.links)) if hosts > 1 else 0.0
    is_alike = slowest * _UNLIKE > max(*rates.send, *rates.receive) and not rates.uplinks
    if not 2 < hosts <= MAX_HOSTS or is_alike:
        return [flat]
    return [flat, *(packed_with_fans(rates, fan, bound * _NEAR) for fan in _FANS if fan < hosts - 1)]


def _of_trees(nodes: Layout, rates: Rates, packed: Sequence[tuple[Tree, float]], name: str) -> Strategy:
    """Trees of hosts as those of their ranks, with shares."""
    largest = max(weight for _, weight in packed)
    packed = [(tree, weight) for tree, weight in packed if weight >= _LEAST_SHARE * largest]
    most = max(Counter(nodes.hosts).values())
    # Where hosts are leaves only, they are what takes long, and more trees would only hold up what they send.
    is_even = len({tree.root for tree, _ in packed}) == nodes.num_hosts
    copies = most if is_even and most * len(packed) <= _MOST_PAIRS else 1
    pairs = [
        _over_ranks(tree, nodes, number + copy, rates)
        for copy in range(copies)
        for number, (tree, _) in enumerate(packed)
    ]
    shares = [max(1, round(_PARTS * weight / largest)) for _, weight in packed] * copies
    return Strategy(name, tuple(pairs), shares=tuple(shares))


def bound_seconds(layout: Layout, bandwidth: Matrix, nbytes: int) -> float:
    """Lower bound of the time of an all_reduce of ``nbytes`` bytes, by the ports of the hosts (see the module).

    Nothing is counted of latencies, of work, or of what happens inside of hosts. Where all ranks are on one host, every
    rank counts as a host with a port of its own. 0 for a single rank.

    Raises:
        ConfigError: see `packed_trees`.
    """
    return nbytes * bound_of(rates_of(ports_of(layout), bandwidth))


def ports_of(layout: Layout) -> Layout:
    """The layout in which what has a port is a host: the same, or every rank by itself if there is only one host."""
    return layout if layout.num_hosts > 1 else Layout.even(layout.size, layout.size)


def bound_of(rates: Rates) -> float:
    """Seconds per byte."""
    bounds = [0.0]
    loose = [host for host, rack in enumerate(rates.rack_of) if rack is None]
    for way in ("send", "receive"):
        ports: Sequence[float] = getattr(rates, way)
        # Racks have the bound of hosts with ports: they need to hear of each other, too.
        racks = [*(getattr(uplink, way) for uplink in rates.uplinks), *(ports[host] for host in loose)]
        bounds += [max(1 / min(them), 2 * (len(them) - 1) / sum(them)) for them in (ports, racks)]
    return max(bounds)


def _packed(rates: Rates) -> list[tuple[Tree, float]]:
    """Trees of hosts, and their weights, which add up to 1."""
    hosts, bound = len(rates.send), bound_of(rates)
    slower = [min(both) for both in zip(rates.send, rates.receive, strict=True)]
    # The fewest steps first: stars, then trees with two centres, then detours round slow links; each only where those
    # before miss the bound.
    stars = [(_flat(hosts, host, host), weight) for host, weight in enumerate(_spare(slower, bound)) if weight]
    if _busiest(stars, rates) <= bound * _AS_GOOD:
        return stars
    down, up = _spare(rates.send, bound), _spare(rates.receive, bound)
    flat = [(_flat(hosts, u, v), weight) for u, v, weight in _coupled(up, down)]
    best = min([stars, flat], key=lambda packed: _busiest(packed, rates))
    if _busiest(best, rates) <= bound * _AS_GOOD:
        return best
    trees = [tree for tree, _ in flat]
    trees += [_flat(hosts, host, host) for host in range(hosts)]
    trees += [_round_slow_links(host, rates) for host in range(hosts)]
    trees = list(dict.fromkeys(trees))
    weights = balanced([loads_of(tree, rates) for tree in trees])
    return min([best, list(zip(trees, weights, strict=True))], key=lambda packed: _busiest(packed, rates))


def balanced(loads: Sequence[Mapping[Any, float]]) -> list[float]:
    """Weights that add up to 1 and make ``max over places of Σ weight · load`` nearly as small as possible.

    By multiplicative weights; ``loads`` has, of each thing, its load on each place (0 if left out).

    Source: N. Garg and J. Könemann, "Faster and simpler algorithms for multicommodity flow and other fractional packing
    problems" (1998).
    """
    # Only sums, products and quotients: so all ranks get the same weights, to the last bit.
    prices: dict[Hashable, float] = {place: 1.0 for load in loads for place in load}
    fullest = [max(load.values()) for load in loads]
    taken = [0.0] * len(loads)
    for _ in range(_ROUNDS):
        # Prices grow with the load of a place. Each round takes the cheapest thing, as much of it as fills one place.
        costs = [sum(prices[place] * amount for place, amount in load.items()) for load in loads]
        cheapest = costs.index(min(costs))
        taken[cheapest] += 1 / fullest[cheapest]
        for place, amount in loads[cheapest].items():
            prices[place] *= 1 + _PRICE_STEP * amount / fullest[cheapest]
    total = sum(taken)
    return [times / total for times in taken]


def _flat(hosts: int, root: int, speaker: int) -> Tree:
    """All to ``root``, from which ``speaker`` has the result for all others."""
    down = [speaker] * hosts
    down[root], down[speaker] = root, root
    return Tree(root, (root,) * hosts, tuple(down))


def _spare(ports: Sequence[float], bound: float) -> list[float]:
    """How the work of roots is shared out, by what each port has left beside the one copy of everything."""
    hosts = len(ports)
    if hosts <= 2:
        return [1 / hosts] * hosts
    fastest = sorted(range(hosts), key=lambda host: (-ports[host], host))
    # Water that fills the ports to one level: seconds per byte at which the first k have h−2 copies among them.
    levels = [(k + hosts - 2) / sum(ports[host] for host in fastest[:k]) for k in range(1, hosts + 1)]
    lowest = levels.index(min(levels))
    # Fewer hosts than all, the fastest, where these ports are still done well before the bound.
    k = next((k for k in range(lowest) if levels[k] <= _ENOUGH * bound), lowest)
    spare = [0.0] * hosts
    for host in fastest[: k + 1]:
        spare[host] = max(0.0, levels[k] * ports[host] - 1) / (hosts - 2)
    return spare


def _coupled(up: Sequence[float], down: Sequence[float]) -> Iterator[tuple[int, int, float]]:
    """``(root, speaker, weight)`` with these sums by root and by speaker; as many as can be are stars."""
    left_up, left_down = list(up), list(down)
    # Stars first, which need two steps; other trees need three.
    pairs = [(host, host) for host in range(len(up))]
    pairs += [(u, v) for u in range(len(up)) for v in range(len(down)) if u != v]
    for u, v in pairs:
        weight = min(left_up[u], left_down[v])
        if weight > 0:
            left_up[u] -= weight
            left_down[v] -= weight
            yield u, v, weight


def _round_slow_links(root: int, rates: Rates) -> Tree:
    """A star in which hosts with a slow link to the root are below another, whose links are good; in turns."""
    hosts = range(len(rates.send))

    def quality(a: int, b: int) -> float:
        there, back = rates.links[a][b], rates.links[b][a]
        return min(
            there / min(rates.send[a], rates.receive[b]), back / min(rates.send[b], rates.receive[a])
        )  # fmt: skip

    parents = [root] * len(hosts)
    direct = [host for host in hosts if host != root and quality(host, root) >= _DETOUR_BELOW]
    used = dict.fromkeys(direct, 0)
    for host in hosts:
        if host == root or host in used or not used:
            continue
        # Relays that are nearly as good count as equal, so that hosts take turns with them.
        best = min(direct, key=lambda relay: (-min(0.9, quality(host, relay)), used[relay], relay))
        if quality(host, best) > quality(host, root):
            parents[host] = best
            used[best] += 1
    return Tree(root, tuple(parents), tuple(parents))


def _busiest(packed: Sequence[tuple[Tree, float]], rates: Rates) -> float:
    """Seconds per byte of the busiest port or link."""
    sums: dict[tuple[int, ...], float] = {}
    for tree, weight in packed:
        for place, seconds in loads_of(tree, rates).items():
            sums[place] = sums.get(place, 0.0) + weight * seconds
    return max(sums.values(), default=0.0)


def _over_ranks(tree: Tree, layout: Layout, turn: int, rates: Rates) -> GraphPair:
    """The tree of hosts as one of ranks: in each host all are below one of them, another in every turn."""
    groups = [layout.ranks_of(host) for host in range(layout.num_hosts)]
    speakers = [ranks[turn % len(ranks)] for ranks in groups]
    local = [(speakers[host], rank) for host, ranks in enumerate(groups) for rank in ranks if rank != speakers[host]]
    # What arrives last is folded last: nothing waits for it.
    slow_last = sorted((host for host in range(len(groups)) if host != tree.root), key=lambda host: -rates.send[host])

    def graph(parents: Sequence[int]) -> Graph:
        between = [(speakers[parents[host]], speakers[host]) for host in slow_last]
        return Graph.from_edges(layout.size, local + between)

    reduce = graph(tree.up)
    return GraphPair.of(reduce) if tree.up == tree.down else GraphPair(reduce, graph(tree.down))
