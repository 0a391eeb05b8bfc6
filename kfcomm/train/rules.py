"""Rules of agreement: arrays in, arrays out, one array of a model at a time. Pure.

The arrays are of any library, and may be those that JAX compiles. ``kfcomm.train`` carries the rules over a
communicator; ``kfcomm.jax.optimizers`` maps them over a pytree.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from kfcomm.types import override


def towards(x: Any, mean: Any, alpha: float) -> Any:
    """Move a rank's model towards the mean of all: x − α(x − mean)."""
    # AD-PSGD's with α = 1/2 and another model in place of the mean. In place, on one temporary of the model's size.
    moved = mean - x
    moved *= alpha
    moved += x
    return moved


class Rule:
    """Numbers of an algorithm, and its update of one array when the ranks meet. Subclasses are dataclasses."""

    every: int
    """Steps from one meeting to the next."""
    num_kept: ClassVar[int] = 0
    """Arrays kept between meetings for each array of the model."""

    @property
    def problem(self) -> str | None:
        """Fault of the numbers; None without one."""
        return count_problem("every", self.every)

    @property
    def numbers(self) -> dict[str, Any]:
        """The numbers that ranks compare."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.repr}  # type: ignore[arg-type]

    def among(self, size: int) -> Rule:
        """Return the rule of a meeting that has this number of ranks: fewer than usual where one is lost in it."""
        return self

    def meet(self, x: Any, mean: Any, *kept: Any) -> tuple[Any, ...]:
        """Return the array to continue with, and the arrays kept until the next meeting."""
        return (mean,)


@dataclass(frozen=True)
class MoveToMean(Rule):
    """x ← x − α(x − mean(x))."""

    alpha: float
    every: int = field(default=1, init=False, repr=False)

    @property
    @override
    def problem(self) -> str | None:
        return alpha_problem(self.alpha)

    @override
    def meet(self, x: Any, mean: Any, *kept: Any) -> tuple[Any, ...]:
        return (towards(x, mean, self.alpha),)


@dataclass(frozen=True)
class MoveToCenter(Rule):
    """x ← x − α(x − z) and z ← z + αΣ(x_i − z), both from the old ones; keeps z, the same bits on every rank."""

    num_kept: ClassVar[int] = 1
    alpha: float
    every: int
    size: int = field(repr=False)

    @property
    @override
    def problem(self) -> str | None:
        return alpha_problem(self.alpha, 1 / self.size) or super().problem  # all n ranks draw the center

    @override
    def among(self, size: int) -> Rule:
        return replace(self, size=size)

    @override
    def meet(self, x: Any, mean: Any, *kept: Any) -> tuple[Any, ...]:
        (center,) = kept
        # The sum is n(mean − z), so that only the mean travels.
        return towards(x, center, self.alpha), towards(center, mean, self.alpha * self.size)


@dataclass(frozen=True)
class Mean(Rule):
    """x ← mean(x) at every H-th step."""

    every: int


@dataclass(frozen=True)
class OuterStep(Rule):
    """Δ = θ − mean(x); v ← μv + Δ; θ ← θ − lr(Δ + μv); x ← θ at every H-th step; keeps θ and v."""

    num_kept: ClassVar[int] = 2
    every: int
    lr: float
    momentum: float

    @property
    @override
    def problem(self) -> str | None:
        if not self.lr > 0:
            return f"lr is above 0, not {self.lr!r}"
        if not 0 <= self.momentum < 1:
            return f"momentum is at least 0 and below 1, not {self.momentum!r}"
        return super().problem

    @override
    def meet(self, x: Any, mean: Any, *kept: Any) -> tuple[Any, ...]:
        model, velocity = kept
        change = model - mean
        # As ``torch.optim.SGD(nesterov=True)``: with lr 0.7 and μ 0.9 a constant Δ of 1 takes 0 to −1.33, −3.227.
        faster = self.momentum * velocity + change
        moved = model - self.lr * (change + self.momentum * faster)
        # A copy for the program, which updates its model in place; θ must not follow.
        return 1 * moved, moved, faster


@dataclass(frozen=True)
class Accumulators(Rule):
    """g ← g / √(B² + tε²); A² ← A² + g∘g; at every H-th step x ← mean(x), A², B² ← mean(A²)."""

    every: int
    epsilon: float
    initial: float

    @property
    @override
    def problem(self) -> str | None:
        if not self.epsilon > 0:
            return f"epsilon is above 0, not {self.epsilon!r}"
        if not self.initial >= 0:
            return f"initial is at least 0, not {self.initial!r}"
        return super().problem

    def start(self, x: Any) -> Any:
        """A² and B² at the beginning, of an array like ``x``."""
        return 0 * x + self.initial

    def direction(self, gradient: Any, shared: Any, num_local: Any) -> Any:
        """The factor of the learning rate, from B² and t, the steps since the last meeting with this one."""
        return gradient / (shared + num_local * self.epsilon**2) ** 0.5


def accumulate(own: Any, gradient: Any) -> Any:
    """A² + g∘g, this rank's contribution to the next meeting."""
    return own + gradient * gradient


# ---------------------------------------------------------------- faults of numbers


def alpha_problem(alpha: Any, most: float = 1.0) -> str | None:
    """Fault of a coefficient of averaging; None without one."""
    is_number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
    return None if is_number and 0 < alpha <= most else f"alpha is above 0 and at most {most:g}, not {alpha!r}"


def lowered_alpha(alpha: Any, size: int) -> Any:
    """Coefficient of elastic averaging for this number of ranks, as far as one that was given for another is valid."""
    # A rank that joins an elastic job is given the number that was valid for fewer ranks.
    return alpha if alpha_problem(alpha) else min(alpha, 1 / size)


def count_problem(what: str, value: Any) -> str | None:
    """Fault of a number of steps; None without one."""
    return None if type(value) is int and value >= 1 else f"{what} is a whole number, at least 1, not {value!r}"


def op_problem(op: str) -> str | None:
    """Fault of the op of synchronous SGD; None without one."""
    return None if op in ("avg", "adasum") else f"op is 'avg' or 'adasum', not {op!r}"
