"""Combinations: one strategy among the ranks of each host, another one between the hosts.

Of each host one rank takes part in what goes between hosts: the root of the graph inside. Where there are several
graphs inside, each has its part of every part between hosts, so that the ranks that are roots take turns. Hosts with
fewer graphs than others take theirs again. Contributions of a host are folded before those of others.

`tree` is ``inside: star, between: star``, `binary_tree_star` is ``inside: star, between: binary_tree``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kfcomm.core.graph import Graph, GraphPair
from kfcomm.strategies.base import DIRECT_NBYTES, AnyStrategy, SizedStrategy, Strategy
from kfcomm.types import Layout

Build = Callable[[Layout], AnyStrategy]
"""Makes a strategy for any layout."""


def combined(layout: Layout, inside: Build, between: Build) -> AnyStrategy:
    """The combination of two strategies, by size if one of them is.

    Of strategies that send each contribution to all ranks the first star is taken; of exchanges in steps, the graphs
    that they are. Pairs: those inside times those between hosts.
    """
    groups = [layout.ranks_of(host) for host in range(layout.num_hosts)]
    made = {size: inside(Layout((0,) * size, layout.num_cpus)) for size in {len(group) for group in groups}}
    insides = [made[len(group)] for group in groups]
    upper = between(Layout(tuple(range(len(groups))), layout.num_cpus, layout.costs))
    rules: list[tuple[int | None, Strategy]] = []
    for bound in _bounds([*made.values(), upper]):
        nbytes = 1 << 62 if bound is None else bound
        one = _of_graphs(groups, [each.select(nbytes) for each in insides], upper.select(nbytes))
        if rules and rules[-1][1].digest == one.digest:
            rules.pop()
        rules.append((bound, one))
    name = f"inside: {_bracketed(insides[0].name)}, between: {_bracketed(upper.name)}"
    return rules[0][1] if len(rules) == 1 else SizedStrategy(name, tuple(rules))


def _bounds(strategies: Iterable[AnyStrategy]) -> list[int | None]:
    """Sizes of message up to which each of several strategies is one."""
    bounds: set[int] = set()
    for strategy in strategies:
        rules = strategy.rules if isinstance(strategy, SizedStrategy) else ((None, strategy),)
        bounds.update(bound for bound, _ in rules if bound is not None)
        bounds.update(DIRECT_NBYTES for _, one in rules if one.for_long is not None)
    return [*sorted(bounds), None]


def _of_graphs(groups: Sequence[Sequence[int]], insides: Sequence[Strategy], between: Strategy) -> Strategy:
    inner, outer = [_pairs(one) for one in insides], _pairs(between)
    most = max(insides, key=lambda one: len(_pairs(one)))
    turns = len(_pairs(most))
    pairs = tuple(
        _joined(groups, [own[turn % len(own)] for own in inner], pair) for turn in range(turns) for pair in outer
    )
    shares: tuple[int, ...] = ()
    if most.shares or between.shares:
        inside_shares, between_shares = most.shares or (1,) * turns, between.shares or (1,) * len(outer)
        shares = tuple(a * b for a in inside_shares for b in between_shares)
    name = f"inside: {_bracketed(insides[0].name)}, between: {_bracketed(between.name)}"
    return Strategy(name, pairs, between.is_whole or most.is_whole, shares)


def _pairs(strategy: Strategy) -> tuple[GraphPair, ...]:
    if strategy.exchange is not None and not strategy.is_whole:
        return strategy.exchange.graphs()
    return strategy.pairs_of_direct if strategy.direct else strategy.pairs


def _joined(groups: Sequence[Sequence[int]], inner: Sequence[GraphPair], outer: GraphPair) -> GraphPair:
    """One pair over all ranks."""
    reduce = _graph(groups, [pair.reduce for pair in inner], outer.reduce)
    if all(pair.reduce == pair.broadcast for pair in (*inner, outer)):
        return GraphPair.of(reduce)
    return GraphPair(reduce, _graph(groups, [pair.broadcast for pair in inner], outer.broadcast))


def _graph(groups: Sequence[Sequence[int]], inner: Sequence[Graph], outer: Graph) -> Graph:
    roots = [group[graph.root] for group, graph in zip(groups, inner, strict=True)]
    local = [
        (group[above], group[below]) for group, graph in zip(groups, inner, strict=True) for above, below in graph.edges
    ]
    return Graph.from_edges(
        sum(map(len, groups)), local + [(roots[above], roots[below]) for above, below in outer.edges]
    )


def _bracketed(name: str) -> str:
    """A name as part of another: rules and combinations are put in brackets."""
    return f"({name})" if ":" in name else name
