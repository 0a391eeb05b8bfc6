"""Agreement by averages over all ranks: of gradients, of models, at every step or at every H-th one.

The formulas are *rules*: arrays in, arrays out, of any library and also while JAX compiles, one array of a model at a
time. The classes below carry them over a communicator; ``kfcomm.jax.optimizers`` maps them over a pytree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kfcomm.adapt.guarded import GUARD, StepGuard
from kfcomm.arrays.reduce import wire_dtype_of
from kfcomm.errors import ConfigError
from kfcomm.train.agreement import Agreement
from kfcomm.train.gradient_monitor import SUMS, GradientMonitor
from kfcomm.train.procedure import Comm, Pending, Procedure, call, is_elastic
from kfcomm.train.rules import (
    Mean,
    MoveToCenter,
    MoveToMean,
    OuterStep,
    Rule,
    lowered_alpha,
    op_problem,
)
from kfcomm.train.trees import Tree, copied, leaves, mapped, rebuilt
from kfcomm.types import override

if TYPE_CHECKING:
    from collections.abc import Mapping


class SynchronousSGD(Agreement):
    """Synchronous SGD: every rank continues with the mean of all gradients, as one process with one large batch.

    g ← Σ g_i / n. Models that are equal stay equal; a step is as slow as the slowest rank.

    Args:
        comm: communicator of the ranks that agree.
        op: how gradients are combined: ``avg``, or ``adasum`` (see ``all_reduce``).
        monitor: learns from the gradients, all ranks' (with the same ``every``) or none's; with ``avg`` only.
        name: see `Agreement`.
        wire_dtype: of gradients on their way, see ``all_reduce``; with ``avg`` only, without a monitor or a guard.

    Raises:
        ConfigError: ``op`` is another, or does not go with the other arguments.

    Cost: an ``all_reduce`` of the gradients, S bytes, at each step; with a monitor 28 n more (float64: 56 n).
    """

    default_name = "ssgd"
    shares_gradients = True
    shared_state = ("_monitor",)

    def __init__(
        self, comm: Comm, *, op: str = "avg", monitor: GradientMonitor | None = None, name: str | None = None,
        wire_dtype: str | None = None,
    ) -> None:  # fmt: skip
        problem = op_problem(op)
        if monitor is not None and op != "avg":
            problem = "a monitor learns from gradients that are averaged, by op='avg'"
        if wire_dtype is not None:
            problem = problem or _wire_problem(wire_dtype, op, monitor)
        self._op = op
        self._wire_dtype = wire_dtype
        self._monitor = monitor
        self._guard: StepGuard | None = None  # of the exchange that begins
        every = None if monitor is None else monitor.every
        super().__init__(comm, name, {"op": op, "monitored_every": every, "wire_dtype": wire_dtype}, problem)

    def guarded(self, tree: Tree, guard: StepGuard) -> Pending[Tree]:
        """Exchange gradients as ``gradients`` does, with the rows of a guard, which judges them; for ``Step.guarded``.

        Raises:
            StepVoid: from waiting, on all ranks: the step is void; the monitor learns nothing from it.
            GuardFailed: see ``GuardSteps``.
            ConfigError: with a ``wire_dtype``, which would round what the guard judges by.
        """
        if self._wire_dtype is not None:
            raise ConfigError(f"guarded gradients are not rounded: leave out wire_dtype={self._wire_dtype!r}")
        self._guard = guard
        return self.gradients(tree)

    def _gradients(self, tree: Tree) -> Procedure[Tree]:
        monitor, own, guard = self._monitor, leaves(tree), self._guard
        self._guard = None
        given = dict(own)
        if monitor is not None:
            given[SUMS] = monitor.sums(own)
        if guard is not None:
            given[GUARD] = guard.row(own)
        key, wire_dtype = f"{self.name}/gradients", self._wire_dtype
        found = yield call("all_reduce_many", given, key, op=self._op, wire_dtype=wire_dtype)
        sums = found.pop(SUMS, None)
        if guard is not None:
            guard.judge(found.pop(GUARD), found)
        if monitor is not None:
            monitor.update(sums, found)
        return rebuilt(tree, found)


def _wire_problem(wire_dtype: str, op: str, monitor: GradientMonitor | None) -> str | None:
    """Fault of a ``wire_dtype``; None without one."""
    try:
        wire_dtype_of(wire_dtype, np.dtype(np.float32))
    except ConfigError as error:
        return str(error)
    if op != "avg" or monitor is not None:
        return f"wire_dtype={wire_dtype!r} goes with op='avg', without a monitor"
    return None


# ---------------------------------------------------------------- models


class ModelAgreement(Agreement):
    """Agreement on models, by a rule, which keeps the trees of ``shared_state``; gradients stay a rank's own."""

    def __init__(self, comm: Comm, name: str | None, rule: Rule, numbers: Mapping[str, Any] | None = None) -> None:
        self._rule = rule
        super().__init__(comm, name, rule.numbers if numbers is None else numbers, rule.problem)

    def _parameters(self, tree: Tree) -> Procedure[Tree]:
        if self.num_steps % self._rule.every:
            return tree
        mean = leaves((yield from self._reduced(tree, "model")))
        rule = self._rule.among(self._num_met)
        kept = [leaves(getattr(self, one)) for one in self.shared_state]
        met = {one: rule.meet(x, mean[one], *(tree[one] for tree in kept)) for one, x in leaves(tree).items()}
        for place, one in enumerate(self.shared_state, 1):
            setattr(self, one, rebuilt(getattr(self, one), {name: arrays[place] for name, arrays in met.items()}))
        return rebuilt(tree, {name: arrays[0] for name, arrays in met.items()})


class SMA(ModelAgreement):
    """Synchronous model averaging: every rank trains its own model, which is moved towards the mean of all.

    x ← x − lr·g − α(x − mean(x)), Crossbow (Koliousis et al., VLDB 2019, https://arxiv.org/abs/1901.02244), as KungFu's
    ``SynchronousAveragingOptimizer`` has it. It keeps the noise of small batches, where S-SGD with many ranks has too
    little of it; the models stay near each other, and their mean is what is used in the end.

    Args:
        comm: communicator of the ranks that agree.
        alpha: α, above 0 and at most 1; with 1 all continue with the mean.
        name: see `Agreement`.

    Raises:
        ConfigError: α is out of its range.

    Cost: an ``all_reduce`` of the model, S bytes, at each step; it can be under way while the gradient is computed.
    """

    default_name = "sma"

    def __init__(self, comm: Comm, alpha: float = 0.1, *, name: str | None = None) -> None:
        super().__init__(comm, name, MoveToMean(alpha))


BETA = 0.9
"""n·α of elastic averaging, where α is not given."""


class ElasticAveraging(ModelAgreement):
    """EA-SGD: every rank's model and a center are moved towards each other; the center is the result.

    x_i ← x_i − α(x_i − z), z ← z + αΣ(x_i − z): Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD",
    NeurIPS 2015, https://arxiv.org/abs/1412.6651, equations 3 and 4. Every rank keeps the center, the same bits on all,
    so no server does.

    Args:
        comm: communicator of the ranks that agree.
        center: z at the beginning: a model, the same on all ranks.
        alpha: α, above 0 and at most 1/n: the center is drawn by all n ranks. In an elastic job it is lowered to 1/n
            while that is less. None: 0.9/n, the paper's choice (section 5), for any n.
        every: steps from one exchange to the next.
        name: see `Agreement`.

    Attributes:
        center: z.

    Raises:
        ConfigError: a number is out of its range.

    Cost: an ``all_reduce`` of the model, S bytes, at every ``every``-th step; memory for one more model.
    """

    default_name = "ea-sgd"
    takes_model = True
    shared_state = ("center",)

    def __init__(
        self, comm: Comm, center: Tree, alpha: float | None = None, *, every: int = 1, name: str | None = None
    ) -> None:
        self._alpha, self._every = alpha, every
        self._start_from(center)
        super().__init__(comm, name, self._rule_for(comm), {"alpha": alpha, "every": every})

    @override
    def _start_from(self, model: Tree) -> None:
        self.center = copied(model)

    @override
    def _ranks_changed(self, tree: Tree) -> None:
        self._rule = self._rule_for(self.comm)

    def _rule_for(self, comm: Comm) -> MoveToCenter:
        alpha = BETA / comm.size if self._alpha is None else self._alpha
        if is_elastic(comm):
            alpha = lowered_alpha(alpha, comm.size)
        return MoveToCenter(alpha, self._every, comm.size)


class LocalSGD(ModelAgreement):
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
        super().__init__(comm, name, Mean(every))


class DiLoCo(ModelAgreement):
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
    takes_model = True
    shared_state = ("model", "_velocity")

    def __init__(
        self, comm: Comm, start: Tree, *, every: int = 500, lr: float = 0.7, momentum: float = 0.9,
        name: str | None = None,
    ) -> None:  # fmt: skip
        self._start_from(start)
        super().__init__(comm, name, OuterStep(every, lr, momentum))

    @override
    def _start_from(self, model: Tree) -> None:
        self.model = copied(model)
        self._velocity = mapped(lambda x: 0 * x, model)
