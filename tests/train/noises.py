"""Norms of random gradients whose noise scale is known, drawn without the gradients. Seeds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Gradients:
    """Gradients of a sample: normal, around one of the squared norm ``signal``, with the covariance c·I.

    Attributes:
        signal: |G|².
        noise: tr(Σ).
        dimension: of the gradient.
    """

    signal: float
    noise: float
    dimension: int = 1000

    @property
    def scale(self) -> float:
        """Noise scale, in samples."""
        return self.noise / self.signal

    def draw(
        self, random: np.random.Generator, batch: float, ranks: int, shape: tuple[int, ...]
    ) -> tuple[Array, Array]:
        """The means over the ranks of |g_i|², and |ḡ|², of so many steps with ``batch`` samples of all ranks."""
        of_mean = self.noise / self.dimension / batch  # variance of an element of the mean gradient
        along = self.signal**0.5 + of_mean**0.5 * random.standard_normal(shape)
        across = of_mean * random.chisquare(self.dimension - 1, shape)
        spread = of_mean * random.chisquare((ranks - 1) * self.dimension, shape)  # Σ|g_i − ḡ|² / n
        mean = along**2 + across
        return mean + spread, mean
