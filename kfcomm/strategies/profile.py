"""Counts of a strategy on a layout, and the time model of messages inside one host.

The model is the Hockney (alpha-beta) model with LogGP's overhead for each message and the work of reduction:

    seconds = longest way's alphas
            + max(overhead * messages that the busiest rank sends and receives
                  + gamma * bytes that the busiest rank folds
                  + max(chain, busiest rank's local or copied bytes * beta),
                  (overhead * messages + gamma * bytes folded + beta * bytes copied, all of the busiest host)
                  / processors of a host)

where a way goes from a leaf to the root and on to a leaf, and *chain* is the time in which one chunk passes
along it: chunks follow each other (pipelining), so that neither the chain nor the busiest port can be beaten,
and links come near the slower of the two. Where a host has fewer processors than ranks, the work of all
its ranks counts: then few messages and copies beat idle ports. Copies are those through shared memory: a leaf's
contribution, a result that is shown (to all at once), and each that is kept; partial results are made where they are
shown. `price` has the model between hosts.
Sources: R. Hockney, "The communication challenge for MPP" (1994); A. Alexandrov et al., "LogGP" (1995).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kfcomm.core.graph import Graph, GraphPair
from kfcomm.strategies.base import Strategy
from kfcomm.strategies.network import NetworkModel
from kfcomm.types import Layout


class Load(NamedTuple):
    """Work that one part of a message causes along one pair."""

    ways: set[tuple[int, int]]  # see `Profile`
    messages: list[int]  # sent and received, by rank
    folds: list[int]  # parts folded, by rank
    copies: list[int]  # parts copied to or from memory that a rank shares with others of its host, by rank
    near: tuple[list[int], list[int]]  # parts sent, and parts received, inside hosts; by rank
    far: tuple[list[int], list[int]]  # parts sent, and parts received, between hosts; by host

    @classmethod
    def of(cls, pair: GraphPair, layout: Layout) -> Load:
        """Count at each rank what is above and below it, as on one host; then take out what crosses hosts."""
        folds, shown = list(map(len, pair.reduce.children)), list(map(len, pair.broadcast.children))
        above = [1] * layout.size
        above[pair.root] = 0
        if layout.num_hosts == layout.size:  # everything crosses, and hosts have the numbers of ranks
            sent, received, none = _added(above, shown), _added(above, folds), [0] * layout.size
            ways = {(0, pair.reduce.depth + pair.broadcast.depth)}
            return cls(ways, _added(sent, received), folds, none, (none, none), (sent, received))
        # A leaf copies its contribution into shared memory; an inner rank folds straight into what it passes on.
        gives = [up and not below for up, below in zip(above, folds, strict=True)]
        takes = above[:]
        near = _added(above, shown), _added(above, folds)
        messages = _added(*near)
        far = [0] * layout.num_hosts, [0] * layout.num_hosts

        crosses = [(child, parent) for parent, child in crossing(layout, pair.reduce)]
        for child, _ in crosses:
            gives[child] = False
        for parent, child in crossing(layout, pair.broadcast):
            takes[child] = 0
            shown[parent] -= 1
            crosses.append((parent, child))
        for source, target in crosses:
            near[0][source] -= 1
            near[1][target] -= 1
            far[0][layout.hosts[source]] += 1
            far[1][layout.hosts[target]] += 1
        copies = [give + take + (show > 0) for give, take, show in zip(gives, takes, shown, strict=True)]
        return cls(_ways(pair, layout.hosts), messages, folds, copies, near, far)


class Profile(NamedTuple):
    """Input of the time model: a strategy on a layout, counted in equal parts of the message."""

    num_pairs: int  # among how many pairs the message is shared out
    num_parts: int  # number of parts: one for each pair, or the sum of the shares
    largest: int  # parts of the pair that has most
    # ``(local hops, cross-host hops)`` of the longest ways, none of which is at least another in both
    ways: tuple[tuple[int, int], ...]
    messages: int  # what the busiest rank sends and receives, whatever its size
    folds: int  # parts that the busiest rank folds into its own
    local_parts: int  # parts that the busiest rank sends, receives or copies inside its host
    cross_parts: int  # parts that the busiest host sends or receives through its network port
    # messages, folded parts and parts copied inside it, of the busiest host's ranks together
    crowd: tuple[int, int, int]
    num_cpus: int  # processors that they share; 0 if each has enough

    @classmethod
    def of_loads(cls, strategy: Strategy, layout: Layout, loads: Sequence[Load]) -> Profile:
        """Of a strategy, from what is known of its pairs: several strategies may have them."""
        if strategy.goes_whole or (strategy.direct and layout.num_hosts == 1):
            return cls._of_direct(layout)
        return cls._of_the_sum(loads, shares_of(strategy), layout)

    @classmethod
    def _of_the_sum(cls, loads: Sequence[Load], shares: Sequence[int], layout: Layout) -> Profile:
        """Of messages whose parts go all ways."""
        messages = _summed([load.messages for load in loads], [1] * len(loads))
        folds = _summed([load.folds for load in loads], shares)
        copies = _summed([load.copies for load in loads], shares)
        near = (_summed([load.near[way] for load in loads], shares) for way in (0, 1))
        far = (_summed([load.far[way] for load in loads], shares) for way in (0, 1))
        return cls(
            num_pairs=len(loads),
            num_parts=sum(shares),
            largest=max(shares),
            ways=_longest({way for load in loads for way in load.ways}),
            messages=max(messages),
            folds=max(folds),
            local_parts=max(*map(max, near), *copies),
            cross_parts=max(map(max, far)),
            crowd=(
                max(_by_host(layout, messages)),
                max(_by_host(layout, folds)),
                max(_by_host(layout, copies)),
            ),
            num_cpus=layout.num_cpus,
        )

    @classmethod
    def _of_direct(cls, layout: Layout) -> Profile:
        """Of messages that every rank gets, in parts of an n-th."""
        size = layout.size
        on_hosts = [len(layout.ranks_of(host)) for host in range(layout.num_hosts)]
        most = max(on_hosts)
        near = min(1, size - 1)
        if layout.num_hosts == 1:
            # Shown, not sent: to use a slot costs about as much as to send a message and to receive one. Each rank
            # copies its contribution in, folds its own part, shows it, and copies the other parts. Shown data stays in
            # the cache, so that two of these copies cost what one does elsewhere.
            messages, folds, copies = 2 * near, size - 1, size * near
        else:
            messages, folds, copies = 2 * (size - 1), size * (size - 1), size * (most - 1)
        return cls(
            num_pairs=1,
            num_parts=size,
            largest=size,
            ways=((near, 0),) if layout.num_hosts == 1 else ((min(1, most - 1), 0), (0, 1)),
            messages=messages,
            folds=folds,
            local_parts=copies,
            cross_parts=size * max(number * (size - number) for number in on_hosts),
            crowd=(most * messages, most * folds, most * copies),
            num_cpus=layout.num_cpus,
        )

    def seconds(self, nbytes: int, network: NetworkModel) -> float:
        """The time model of the module's docstring, for one host."""
        part = nbytes / self.num_parts
        chunk = min(part * self.largest, network.chunk_nbytes)
        local_s = network.local_beta_s_per_byte
        hops = max(near for near, _ in self.ways)
        ports_s = max(hops * chunk, self.local_parts * part) * local_s
        latency_s = hops * network.local_alpha_s
        return latency_s + max(self.work_s(nbytes, network) + ports_s, self.crowd_s(nbytes, network))

    def work_s(self, nbytes: int, network: NetworkModel) -> float:
        """Work of the busiest rank, in seconds."""
        return self._worked_s(nbytes, network, self.messages, self.folds)

    def crowd_s(self, nbytes: int, network: NetworkModel) -> float:
        """Work of the busiest host, shared out among its processors, in seconds; 0 if each rank has one."""
        if not self.num_cpus:
            return 0.0
        messages, folds, copies = self.crowd
        copies_s = copies * nbytes / self.num_parts * network.local_beta_s_per_byte
        return (self._worked_s(nbytes, network, messages, folds) + copies_s) / self.num_cpus

    def _worked_s(self, nbytes: int, network: NetworkModel, messages: int, folds: int) -> float:
        chunks_per_part = max(1, -(-nbytes // (self.num_pairs * network.chunk_nbytes)))
        folded = folds * nbytes / self.num_parts
        return messages * chunks_per_part * network.overhead_s + folded * network.gamma_s_per_byte


def shares_of(strategy: Strategy) -> tuple[int, ...]:
    """The share of each pair."""
    return strategy.shares or (1,) * len(strategy.pairs)


def _added(some: Sequence[int], more: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(some, more, strict=True)]


def crossing(layout: Layout, graph: Graph) -> list[tuple[int, int]]:
    """The edges of a graph between hosts."""
    hosts = layout.hosts
    return [(a, b) for a, b in graph.edges if hosts[a] != hosts[b]] if layout.num_hosts > 1 else []


def _by_host(layout: Layout, counts: Sequence[int]) -> list[int]:
    """Sum over the ranks of each host."""
    if layout.num_hosts == 1:
        return [sum(counts)]
    sums = [0] * layout.num_hosts
    for host, count in zip(layout.hosts, counts, strict=True):
        sums[host] += count
    return sums


def _summed(counts: Sequence[Sequence[int]], shares: Sequence[int]) -> list[int]:
    """The sum of several counts, each as often as its share says, place by place."""
    if len(counts) == 1 and shares[0] == 1:
        return list(counts[0])
    scaled = [
        row if share == 1 else [share * count for count in row] for row, share in zip(counts, shares, strict=True)
    ]
    return list(map(sum, zip(*scaled, strict=True)))


def _ways(pair: GraphPair, hosts: Sequence[int]) -> set[tuple[int, int]]:
    """Hops from a leaf through the root to a leaf, of the longest ways of a pair."""
    up, down = _longest(_hops(pair.reduce, hosts)), _longest(_hops(pair.broadcast, hosts))
    return {(near + nearer, far + farther) for near, far in up for nearer, farther in down}


def _hops(graph: Graph, hosts: Sequence[int]) -> set[tuple[int, int]]:
    """``(local hops, cross-host hops)`` between the root and each rank; on one host, the most."""
    # On one host the hops are the depth, and no walk is needed.
    if max(hosts) == 0:
        return {(graph.depth, 0)}
    hops = [(0, 0)] * graph.size
    for above, below in graph.edges:
        near, far = hops[above]
        hops[below] = (near + 1, far) if hosts[above] == hosts[below] else (near, far + 1)
    return set(hops)


def _longest(ways: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The ways that no other equals or exceeds in both kinds of hop."""
    kept: list[tuple[int, int]] = []
    for near, far in sorted(ways, key=lambda way: (-way[1], -way[0])):
        if not kept or near > kept[-1][0]:
            kept.append((near, far))
    return tuple(kept)
