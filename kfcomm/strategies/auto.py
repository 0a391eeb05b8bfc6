"""The default strategy: the cheapest of all others for each size of message.

The time model is in `profile`, the candidates are those of `registry`. The result depends on the layout and the
constants alone, so that all ranks choose the same without a message.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from kfcomm.core.chunk import SHOWN_WHOLE_NBYTES
from kfcomm.strategies.base import Direct, SizedStrategy, Strategy
from kfcomm.strategies.profile import Load, NetworkModel, Profile
from kfcomm.strategies.registry import ALGORITHMS
from kfcomm.types import Layout

FORMULA = "for each message size the cheapest of the others by the time model"

_MAX_RANKS_WITH_PAIR_EACH: Final = 128  # above this, graphs for every rank take too long to build and compare
_SIZES: Final = tuple(1 << bit for bit in range(6, 31))  # 64 B to 1 GiB


def auto(layout: Layout, network: NetworkModel | None = None) -> SizedStrategy:
    """The cheapest strategy for each message size, by ``predict_seconds`` at 64 B, 128 B, ... 1 GiB.

    Few steps and messages win for short messages, an idle busiest port for long ones, and little traffic
    between hosts where there are several; where processors are fewer than ranks, few messages win for longer. Short
    messages go whole along one pair of several, picked by their key, so that all ranks get their share of the work of
    roots. Strategies with a pair for each rank are left out above 128 ranks.
    """
    network = network or NetworkModel.of(layout.costs)
    candidates = _candidates(layout)
    pairs = {id(pair): pair for strategy in candidates for pair in strategy.pairs}  # those that go whole have the same
    loads = {key: Load.of(pair, layout) for key, pair in pairs.items()}
    profiles = [Profile.of_loads(one, layout, [loads[id(pair)] for pair in one.pairs]) for one in candidates]
    rules: list[tuple[int | None, Strategy]] = []
    for nbytes in _SIZES:
        seconds = [
            profile.seconds(nbytes, network) if _may_take(one, nbytes, layout) else math.inf
            for one, profile in zip(candidates, profiles, strict=True)
        ]
        best = candidates[seconds.index(min(seconds))]
        # Neighbouring sizes with the same choice make one rule: each lookup walks the rules.
        if rules and rules[-1][1] is best:
            rules.pop()
        rules.append((nbytes, best))
    rules[-1] = (None, rules[-1][1])
    return SizedStrategy("auto", tuple(rules))


def _may_take(strategy: Strategy, nbytes: int, layout: Layout) -> bool:
    """Whether messages of this size go as the strategy's profile says.

    Where several ranks of a host share its memory they have slots, with a strategy that makes stars of them: then not
    every rank has to send to each on other hosts.
    """
    if layout.num_hosts == 1 or not strategy.direct:
        return True
    is_alone = layout.size == layout.num_hosts
    return is_alone and strategy.direct is Direct.ONE_STEP and nbytes <= SHOWN_WHOLE_NBYTES


def _candidates(layout: Layout) -> list[Strategy]:
    small = layout.size <= _MAX_RANKS_WITH_PAIR_EACH
    built = [algorithm.build(layout) for algorithm in ALGORITHMS if small or not algorithm.pair_per_rank]
    # Messages that go whole spread themselves over the pairs by their keys: where two cost the same, the more pairs.
    whole = [replace(strategy, is_whole=True) for strategy in built if len(strategy.pairs) > 1 and not strategy.direct]
    return [*sorted(whole, key=lambda strategy: -len(strategy.pairs)), *built]
