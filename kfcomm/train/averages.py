"""Moving averages that are right from the first value on."""

from __future__ import annotations

from collections.abc import Sequence

from kfcomm.errors import ConfigError


class MovingAverage:
    """An exponential moving average, corrected for its start at zero: a weighted mean of what it was given.

    After t values the weight of the k-th last is decay^k (1 − decay) / (1 − decay^t), as in Adam (Kingma and Ba,
    https://arxiv.org/abs/1412.6980, section 3). With decay 0 it is the latest value.

    Args:
        decay: at least 0 and below 1; the average is of about 1 / (1 − decay) values.

    Raises:
        ConfigError: ``decay`` is out of its range.
    """

    __slots__ = ("_decay", "_sum", "_weight")

    def __init__(self, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(f"the decay of a moving average is at least 0 and below 1, not {decay!r}")
        self._decay = decay
        self._sum = 0.0
        self._weight = 0.0

    def update(self, value: float) -> None:
        """Take one more value."""
        self._sum = self._decay * self._sum + (1 - self._decay) * value
        self._weight = self._decay * self._weight + (1 - self._decay)

    @property
    def state(self) -> tuple[float, float]:
        """What another one goes on from: the weighted sum, and the weights."""
        return self._sum, self._weight

    @state.setter
    def state(self, state: Sequence[float]) -> None:
        self._sum, self._weight = state

    @property
    def value(self) -> float | None:
        """The average; None before the first value."""
        return self._sum / self._weight if self._weight else None
