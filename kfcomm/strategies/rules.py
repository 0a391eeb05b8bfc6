"""Strategies by message size, as people write them: ``<=64KiB: star, else: ring``.

Rules are a mapping from a condition to whatever `build` takes, or that mapping in
one line of text, as settings carry it. Their order has no meaning: a message belongs to the lowest bound that it does
not exceed. Where a rule's strategy has rules itself (``auto`` has), those of its own range hold within it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from kfcomm.common.sizes import parse_size, show_size
from kfcomm.errors import ConfigError
from kfcomm.strategies.base import AnyStrategy, SizedStrategy, Strategy

ELSE: Final = "else"
_AT_MOST: Final = "<="
_HELP = 'rules are like "<=64KiB: star, else: ring"'


def is_rules(text: str) -> bool:
    """Whether a text means rules, rather than the name of a strategy."""
    return ":" in text or "," in text or _AT_MOST in text


def parse_rules(text: str) -> dict[str, str]:
    """The mapping that a line of text means.

    Raises:
        ConfigError: a part of it has no colon, or a condition comes twice.
    """
    rules: dict[str, str] = {}
    for part in text.split(","):
        condition, colon, name = (word.strip() for word in part.partition(":"))
        if not colon:
            several = "" if ":" in text else "only one is wanted here; "
            raise ConfigError(f"strategy {text!r}: {part.strip()!r} has no colon; {several}{_HELP}")
        if condition in rules:
            raise ConfigError(f"strategy {text!r}: {condition!r} comes twice")
        rules[condition] = name
    return rules


def from_rules(rules: Mapping[Any, Any], build: Callable[[Any], AnyStrategy]) -> SizedStrategy:
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
        raise ConfigError(f"rules need an {ELSE!r}, for all larger messages; there are {', '.join(map(repr, rules))}")
    flat: list[tuple[int | None, Strategy]] = []
    words: list[str] = []
    floor = -1
    for bound in sorted(bounds, key=lambda bound: (bound is None, bound)):
        one = build(bounds[bound])
        inner = _within(one, floor, bound)
        flat += inner
        words += [_show(edge, each.name) for edge, each in inner] if is_rules(one.name) else [_show(bound, one.name)]
        floor = floor if bound is None else bound
    return SizedStrategy(", ".join(words), tuple(flat))


def show_exactly(nbytes: int) -> str:
    """A size that reads back as the same number: ``64KiB``, ``65537B``."""
    shown = show_size(nbytes).replace(" ", "")
    return f"{nbytes}B" if "." in shown else shown


def _show(bound: int | None, name: str) -> str:
    return f"{ELSE if bound is None else _AT_MOST + show_exactly(bound)}: {name}"


def _within(strategy: AnyStrategy, floor: int, bound: int | None) -> list[tuple[int | None, Strategy]]:
    """The rules of a strategy for messages above ``floor`` and up to ``bound``."""
    if isinstance(strategy, Strategy):
        return [(bound, strategy)]
    rules = [(own, inner) for own, inner in strategy.rules if own is None or own > floor]
    last = next(place for place, (own, _) in enumerate(rules) if own is None or (bound is not None and own >= bound))
    return [*rules[:last], (bound, rules[last][1])]


def _bound(condition: Any) -> int | None:
    if condition == ELSE:
        return None
    if not isinstance(condition, str) or not condition.strip().startswith(_AT_MOST):
        raise ConfigError(f"expected a condition '<=SIZE' or {ELSE!r}, got {condition!r}; {_HELP}")
    return parse_size(condition.strip().removeprefix(_AT_MOST))
