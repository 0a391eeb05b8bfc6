"""Agreement at every H-th step only: local SGD, DiLoCo, Local AdaAlter."""

from __future__ import annotations

import operator
from typing import Any

from kfcomm.train.agreement import Agreement, count_problem
from kfcomm.train.procedure import Comm, Procedure
from kfcomm.train.tree import Tree, copied, leaves, mapped, rebuilt


def direction(gradient: Any, accumulated: Any, num_local: int, epsilon: float) -> Any:
    """Quotient g / √(B² + t ε²), to be multiplied by the learning rate and subtracted.

    Args:
        gradient: g, of this rank.
        accumulated: B², averaged over the ranks at their last meeting.
        num_local: t, the steps since then, this one included.
        epsilon: ε.
    """
    return gradient / (accumulated + num_local * epsilon**2) ** 0.5


def accumulate(local: Any, gradient: Any) -> Any:
    """A² + g∘g, this rank's contribution to the next meeting."""
    return local + gradient * gradient


def pseudo_gradient(start: Any, mean: Any) -> Any:
    """Δ: the mean over the ranks of (global − local), which is global − mean(local)."""
    return start - mean


def nesterov(x: Any, velocity: Any, gradient: Any, lr: float, momentum: float) -> tuple[Any, Any]:
    """One step: v ← μv + g, x ← x − lr (g + μv), as ``torch.optim.SGD(nesterov=True)`` has it.

    With lr 0.7 and μ 0.9 a constant gradient of 1 takes 0 to −1.33, −3.227, −5.6343.

    Returns:
        The array and its velocity, both new.
    """
    faster = momentum * velocity + gradient
    return x - lr * (gradient + momentum * faster), faster


class LocalSGD(Agreement):
    """Local SGD: every rank trains by itself for H steps, then all continue with the mean of their models.

    x ← mean(x) at every H-th step: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019,
    https://arxiv.org/abs/1805.09767. A rank that is slow in some steps delays the others at the next meeting only.

    Args:
        comm: communicator of the ranks that agree.
        every: H.
        name: see `Agreement`.

    Raises:
        ConfigError: H is not a whole number, at least 1.

    Cost: an ``all_reduce`` of the model, S bytes, at every H-th step: S/H a step.
    """

    default_name = "local-sgd"

    def __init__(self, comm: Comm, every: int, *, name: str | None = None) -> None:
        self._every = every
        super().__init__(comm, name, {"every": every}, count_problem("every", every))

    def _parameters(self, tree: Tree) -> Procedure[Tree]:
        if self.num_steps % self._every:
            return tree
        return (yield from self._reduced(tree, "model"))


class DiLoCo(Agreement):
    """DiLoCo: every rank trains by itself for H steps; the mean change is a gradient for an outer optimizer.

    Δ = θ − mean(x); v ← μv + Δ; θ ← θ − lr(Δ + μv); x ← θ at every H-th step: Douillard et al., 2023,
    https://arxiv.org/abs/2311.08105; the numbers are those of its section 3.

    Args:
        comm: communicator of the ranks that agree.
        start: θ: the model at the beginning, the same on all ranks.
        every: H.
        lr: of the outer optimizer.
        momentum: μ.
        name: see `Agreement`.

    Attributes:
        model: θ.

    Raises:
        ConfigError: a number is out of its range.

    Cost: an ``all_reduce`` of the model, S bytes, at every H-th step: S/H a step; memory for two more models.
    """

    default_name = "diloco"

    def __init__(
        self, comm: Comm, start: Tree, *, every: int = 500, lr: float = 0.7, momentum: float = 0.9,
        name: str | None = None,
    ) -> None:  # fmt: skip
        self.model = copied(start)
        self._velocity = mapped(lambda x: 0 * x, start)
        self._every = every
        self._lr = lr
        self._momentum = momentum
        problem = outer_problem(every, lr, momentum)
        super().__init__(comm, name, {"every": every, "lr": lr, "momentum": momentum}, problem)

    def _parameters(self, tree: Tree) -> Procedure[Tree]:
        if self.num_steps % self._every:
            return tree
        mean = leaves((yield from self._reduced(tree, "model")))
        velocity = leaves(self._velocity)
        moved: dict[str, tuple[Any, Any]] = {}
        for one, x in leaves(self.model).items():
            moved[one] = nesterov(x, velocity[one], pseudo_gradient(x, mean[one]), self._lr, self._momentum)
        self._velocity = rebuilt(self._velocity, {one: v for one, (_, v) in moved.items()})
        self.model = rebuilt(self.model, {one: x for one, (x, _) in moved.items()})
        return rebuilt(tree, leaves(copied(self.model)))


class LocalAdaAlter(Agreement):
    """AdaGrad with local steps: models and accumulators are averaged at every H-th step.

    g ← g / √(B² + tε²); A² ← A² + g∘g; at every H-th step x ← mean(x), A², B² ← mean(A²): Xie et al., 2019,
    https://arxiv.org/abs/1911.09030. ``gradients`` returns the factor of the learning rate, without an exchange.

    Args:
        comm: communicator of the ranks that agree.
        like: a tree of arrays like the model's.
        every: H.
        epsilon: ε, above 0.
        initial: of the accumulators, at least 0; the paper has 1.
        name: see `Agreement`.

    Raises:
        ConfigError: a number is out of its range.

    Cost: an ``all_reduce`` of model and accumulators, 2S bytes, at every H-th step; memory for two more models.
    """

    default_name = "local-adaalter"

    def __init__(
        self, comm: Comm, like: Tree, every: int, *, epsilon: float = 1.0, initial: float = 1.0,
        name: str | None = None,
    ) -> None:  # fmt: skip
        self._shared = mapped(lambda x: 0 * x + initial, like)
        self._own = self._shared
        self._meanwhile: Tree | None = None
        """g∘g of gradients that came during a meeting, and are not in its mean."""
        self._every = every
        self._epsilon = epsilon
        self._num_local = 0
        problem = accumulator_problem(every, epsilon, initial)
        super().__init__(comm, name, {"every": every, "epsilon": epsilon, "initial": initial}, problem)

    def _gradients(self, tree: Tree) -> Procedure[Tree]:
        yield from ()
        self._num_local += 1
        if self._meanwhile is None:
            self._own = mapped(accumulate, self._own, tree)
        else:
            self._meanwhile = mapped(accumulate, self._meanwhile, tree)
        return mapped(lambda g, shared: direction(g, shared, self._num_local, self._epsilon), tree, self._shared)

    def _parameters(self, tree: Tree) -> Procedure[Tree]:
        if self.num_steps % self._every:
            return tree
        num_told, self._meanwhile = self._num_local, mapped(lambda x: 0 * x, self._own)
        mean = yield from self._reduced({"model": tree, "accumulators": self._own}, "model")
        self._shared = mean["accumulators"]
        self._own = mapped(operator.add, self._shared, self._meanwhile)
        self._meanwhile = None
        self._num_local -= num_told
        return mean["model"]


def outer_problem(every: Any, lr: float, momentum: float) -> str | None:
    """Fault of the numbers of DiLoCo; None without one."""
    if not lr > 0:
        return f"lr is above 0, not {lr!r}"
    if not 0 <= momentum < 1:
        return f"momentum is at least 0 and below 1, not {momentum!r}"
    return count_problem("every", every)


def accumulator_problem(every: Any, epsilon: float, initial: float) -> str | None:
    """Fault of the numbers of Local AdaAlter; None without one."""
    if not epsilon > 0:
        return f"epsilon is above 0, not {epsilon!r}"
    if not initial >= 0:
        return f"initial is at least 0, not {initial!r}"
    return count_problem("every", every)
