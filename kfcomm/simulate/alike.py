"""Ranks that are alike: those of one class do the same at the same time, so that one of them is simulated.

`classes_of` finds them by colour refinement: ranks have the same colour if their hosts are alike, and if as many ranks
of each colour are above and below them, on their host or on others, in each graph. A port is then shared by as many
flows of each colour as those of all other hosts of its colour, so by induction over time what happens at a rank
happens at all of its colour at once.

Source: B. Weisfeiler and A. Leman, "The reduction of a graph to canonical form and the algebra which appears therein"
(1968); such partitions are called equitable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from kfcomm.core.graph import GraphPair
from kfcomm.simulate.network import SimulatedNetwork
from kfcomm.types import Layout

Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
_Colours: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"

_MOST_ROUNDS: Final = 64
"""Graphs that need more are long chains, whose ranks all differ."""
_LEAST_GAIN: Final = 2
"""Classes must be fewer than the ranks by this factor."""


def classes_of(pairs: Sequence[GraphPair], layout: Layout, network: SimulatedNetwork) -> Numbers | None:
    """The class of each rank: int64[ranks], numbered from 0; None where few ranks are alike, or are not known to be.

    O(pairs x ranks) for each of at most 64 rounds.
    """
    if network.links or network.switches or network.hosts_per_switch or _is_crowded(layout, network):
        return None
    hosts = np.array(layout.hosts)
    edges = list(_edges(pairs, hosts))
    specs = {(host.bandwidth, host.latency_s): None for host in network.hosts}
    numbers = {spec: number for number, spec in enumerate(specs)}
    kinds = np.array([numbers[host.bandwidth, host.latency_s] for host in network.hosts], np.uint64)
    colours = _mixed(kinds)[hosts]
    for salt, pair in enumerate(pairs, start=1):
        colours[[pair.root]] += _mixed(np.array([salt], np.uint64))
    count = 0
    for _ in range(_MOST_ROUNDS):
        colours = _refined(colours, edges, hosts)
        found, classes = np.unique(colours, return_inverse=True)
        if len(found) * _LEAST_GAIN > layout.size:
            return None
        if len(found) == count:
            return classes.astype(np.int64)
        count = len(found)
    return None


def _is_crowded(layout: Layout, network: SimulatedNetwork) -> bool:
    """Whether ranks wait for processors, and so are not alike if they are on one host."""
    most = np.bincount(layout.hosts).max()
    return bool(network.cpus) or any(0 < host.cpus < most for host in network.hosts)


def _edges(pairs: Sequence[GraphPair], hosts: Numbers) -> Iterator[tuple[Numbers, Numbers, _Colours]]:
    """Of each graph: ranks below, the ranks above them, and a salt that tells the graph, and local from other edges."""
    salt = np.uint64(1 << 32)
    for pair in pairs:
        for graph in (pair.reduce, pair.broadcast):
            below = np.delete(np.arange(graph.size), graph.root)
            above = np.array(graph.parents)[below]
            yield below, above, salt + (hosts[below] == hosts[above]).astype(np.uint64)
            salt += np.uint64(4)


def _refined(colours: _Colours, edges: Sequence[tuple[Numbers, Numbers, _Colours]], hosts: Numbers) -> _Colours:
    """Colours that also tell those of all neighbours, and of all ranks of the host."""
    new = _mixed(colours)
    for below, above, salt in edges:
        new[below] += _mixed(colours[above] ^ salt)
        np.add.at(new, above, _mixed(colours[below] ^ (salt + np.uint64(2))))
    together = np.zeros(int(hosts.max()) + 1, np.uint64)
    np.add.at(together, hosts, _mixed(new))
    refined: _Colours = _mixed(new + _mixed(together)[hosts])
    return refined


def _mixed(values: Any) -> Any:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): sums of its results tell multisets apart."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))
