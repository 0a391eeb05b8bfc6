"""Strategies: from the layout of the ranks to the graphs along which data travels.

`build` turns a name into graph pairs; `from_edges` and `from_parents` make one by hand, `minimum_spanning_tree` and
`packed_trees` from matrices of latency and bandwidth. `builtin` has the graphs by name, each with its cost and source.
Everything is pure and deterministic: ranks that agree on name and layout have the same graphs.

Rules by message size, ``<=64KiB: star, else: ring``, are a mapping from a condition to whatever `build` takes, or that
mapping in one line of text, as settings carry it. Their order has no meaning: a message belongs to the lowest bound
that it does not exceed. Where a rule's strategy has rules itself (``auto`` has), those of its own range hold within it.

Combinations, ``inside: direct, between: double_tree``, are a mapping from these two words, or text, by the same means:
one strategy among the ranks of each host, another one between hosts (see `combine`). In text, brackets hold rules
within rules: ``<=64KiB: star, else: (inside: star, between: ring)``.

``auto:static`` has the graphs of ``auto``; a communicator of several hosts with ``auto`` improves them while it works,
with ``auto:static`` it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kfcomm.common.arguments import meant, plain_text
from kfcomm.common.imports import imported_when_used
from kfcomm.common.sizes import parse_size, show_size
from kfcomm.core.graph import Graph, GraphPair
from kfcomm.errors import ConfigError
from kfcomm.strategies import auto as _auto
from kfcomm.strategies.base import AnyStrategy, Direct, SizedStrategy, Strategy, from_edges, from_parents
from kfcomm.strategies.builtin import ALGORITHMS
from kfcomm.types import Layout

if TYPE_CHECKING:
    from kfcomm.strategies.measured import hosts_of, minimum_spanning_tree
    from kfcomm.strategies.tree_packing import bound_seconds, packed_trees
else:  # what is made from measurement: type checkers would take any name for one that is there
    __getattr__ = imported_when_used(
        __name__,
        {
            "bound_seconds": "kfcomm.strategies.tree_packing",
            "hosts_of": "kfcomm.strategies.measured",
            "minimum_spanning_tree": "kfcomm.strategies.measured",
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


STATIC: Final = "auto:static"
"""``auto`` that stays as it is: a job does not measure its links to improve it."""
_ELSE: Final = "else"
_AT_MOST: Final = "<="
_INSIDE: Final = "inside"
_BETWEEN: Final = "between"
_RULES_HELP = 'rules are like "<=64KiB: star, else: ring"'


def names() -> tuple[str, ...]:
    """The names that `build` knows by itself."""
    return (*(algorithm.name for algorithm in ALGORITHMS), "auto")


def build(spec: StrategySpec, layout: Layout, others: Callable[[], Mapping[str, Builder]] = dict) -> AnyStrategy:
    """The strategy that ``spec`` means for ranks laid out like this.

    Args:
        spec: a name, of `names` or of ``others``, or ``auto:static``; rules by size, as a mapping
            (``{"<=64KiB": "star", "else": "ring"}``) or as text (``"<=64KiB: star, else: ring"``); or a ready-made
            strategy, graph pair or graph, which must have the layout's size (a graph is used in both directions).
        layout: where the ranks are.
        others: returns builders of further names; called only for a name that is not in `names`.

    Raises:
        ConfigError: an unknown name (the message suggests the nearest), rules that cannot be, a wrong size, or
            something else.
    """
    match spec:
        case str() if _is_rules(spec):
            return build(_parsed(plain_text(spec)), layout, others)
        case str():
            return _named(plain_text(spec), layout, others)
        case Mapping() if not {_INSIDE, _BETWEEN}.isdisjoint(spec):
            return _of_both(spec, layout, others)
        case Mapping():
            return _of_rules(spec, lambda one: build(one, layout, others))
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
    if name in ("auto", STATIC):
        built = _auto.auto_before(layout)
        return built if name == built.name else replace(built, name=name)
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


def _is_rules(text: str) -> bool:
    """Whether a text means rules, rather than the name of a strategy."""
    return text.strip() != STATIC and (":" in text or "," in text or _AT_MOST in text)


def _parsed(text: str) -> dict[str, str]:
    """The mapping that a line of text means.

    Raises:
        ConfigError: a part of it has no colon, or a condition comes twice.
    """
    rules: dict[str, str] = {}
    for part in _parts(text):
        condition, colon, name = (word.strip() for word in part.partition(":"))
        if not colon:
            several = "" if ":" in text else "only one is wanted here; "
            raise ConfigError(f"strategy {text!r}: {part.strip()!r} has no colon; {several}{_RULES_HELP}")
        if condition in rules:
            raise ConfigError(f"strategy {text!r}: {condition!r} comes twice")
        rules[condition] = name[1:-1].strip() if name.startswith("(") and name.endswith(")") else name
    return rules


def _parts(text: str) -> list[str]:
    """The parts of a line between commas that no bracket holds.

    Raises:
        ConfigError: a bracket is not closed, or was not opened.
    """
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            break
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    if depth:
        raise ConfigError(f"strategy {text!r}: a bracket is {'not closed' if depth > 0 else 'closed but not opened'}")
    return parts


def _of_both(
    spec: Mapping[Any, Any], layout: Layout, others: Callable[[], Mapping[str, Builder]]
) -> AnyStrategy:  # fmt: skip
    """The combination of a strategy inside hosts with one between them.

    Raises:
        ConfigError: one of the two is missing, or there is something else.
    """
    if set(spec) != {_INSIDE, _BETWEEN}:
        raise ConfigError(
            f"a combination has {_INSIDE!r} and {_BETWEEN!r}, as in 'inside: direct, between: double_tree'; "
            f"there are {', '.join(map(repr, spec))}"
        )
    from kfcomm.strategies.combine import combined  # few programs combine

    return combined(
        layout, lambda part: build(spec[_INSIDE], part, others), lambda part: build(spec[_BETWEEN], part, others)
    )


def _of_rules(rules: Mapping[Any, Any], build: Callable[[Any], AnyStrategy]) -> SizedStrategy:
    """The strategy that rules mean, each of whose own strategies ``build`` makes.

    Its name is the rules as text. They hold for the bytes of a message: for a gather and its kin, those of the largest
    contribution.

    Raises:
        ConfigError: a condition is neither ``<=SIZE`` nor ``else``, two are the same bound, or ``else`` is missing.
    """
    bounds = {_bound(condition): spec for condition, spec in rules.items()}
    if len(bounds) < len(rules):
        raise ConfigError(f"two of the conditions {', '.join(map(repr, rules))} are the same bound")
    if None not in bounds:
        raise ConfigError(f"rules need an {_ELSE!r}, for all larger messages; there are {', '.join(map(repr, rules))}")
    flat: list[tuple[int | None, Strategy]] = []
    words: list[str] = []
    above = -1
    # None, the bound of `else`, comes last.
    for bound in sorted(bounds, key=lambda bound: (bound is None, bound)):
        one = build(bounds[bound])
        inner = _within(one, above, bound)
        flat += inner
        is_by_size = isinstance(one, SizedStrategy) and _is_rules(one.name)
        words += [_show(edge, each.name) for edge, each in inner] if is_by_size else [_show(bound, one.name)]
        above = above if bound is None else bound
    return SizedStrategy(", ".join(words), tuple(flat))


def show_exactly(nbytes: int) -> str:
    """A size that reads back as the same number: ``64KiB``, ``65537B``."""
    shown = show_size(nbytes).replace(" ", "")
    return f"{nbytes}B" if "." in shown else shown


def _show(bound: int | None, name: str) -> str:
    return f"{_ELSE if bound is None else _AT_MOST + show_exactly(bound)}: {f'({name})' if ':' in name else name}"


def _within(strategy: AnyStrategy, above: int, bound: int | None) -> list[tuple[int | None, Strategy]]:
    """The rules of a strategy for messages of more than ``above`` and up to ``bound`` bytes."""
    if isinstance(strategy, Strategy):
        return [(bound, strategy)]
    rules = [(own, inner) for own, inner in strategy.rules if own is None or own > above]
    last = next(place for place, (own, _) in enumerate(rules) if own is None or (bound is not None and own >= bound))
    return [*rules[:last], (bound, rules[last][1])]


def _bound(condition: Any) -> int | None:
    if condition == _ELSE:
        return None
    if not isinstance(condition, str) or not condition.strip().startswith(_AT_MOST):
        raise ConfigError(f"expected a condition '<=SIZE' or {_ELSE!r}, got {condition!r}; {_RULES_HELP}")
    return parse_size(condition.strip().removeprefix(_AT_MOST))
