"""What the ranks' gradients tell, from two norms that all of them share; the same numbers on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kfcomm.adapt.metrics import StepMetrics
from kfcomm.train.averages import MovingAverage
from kfcomm.train.noise_scale import DECAY, noise_estimate

LOCAL_NORM, GRADIENT_NORM = "local_norm", "gradient_norm"
"""The names under which a program observes |g_i| of each rank's gradient, and |ḡ| of their mean."""


class GradientNoise:
    """Moving averages of |G|² and tr(Σ), by the norms of each step; see ``kfcomm.train.NoiseScale``.

    The batch may change from step to step. A step of which a norm is not known, or not finite, or of one rank alone,
    counts for nothing.

    Args:
        decay: of the averages.

    Attributes:
        num_updates: steps that count.
    """

    def __init__(self, decay: float = DECAY) -> None:
        self._signal = MovingAverage(decay)
        self._noise = MovingAverage(decay)
        self.num_updates = 0

    def update(self, metrics: StepMetrics) -> None:
        """Take one step's norms."""
        batch, size = metrics.hyperparameters.batch_size, metrics.size
        local_sq_norm, global_sq_norm = norms(metrics)
        if batch is None or size < 2 or not math.isfinite(local_sq_norm + global_sq_norm):
            return
        found = noise_estimate(local_sq_norm, global_sq_norm, batch / size, batch)
        self._signal.update(found.signal)
        self._noise.update(found.noise)
        self.num_updates += 1

    @property
    def signal(self) -> float | None:
        """|G|²; None while it is unknown, or came out negative."""
        value = self._signal.value
        return None if value is None or value <= 0 else value

    @property
    def noise(self) -> float | None:
        """tr(Σ), at least 0; None before the first step."""
        value = self._noise.value
        return None if value is None else max(value, 0.0)

    @property
    def scale(self) -> float | None:
        """The noise scale in samples; None while it is unknown."""
        signal, noise = self.signal, self.noise
        return None if signal is None or noise is None else noise / signal

    @property
    def evidence(self) -> dict[str, Any]:
        """For the log."""
        return {"noise_scale": self.scale, "signal": self.signal, "noise": self.noise}

    def state(self) -> list[Any]:
        """For ranks that join."""
        return [self.num_updates, *self._signal.state, *self._noise.state]

    def load(self, state: Sequence[Any]) -> None:
        """Go on from there."""
        self.num_updates = state[0]
        self._signal.state, self._noise.state = state[1:3], state[3:5]


def norms(metrics: StepMetrics) -> tuple[float, float]:
    """The mean over the ranks of |g_i|², and |ḡ|²; nan where they were not observed."""
    local = metrics.observed.get(LOCAL_NORM, (math.nan,))
    return sum(norm * norm for norm in local) / len(local), metrics.mean(GRADIENT_NORM) ** 2
