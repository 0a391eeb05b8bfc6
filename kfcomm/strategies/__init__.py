"""Strategies: from the layout of the ranks to the graphs along which data travels.

`build` turns a name into graph pairs; `from_edges` and `from_fathers` make one by hand, and the functions of `measured`
from matrices of latency and bandwidth. One algorithm is one file, with its graphs, its cost as a formula, and where it
comes from. Everything here is pure and deterministic:
ranks that agree on name and layout have the same graphs.
"""

from __future__ import annotations

import difflib

from kfcomm.core.graph import Graph, GraphPair
from kfcomm.errors import ConfigError
from kfcomm.strategies import auto as _auto
from kfcomm.strategies.base import AnyStrategy, SizedStrategy, Strategy, from_edges, from_fathers
from kfcomm.strategies.measured import bound_seconds, hosts_of, minimum_spanning_tree, packed_trees
from kfcomm.strategies.registry import ALGORITHMS
from kfcomm.types import Layout

__all__ = [
    "AnyStrategy",
    "SizedStrategy",
    "Strategy",
    "bound_seconds",
    "build",
    "from_edges",
    "from_fathers",
    "hosts_of",
    "minimum_spanning_tree",
    "names",
    "packed_trees",
]


def names() -> tuple[str, ...]:
    """The names that `build` knows."""
    return (*(algorithm.name for algorithm in ALGORITHMS), "auto")


def build(spec: str | AnyStrategy | Graph | GraphPair, layout: Layout) -> AnyStrategy:
    """The strategy that ``spec`` means for ranks laid out like this.

    Args:
        spec: a name of `names`, or a ready-made strategy, graph pair or graph (then it must have the layout's
            size; a graph is used in both directions).
        layout: where the ranks are.

    Raises:
        ConfigError: an unknown name (the message suggests the nearest), a wrong size, or something else.
    """
    match spec:
        case str():
            return _named(spec, layout)
        case Strategy() | SizedStrategy():
            ready: AnyStrategy = spec
        case GraphPair():
            ready = Strategy("custom", (spec,))
        case Graph():
            ready = Strategy("custom", (GraphPair.of(spec),))
        case _:
            raise ConfigError(f"a strategy is a name, a Strategy, a GraphPair or a Graph, not {type(spec).__name__}")
    if ready.size != layout.size:
        raise ConfigError(f"strategy {ready.name!r} is for {ready.size} ranks, not for {layout.size}")
    return ready


def _named(name: str, layout: Layout) -> AnyStrategy:
    if name == "auto":
        return _auto.auto(layout)
    for algorithm in ALGORITHMS:
        if algorithm.name == name:
            return algorithm.build(layout)
    if name in ("packed_trees", "minimum_spanning_tree"):
        raise ConfigError(f"strategy {name!r} is made from measurement: (await comm.probe()).{name}()")
    near = difflib.get_close_matches(name.lower().replace("-", "_"), names(), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? (" if near else "("
    raise ConfigError(f"unknown strategy {name!r}; {hint}known are: {', '.join(names())})")
