"""The default strategy, the cheapest of all others for each size of message, by the time model of `price`.

The result depends on the layout and the constants alone, so that all ranks choose the same without a message.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from kfcomm.common.sizes import show_size
from kfcomm.strategies.base import SizedStrategy, Strategy
from kfcomm.strategies.builtin import (
    ALGORITHMS,
    BuiltinStrategy,
    binary_tree,
    binomial,
    build_all,
    clique,
    direct,
    multi_binary_tree_star,
    multi_star,
    ring,
    star,
)
from kfcomm.strategies.network import NetworkModel
from kfcomm.types import Layout

if TYPE_CHECKING:
    from kfcomm.strategies.price import Priced

FORMULA = "for each message size the cheapest of the others by the time model"

_MAX_ENTRIES: Final = 128 * 128
"""Pairs times ranks. Graphs with more take too long to build and compare, and too much memory on every rank."""
_MOST_WHOLE_NBYTES: Final = 1 << 20
"""Longer messages are shared out, so that no rank has all the work."""
_SHORT_NBYTES: Final = 1 << 16
_ABOUT_EQUAL: Final = 1.08
_STEPS_TAKE: Final = ((1 << 22, 2.0), (1 << 18, 1.25))
"""By the least size, what exchanges in steps take beside the model where more goes between hosts than a queue holds.

What is dropped at the end of a step is only sent again when a timer fires, since nothing comes after it. Between eight
hosts with 100 Mbit/s and 50 ms of queue, ``halving_doubling`` took 1.0 of the model at 64 KiB, 1.2 at 1 MiB and 2.3 at
16 MiB; with queues that drop nothing 1.1.
"""
_SIZES: Final = tuple(1 << bit for bit in range(6, 31))  # 64 B to 1 GiB


class SizeChoice(NamedTuple):
    """Strategy for messages of one size, and the next best.

    Attributes:
        nbytes: of a message.
        strategy: the cheapest.
        seconds: the predicted time of an all_reduce with it.
        runner_up: the cheapest with other graphs.
        runner_up_s: the same with it.
        limit: what takes most of the time: ``latency``, ``work`` or ``ports``.
    """

    nbytes: int
    strategy: Strategy
    seconds: float
    runner_up: Strategy
    runner_up_s: float
    limit: str


def auto(layout: Layout, network: NetworkModel | None = None) -> SizedStrategy:
    """The cheapest strategy for each message size, by ``predict_seconds`` at 64 B, 128 B, ... 1 GiB.

    Few steps and messages win for short messages, an idle busiest port for long ones, and little traffic
    between hosts where there are several; where processors are fewer than ranks, few messages win for longer. Short
    messages go whole along one pair of several, picked by their key, so that all ranks get their share of the work of
    roots. Where the rates of hosts are known, ``packed_trees`` of them are among the candidates. Strategies whose pairs
    have more than 16,384 ranks in all are left out: above 128 ranks, those with a pair for each. On one host all sizes
    are ``direct``, for its slots in shared memory, and nothing is priced.
    """
    if layout.num_hosts == 1:
        return SizedStrategy("auto", ((None, direct(layout)),))
    rules: list[tuple[int | None, Strategy]] = []
    for choice in choices(layout, network):
        # Neighbouring sizes with the same choice make one rule: each lookup walks the rules.
        if rules and rules[-1][1] is choice.strategy:
            rules.pop()
        rules.append((choice.nbytes, choice.strategy))
    rules[-1] = (None, rules[-1][1])
    return SizedStrategy("auto", tuple(rules))


@lru_cache(8)
def auto_before(layout: Layout) -> SizedStrategy:
    """As `auto`, built once for each of the latest layouts: groups and epochs have few, and building takes 3 ms."""
    return auto(layout)


def choices(layout: Layout, network: NetworkModel | None = None) -> Iterator[SizeChoice]:
    """The choice of `auto` for 64 B, 128 B, ... 1 GiB.

    Raises:
        ConfigError: the network has rates of another number of hosts than the layout has.
    """
    from kfcomm.strategies.price import Market, Priced  # not needed on one host

    network = network or NetworkModel.of(layout.costs)
    market = Market(layout, network)
    priced = [Priced(one, market) for one in _candidates(layout, network)]
    if layout.num_hosts == 1:  # see `auto`; the others are there to be compared
        priced.sort(key=lambda one: one.strategy.name != "direct")
    for nbytes in _SIZES:
        seconds = [
            one.seconds(nbytes) * _care(one.strategy, nbytes, layout)
            if _may_take(one.strategy, nbytes, layout)
            else math.inf
            for one in priced
        ]
        best = 0 if layout.num_hosts == 1 else seconds.index(min(seconds))
        # Where rates are known, few trees are there for a reason: several meet at ports.
        if layout.num_hosts > 1 and network.rates is None and nbytes > _SHORT_NBYTES:
            best = _spread(best, [one.strategy for one in priced], seconds)
        yield _chosen(nbytes, priced, seconds, best)


def _chosen(nbytes: int, priced: Sequence[Priced], seconds: Sequence[float], best: int) -> SizeChoice:
    """The chosen candidate, and the next one that has other pairs."""
    candidates = [one.strategy for one in priced]
    alike = [place for place, one in enumerate(candidates) if one.pairs is candidates[best].pairs]
    second_s, second = min(
        (one_s, place) for place, one_s in enumerate(seconds) if one_s < math.inf and place not in alike
    )
    return SizeChoice(nbytes, candidates[best], seconds[best], candidates[second], second_s, priced[best].limit(nbytes))


def _spread(best: int, candidates: Sequence[Strategy], seconds: Sequence[float]) -> int:
    """The best of those that take about as long and share a message out among most ranks; so none has all the work."""
    if _is_spread(candidates[best]):
        return best
    limit_s = _ABOUT_EQUAL * seconds[best]
    most = [(one_s, at) for at, one_s in enumerate(seconds) if one_s <= limit_s and _is_spread(candidates[at])]
    return min(most, default=(0.0, best))[1]


def _is_spread(strategy: Strategy) -> bool:
    """Whether the work of a long message is that of most ranks."""
    return strategy.exchange is not None or (len(strategy.pairs) > 2 and not strategy.is_whole)


def explained(layout: Layout, network: NetworkModel | None = None) -> Iterator[str]:
    """Lines that say what `auto` takes for which sizes, what limits it there, and what the next best would take.

    Uplinks that racks share come first. Below combinations and graphs by racks, what they save beside the next best.
    """
    from kfcomm.strategies.reasons import reason, uplinks_in_words  # not needed by jobs

    network = network or NetworkModel.of(layout.costs)
    known = "the rates of each host" if network.rates is not None else "hosts that are alike"
    yield f"auto, by the time model with {known}; times are those of the largest size of a line:"
    if network.rates is not None:
        yield from uplinks_in_words(network.rates)
    made = list(choices(layout, network))
    for one, following in zip(made, [*made[1:], None], strict=True):
        if following is None or following.strategy is not one.strategy:
            bound = f"to {show_size(one.nbytes)}" if following is not None else f"{show_size(one.nbytes)} and more"
            yield f"  {bound:<16}{_called(one.strategy):<44}{one.seconds * 1e3:10.3f} ms ({one.limit}){_next(one)}"
            yield from reason(one.strategy, one.runner_up, layout, network.rates)
    if network.rates is None and layout.num_hosts > 1:
        yield "a job measures the links between its hosts, and changes graphs that do not fit; auto:static does not"


def _called(strategy: Strategy) -> str:
    return f"{strategy.name}, not shared out" if strategy.is_whole else strategy.name


def _next(choice: SizeChoice) -> str:
    more = f" ({choice.runner_up_s / choice.seconds - 1:+.0%})" if choice.seconds else ""
    return f"; next {_called(choice.runner_up)} {choice.runner_up_s * 1e3:.3f} ms{more}"


def _may_take(strategy: Strategy, nbytes: int, layout: Layout) -> bool:
    """Whether messages of this size go as the strategy's price says."""
    if strategy.is_whole and nbytes > _MOST_WHOLE_NBYTES:
        return False
    if layout.num_hosts == 1 or not strategy.direct:
        return True
    # Ranks that share a host's memory have slots, with a strategy that makes stars of them: then not every rank sends
    # to each on other hosts.
    is_alone = layout.size == layout.num_hosts
    return is_alone and strategy.sends_at_once(nbytes)


def _care(strategy: Strategy, nbytes: int, layout: Layout) -> float:
    """Factor by which a price may be too low."""
    if strategy.exchange is None or strategy.is_whole or layout.num_hosts == 1:
        return 1.0
    return next((factor for least, factor in _STEPS_TAKE if nbytes >= least), 1.0)


def _num_pairs(algorithm: BuiltinStrategy, layout: Layout) -> int:
    """Number of graph pairs, as far as it grows with the layout."""
    if algorithm.pair_per_rank:
        return layout.size
    return layout.num_hosts if algorithm.build in (multi_star, multi_binary_tree_star) else 0


def _candidates(layout: Layout, network: NetworkModel) -> list[Strategy]:
    built = build_all(layout, [one for one in ALGORITHMS if _num_pairs(one, layout) * layout.size <= _MAX_ENTRIES])
    more: list[Strategy] = []
    if network.rates is not None and layout.num_hosts > 1:
        from kfcomm.strategies.racks import by_rack
        from kfcomm.strategies.tree_packing import packings

        built += packings(layout, network.rates)
        more += by_rack(layout, network.rates, _MAX_ENTRIES)
    if layout.num_hosts < layout.size and layout.num_hosts > 1:
        more += _combinations(layout)
    # Messages that go whole spread themselves over the pairs by their keys: where two cost the same, the more pairs.
    whole = [replace(strategy, is_whole=True) for strategy in built if len(strategy.pairs) > 1 and not strategy.direct]
    return [*sorted(whole, key=lambda strategy: -len(strategy.pairs)), *more, *built]


def _combinations(layout: Layout) -> Iterator[Strategy]:
    """Strategies inside hosts with others between them that no built-in strategy has, and that win somewhere."""
    from kfcomm.strategies.combine import combined  # not needed on one host

    several = layout.size**2 <= _MAX_ENTRIES
    kinds = ((binomial, ring), (binomial, clique), (binary_tree, star)) if several else ((binary_tree, star),)
    for inside, between in kinds:
        yield combined(layout, inside, between).select(_SIZES[-1])
