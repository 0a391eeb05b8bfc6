"""Strategies: from the layout of the ranks to the graphs along which data travels.

`build` turns a name into graph pairs; `from_edges` and `from_parents` make one by hand, `minimum_spanning_tree` and
`packed_trees` from matrices of latency and bandwidth. `builtin` has the graphs by name, each with its cost and source.
Everything is pure and deterministic: ranks that agree on name and layout have the same graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from kfcomm.common.arguments import meant, plain_text
from kfcomm.common.imports import imported_when_used
from kfcomm.core.graph import Graph, GraphPair
from kfcomm.errors import ConfigError
from kfcomm.strategies import auto as _auto
from kfcomm.strategies.base import AnyStrategy, Direct, SizedStrategy, Strategy, from_edges, from_parents
from kfcomm.strategies.registry import ALGORITHMS
from kfcomm.strategies.rules import from_rules, is_rules, parse_rules
from kfcomm.types import Layout

if TYPE_CHECKING:
    from kfcomm.strategies.clusters import hosts_of
    from kfcomm.strategies.spanning_tree import minimum_spanning_tree
    from kfcomm.strategies.tree_packing import bound_seconds, packed_trees
else:  # what is made from measurement: type checkers would take any name for one that is there
    __getattr__ = imported_when_used(
        __name__,
        {
            "bound_seconds": "kfcomm.strategies.tree_packing",
            "hosts_of": "kfcomm.strategies.clusters",
            "minimum_spanning_tree": "kfcomm.strategies.spanning_tree",
            "packed_trees": "kfcomm.strategies.tree_packing",
        },
    )

__all__ = [
    "AnyStrategy",
    "Builder",
    "Direct",
    "SizedStrategy",
    "Strategy",
    "StrategySpec",
    "bound_seconds",
    "build",
    "from_edges",
    "from_parents",
    "hosts_of",
    "minimum_spanning_tree",
    "names",
    "packed_trees",
]

StrategySpec: TypeAlias = "str | Mapping[str, StrategySpec] | AnyStrategy | GraphPair | Graph"
"""What means a strategy: see `build`."""
Builder: TypeAlias = Callable[[Layout], StrategySpec]
"""Makes a strategy for any layout."""


def names() -> tuple[str, ...]:
    """The names that `build` knows by itself."""
    return (*(algorithm.name for algorithm in ALGORITHMS), "auto")


def build(spec: StrategySpec, layout: Layout, others: Callable[[], Mapping[str, Builder]] = dict) -> AnyStrategy:
    """The strategy that ``spec`` means for ranks laid out like this.

    Args:
        spec: a name, of `names` or of ``others``; rules by size, as a mapping (``{"<=64KiB": "star", "else": "ring"}``)
            or as text (``"<=64KiB: star, else: ring"``); or a ready-made strategy, graph pair or graph, which must have
            the layout's size (a graph is used in both directions).
        layout: where the ranks are.
        others: returns builders of further names; called only for a name that is not in `names`.

    Raises:
        ConfigError: an unknown name (the message suggests the nearest), rules that cannot be, a wrong size, or
            something else.
    """
    match spec:
        case str() if is_rules(spec):
            return build(parse_rules(plain_text(spec)), layout, others)
        case str():
            return _named(plain_text(spec), layout, others)
        case Mapping():
            return from_rules(spec, lambda one: build(one, layout, others))
        case Strategy() | SizedStrategy():
            ready: AnyStrategy = spec
        case GraphPair():
            ready = Strategy("custom", (spec,))
        case Graph():
            ready = Strategy("custom", (GraphPair.of(spec),))
        case _:
            raise ConfigError(
                f"a strategy is a name, rules by size, a Strategy, a GraphPair or a Graph, not {type(spec).__name__}"
            )
    if ready.size != layout.size:
        raise ConfigError(f"strategy {ready.name!r} is for {ready.size} ranks, not for {layout.size}")
    return ready


def _named(name: str, layout: Layout, others: Callable[[], Mapping[str, Builder]]) -> AnyStrategy:
    if name == "auto":
        return _auto.auto(layout)
    for algorithm in ALGORITHMS:
        if algorithm.name == name:
            return algorithm.build(layout)
    more = others()
    if name in more:
        return build(more[name](layout), layout)
    if name in ("packed_trees", "minimum_spanning_tree"):
        raise ConfigError(f"strategy {name!r} is made from measurement: (await comm.probe()).{name}()")
    known = [*names(), *sorted(more)]
    near = meant(name, known, like=0.5)
    hint = f"did you mean {' or '.join(near)}? (" if near else "("
    raise ConfigError(f"unknown strategy {name!r}; {hint}known are: {', '.join(known)})")
