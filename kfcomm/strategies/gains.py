"""Predicted gain of one strategy over another, for the messages of a program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from kfcomm.strategies.base import AnyStrategy
from kfcomm.strategies.network import NetworkModel
from kfcomm.strategies.price import Market
from kfcomm.types import Layout

USUAL: Final[Mapping[int, int]] = {1 << 20: 1, 1 << 24: 1}
"""Messages of a program without known ones: their number by size in bytes."""
_MOST_SIZES: Final = 8


class Gain(NamedTuple):
    """Seconds that all_reduces are predicted to take, each of the messages once."""

    before_s: float
    after_s: float

    @property
    def factor(self) -> float:
        """How many times as fast they are."""
        return self.before_s / self.after_s if self.after_s else 1.0


def predicted_gain(before: AnyStrategy, after: AnyStrategy, layout: Layout, counts: Mapping[int, int] = USUAL) -> Gain:
    """Predict the gain by the time model of the layout's costs; ``counts``: number of messages by size in bytes.

    Sizes count as the next power of two; of many, those that are most of the bytes are looked at.

    Raises:
        ConfigError: a strategy is for another number of ranks, or the costs are of another number of hosts.
    """
    rounded: dict[int, int] = {}
    for nbytes, count in counts.items():
        size = 1 << max(nbytes - 1, 0).bit_length()
        rounded[size] = rounded.get(size, 0) + count
    most = sorted(rounded, key=lambda size: -size * rounded[size])[:_MOST_SIZES]
    market = Market(layout, NetworkModel.of(layout.costs))

    def seconds(strategy: AnyStrategy) -> float:
        return sum(rounded[size] * market.seconds(strategy.select(size), size) for size in most)

    return Gain(seconds(before), seconds(after))
