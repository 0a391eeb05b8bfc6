"""Strategies as text for a terminal; `as_svg` beside it makes a picture.

Owns how graphs are written down: a tree as an outline, a chain as a line of arrows, and of many pairs the first
with a word on how the others differ. Double lines are edges between hosts. Knows nothing of terminals or files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from kfcomm.common.sizes import ranges, show_size
from kfcomm.core.graph import Graph, GraphPair
from kfcomm.errors import ConfigError
from kfcomm.strategies.base import DIRECT_NBYTES, AnyStrategy, SizedStrategy, Strategy
from kfcomm.strategies.cost import measure
from kfcomm.strategies.moves import goes_in_steps, moves_of
from kfcomm.strategies.picture import as_svg
from kfcomm.types import Layout

__all__ = ["as_svg", "as_text", "summary"]

_WIDTH: Final = 100
_LABEL: Final = 12
_WHOLE: Final = ", each message whole along one"


def as_text(strategy: AnyStrategy, layout: Layout, pair: int | None = None) -> str:
    """A drawing of the graphs, in lines of about 100 columns.

    Args:
        strategy: a strategy that depends on the message size is drawn once for each of its rules.
        layout: where the ranks are; of the strategy's size.
        pair: which graph pair to draw; None draws the first and says how the others differ.

    Raises:
        ConfigError: sizes differ, or the pair does not exist.
    """
    if strategy.size != layout.size:
        raise ConfigError(f"strategy {strategy.name!r} is for {strategy.size} ranks, not for {layout.size}")
    if isinstance(strategy, SizedStrategy):
        return "\n".join(_by_size(strategy, layout, pair))
    if pair is not None and not 0 <= pair < len(strategy.pairs):
        raise ConfigError(f"strategy {strategy.name!r} has graph pairs 0..{len(strategy.pairs) - 1}, no pair {pair}")
    return "\n".join([*summary(strategy, layout), "", *_pair(strategy, layout, pair), ""])


def summary(strategy: Strategy, layout: Layout) -> list[str]:
    """Lines that name the strategy, its cost, and the ranks of each host."""
    cost = measure(strategy, layout)
    who = f"{_count(layout.size, 'rank')} on {_count(layout.num_hosts, 'host')}"
    moved = f"the busiest rank moves {cost.bytes}, the busiest host {cost.cross_host_bytes}"
    lines = [
        f"{strategy.name}: {who}, {_count(len(strategy.pairs), 'graph pair')}{_WHOLE if strategy.is_whole else ''}",
        f"all_reduce: {_count(cost.steps, 'step')}; per byte of message {moved}",
    ]
    return lines + _wrapped(f"host {host}: {ranges(layout.ranks_of(host))}  " for host in range(layout.num_hosts))


def _by_size(strategy: SizedStrategy, layout: Layout, pair: int | None) -> Iterator[str]:
    above = 0
    for bound, chosen in strategy.rules:
        least = f"from {above} bytes" if bound is None else f"{above} to {bound} bytes"
        yield f"{strategy.name}, {least}:"
        yield as_text(chosen, layout, pair)
        above = above if bound is None else bound + 1


def _steps(strategy: Strategy, layout: Layout) -> Iterator[str]:
    """The messages of rank 0 in an exchange, by step."""
    yield "in steps; from rank 0 go"
    words: dict[int, list[str]] = {}
    for move in moves_of(strategy):
        if move.source == 0:
            arrow = "→" if layout.hosts[0] == layout.hosts[move.target] else "⇒"
            what = "contribution" if strategy.exchange is None else "part"
            words.setdefault(move.step, []).append(f"{_count(move.parts, what)} {arrow} {move.target}")
    yield from (f"  step {step + 1}: {', '.join(words[step])}" for step in sorted(words))
    yield "other verbs, and what does not go in steps, along a graph"


def _pair(strategy: Strategy, layout: Layout, asked: int | None) -> Iterator[str]:
    if asked is None and goes_in_steps(strategy):
        yield from _steps(strategy, layout)
    number = asked or 0
    pair = strategy.pairs[number]
    share = f", {strategy.shares[number]}/{sum(strategy.shares)} of a message" if strategy.shares else ""
    yield (
        f"pair {number} of 0..{len(strategy.pairs) - 1}, root {pair.root}{share}"
        if len(strategy.pairs) > 1
        else f"root {pair.root}"
    )
    if strategy.goes_whole and not goes_in_steps(strategy):
        yield "  reduce: up to the root, which keeps it; nothing comes down"
        yield from _tree(pair.reduce, layout)
    elif pair.reduce.parents == pair.broadcast.parents and not (_is_chain(pair.reduce) and pair.size > 2):
        yield "  reduce: up to the root; broadcast: the same way down"
        yield from _tree(pair.reduce, layout)
        if pair.reduce != pair.broadcast:
            yield "  (children in the order in which they are folded; the broadcast sends in another order)"
    else:
        yield from _graph("reduce", pair.reduce, layout, upwards=True)
        yield from _graph("broadcast", pair.broadcast, layout, upwards=False)
    if asked is None and strategy.for_long is not None:
        yield f"messages of more than {show_size(DIRECT_NBYTES)} go along other graphs: see --nbytes"
    if asked is None and len(strategy.pairs) > 1:
        yield _others(strategy.pairs) + (f"; shares {':'.join(map(str, strategy.shares))}" if strategy.shares else "")


def _graph(title: str, graph: Graph, layout: Layout, *, upwards: bool) -> list[str]:
    if _is_chain(graph):
        chain = graph.preorder[::-1] if upwards else graph.preorder
        return _chain(title, chain, layout)
    return [f"  {title}: {'up to' if upwards else 'down from'} the root", *_tree(graph, layout)]


def _is_chain(graph: Graph) -> bool:
    return all(len(below) <= 1 for below in graph.children)


def _chain(title: str, chain: Sequence[int], layout: Layout) -> list[str]:
    words = [str(chain[0])]
    for a, b in zip(chain, chain[1:], strict=False):
        words.append(f" {'→' if layout.hosts[a] == layout.hosts[b] else '⇒'} {b}")
    first, *more = _wrapped(words, _WIDTH - _LABEL)
    return [f"  {title:<{_LABEL - 2}}{first}", *(" " * _LABEL + line for line in more)]


def _tree(graph: Graph, layout: Layout) -> Iterator[str]:
    """One rank in a line; leaves that are neighbours in order and on one host share theirs."""
    yield f"  {graph.root}  host {layout.hosts[graph.root]}"
    stack = [(item, "  ", last) for item, last in _items(graph, graph.root, layout)]
    while stack:
        ranks, indent, last = stack.pop()
        above, host = layout.hosts[graph.parents[ranks[0]]], layout.hosts[ranks[0]]
        branch = ("└" if last else "├") + ("──" if above == host else "══")
        note = "" if above == host else f"  host {host}"
        yield f"{indent}{branch} {', '.join(map(str, ranks))}{note}"
        deeper = indent + ("    " if last else "│   ")
        stack.extend((item, deeper, end) for item, end in _items(graph, ranks[0], layout))


def _items(graph: Graph, rank: int, layout: Layout) -> list[tuple[list[int], bool]]:
    """The children of ``rank`` in groups to be drawn, last first, and whether each is the last."""
    groups: list[list[int]] = []
    for child in graph.children[rank]:
        joins = bool(groups) and layout.hosts[groups[-1][0]] == layout.hosts[child] and len(groups[-1]) < 16
        if joins and not graph.children[child] and not graph.children[groups[-1][0]]:
            groups[-1].append(child)
        else:
            groups.append([child])
    return [(group, position == 0) for position, group in enumerate(reversed(groups))]


def _others(pairs: Sequence[GraphPair]) -> str:
    """Differences of the pairs after the first from it."""
    size, first = pairs[0].size, pairs[0].root
    roots = f"root{'' if len(pairs) == 2 else 's'} {ranges(pair.root for pair in pairs[1:])}"
    if all(_moved(pairs[0], pair, [(rank + pair.root - first) % size for rank in range(size)]) for pair in pairs):
        return f"the others: this one, all ranks shifted round; {roots}"
    if all(_moved(pairs[0], pair, [_turned(size, rank, pair.root) for rank in range(size)]) for pair in pairs):
        return f"the others: this one, seen from another root; {roots}"
    return f"the others: other trees; {roots}"


def _turned(size: int, rank: int, root: int) -> int:
    """Rank ``rank`` of the tree at root 0, in the tree at ``root``: by exclusive-or in blocks of a power of two."""
    block = size & -size
    return (rank // block + root // block) % (size // block) * block + (rank % block ^ root % block)


def _moved(first: GraphPair, other: GraphPair, ranks: Sequence[int]) -> bool:
    """Whether ``other`` is ``first`` with rank ``r`` replaced by ``ranks[r]``."""
    both = ((first.reduce, other.reduce), (first.broadcast, other.broadcast))
    return all({(ranks[a], ranks[b]) for a, b in one.edges} == set(another.edges) for one, another in both)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _wrapped(words: Iterable[str], width: int = _WIDTH) -> list[str]:
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word.rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return [line.rstrip() for line in lines]
