"""Learning rates that follow the batch, beside whatever else changes the rate."""

from __future__ import annotations

import math
from typing import Any

from kfcomm.adapt.policy import Context
from kfcomm.errors import ConfigError
from kfcomm.train.gradient_statistics import gain
from kfcomm.train.policies.measured import GradientNoise

AUTO, ADASCALE, SQRT, LINEAR = RULES = ("auto", "adascale", "sqrt", "linear")
NORMED_BY = ("ada", "lamb", "rms", "lion", "novograd", "sophia")
"""Parts of the names of optimizers that divide by the gradient's size: noise, not the batch, sets their step."""


def checked_rule(rule: Any) -> str | None:
    """Return the name of a rule, or None for a rate that stays; raise for another one."""
    if rule is None or rule in RULES:
        return rule  # type: ignore[no-any-return]
    raise ConfigError(f"rate is one of {', '.join(RULES)}, or None for a learning rate that stays, not {rule!r}")


def rule_for(optimizer: str | None) -> str:
    """Rule for an optimizer by the name of its class: the square root for Adam and the like, else AdaScale's gain.

    Source: Malladi, Lyu, Panigrahi, Arora, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", NeurIPS
    2022, https://arxiv.org/abs/2205.10287.
    """
    is_normed = optimizer is not None and any(part in optimizer.lower() for part in NORMED_BY)
    return SQRT if is_normed else ADASCALE


def factor(rule: str, gradients: GradientNoise, first: float, batch: float) -> float | None:
    """Factor of the learning rate of ``batch`` beside that of the first batch; None while it is unknown."""
    scale = batch / first
    if rule == LINEAR:
        return scale
    if rule == SQRT:
        return math.sqrt(scale)
    if batch == first:
        return 1.0
    signal, noise = gradients.signal, gradients.noise
    return None if signal is None or noise is None else gain(noise / first, signal, scale)


class BatchRate:
    """Learning rate of the first batch, times the factor of the present one.

    When another policy has set the rate, that is the rate for the present batch from then on.

    Args:
        rule: name of a rule.
        tolerance: part of the rate by which it may be off.
    """

    def __init__(self, rule: str, tolerance: float, ctx: Context) -> None:
        self._rule = rule
        self._tolerance = tolerance
        self._first = ctx.hyperparameters.batch_size
        self._base = self._known = self._asked = ctx.hyperparameters.learning_rate

    def follow(self, ctx: Context, gradients: GradientNoise, batch: int) -> None:
        """Ask for the rate of ``batch``, which is the present or a requested one, if the rate in force is off."""
        now = ctx.hyperparameters.learning_rate
        if now is None or self._first is None or self._base is None:
            return
        present = factor(self._rule, gradients, self._first, ctx.hyperparameters.batch_size or self._first)
        wanted = factor(self._rule, gradients, self._first, batch)
        if present is None or wanted is None:
            return
        if now not in (self._known, self._asked):
            self._base = now / present
        self._known = self._asked = now
        rate = self._base * wanted
        if abs(rate - now) > self._tolerance * max(rate, now):
            self._asked = ctx.hyperparameters.checked("learning_rate", rate, ctx.size)
            ctx.set_learning_rate(rate, factor=wanted, of_batch=batch, **gradients.evidence)

    @property
    def state(self) -> list[Any]:
        """State for joining ranks."""
        return [self._first, self._base, self._known, self._asked]

    @state.setter
    def state(self, state: list[Any]) -> None:
        self._first, self._base, self._known, self._asked = state
