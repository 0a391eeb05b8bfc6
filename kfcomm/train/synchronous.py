"""Agreement at every step: synchronous SGD, model averaging, elastic averaging, and the change between two of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from kfcomm.train.agreement import Agreement, alpha_problem, count_problem
from kfcomm.train.monitor import SUMS, GradientMonitor
from kfcomm.train.procedure import Comm, Procedure, call
from kfcomm.train.tree import Tree, copied, leaves, mapped, rebuilt


def towards(x: Any, mean: Any, alpha: float) -> Any:
    """Move a rank's model towards the mean of all: x − α(x − mean).

    Crossbow's synchronous model averaging (Koliousis et al., VLDB 2019, https://arxiv.org/abs/1901.02244), as KungFu
    has it: [1, 3, 5, 7] with α = 0.1 becomes [1.3, 3.1, 4.9, 6.7]. With α = 1 it is the mean; with 1/2, and another
    model in place of the mean, AD-PSGD's.
    """
    moved = mean - x
    moved *= alpha
    moved += x
    return moved


def elastic(x: Any, center: Any, mean: Any, alpha: float, size: int) -> tuple[Any, Any]:
    """Move a rank's model and the center towards each other: x − α(x − z) and z + αΣ(x_i − z).

    Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD", NeurIPS 2015,
    https://arxiv.org/abs/1412.6651, equations 3 and 4. The sum is n(mean − z), so that only the mean travels, and
    every rank keeps the same center.

    Args:
        x: a rank's array.
        center: z.
        mean: of all ranks' arrays.
        alpha: α.
        size: n.

    Returns:
        The rank's array and the center, both from the old ones.
    """
    return towards(x, center, alpha), towards(center, mean, alpha * size)


WISH = "/change"
"""No array of a tree has such a name, but one under an empty key."""


class SynchronousSGD(Agreement):
    """Synchronous SGD: every rank continues with the mean of all gradients, as one process with one large batch.

    g ← Σ g_i / n. Models that are equal stay equal; a step is as slow as the slowest rank.

    Args:
        comm: communicator of the ranks that agree.
        op: how gradients are combined: ``avg``, or ``adasum`` (see ``all_reduce``).
        monitor: learns from the gradients, all ranks' (with the same ``every``) or none's; with ``avg`` only.
        name: see `Agreement`.

    Raises:
        ConfigError: ``op`` is another, or ``adasum`` is to be monitored.

    Cost: an ``all_reduce`` of the gradients, S bytes, at each step; with a monitor 12 more.
    """

    default_name = "ssgd"
    shares_gradients = True

    def __init__(
        self, comm: Comm, *, op: str = "avg", monitor: GradientMonitor | None = None, name: str | None = None
    ) -> None:
        problem = None if op in ("avg", "adasum") else f"op is 'avg' or 'adasum', not {op!r}"
        if monitor is not None and op != "avg":
            problem = "a monitor learns from gradients that are averaged, by op='avg'"
        self._op = op
        self._monitor = monitor
        every = None if monitor is None else monitor.every
        super().__init__(comm, name, {"op": op, "monitored_every": every}, problem)

    def _gradients(self, tree: Tree) -> Procedure[Tree]:
        monitor, given = self._monitor, leaves(tree)
        if monitor is not None:
            given[SUMS] = monitor.sums(given)
        found = yield call("all_reduce_many", given, f"{self.name}/gradients", op=self._op)
        if monitor is not None:
            monitor.update(found.pop(SUMS), found)
        return rebuilt(tree, found)


class SMA(Agreement):
    """Synchronous model averaging: every rank trains its own model, which is moved towards the mean of all.

    x ← x − lr·g − α(x − mean(x)), Crossbow (Koliousis et al., VLDB 2019, https://arxiv.org/abs/1901.02244), as KungFu's
    ``SynchronousAveragingOptimizer`` has it. It keeps the noise of small batches, where S-SGD with many ranks has too
    little of it; the models stay near each other, and their mean is what is used in the end.

    Args:
        comm: communicator of the ranks that agree.
        alpha: α, above 0 and at most 1; with 1 all go on with the mean.
        name: see `Agreement`.

    Raises:
        ConfigError: α is out of its range.

    Cost: an ``all_reduce`` of the model, S bytes, at each step; it can be under way while the gradient is computed.
    """

    default_name = "sma"

    def __init__(self, comm: Comm, alpha: float = 0.1, *, name: str | None = None) -> None:
        self._alpha = alpha
        super().__init__(comm, name, {"alpha": alpha}, alpha_problem(alpha))

    def _parameters(self, tree: Tree) -> Procedure[Tree]:
        mean = yield from self._reduced(tree, "model")
        return mapped(lambda x, all_: towards(x, all_, self._alpha), tree, mean)


class ElasticAveraging(Agreement):
    """EA-SGD: every rank's model and a center are moved towards each other; the center is the result.

    x_i ← x_i − α(x_i − z), z ← z + αΣ(x_i − z): Zhang et al., NeurIPS 2015, https://arxiv.org/abs/1412.6651. Every rank
    keeps the center, the same bits on all, so no server does.

    Args:
        comm: communicator of the ranks that agree.
        center: z at the beginning: a model, the same on all ranks.
        alpha: α, above 0 and at most 1/n: the center is drawn by all n ranks.
        every: steps from one exchange to the next.
        name: see `Agreement`.

    Attributes:
        center: z.

    Raises:
        ConfigError: a number is out of its range.

    Cost: an ``all_reduce`` of the model, S bytes, at every ``every``-th step; memory for one more model.
    """

    default_name = "ea-sgd"

    def __init__(self, comm: Comm, center: Tree, alpha: float, *, every: int = 1, name: str | None = None) -> None:
        self.center = copied(center)
        self._alpha = alpha
        self._every = every
        problem = alpha_problem(alpha, 1 / comm.size) or count_problem("every", every)
        super().__init__(comm, name, {"alpha": alpha, "every": every}, problem)

    def _parameters(self, tree: Tree) -> Procedure[Tree]:
        if self.num_steps % self._every:
            return tree
        mean = leaves((yield from self._reduced(tree, "model")))
        center = leaves(self.center)
        moved = {
            one: elastic(x, center[one], mean[one], self._alpha, self.comm.size) for one, x in leaves(tree).items()
        }
        self.center = rebuilt(self.center, {one: z for one, (_, z) in moved.items()})
        return rebuilt(tree, {one: x for one, (x, _) in moved.items()})


class AdaSGD(Agreement):
    """SMA first, S-SGD later, without a restart: noise helps in the beginning, fast convergence at the end.

    KungFu's AdaSGD (Mai et al., OSDI 2020, https://www.usenix.org/conference/osdi20/presentation/mai). It changes after
    a given number of steps, or when some rank has said ``change()``: that travels with the models, so that all ranks
    change at the next step. There all go on with the mean of the models: S-SGD begins with equal ones.

    Args:
        comm: communicator of the ranks that agree.
        alpha: of SMA.
        after: steps with SMA; None: until a rank says ``change()``.
        name: see `Agreement`.

    Attributes:
        is_synchronous: whether S-SGD has begun.

    Raises:
        ConfigError: a number is out of its range.

    Cost:
        An ``all_reduce`` of S bytes at each step: of the model and one number before the change, of the gradients after
        it.
    """

    default_name = "adasgd"

    def __init__(self, comm: Comm, alpha: float = 0.1, *, after: int | None = None, name: str | None = None) -> None:
        self.is_synchronous = False
        self._alpha = alpha
        self._after = after
        self._wants_change = False
        self._is_agreed = False
        problem = alpha_problem(alpha) or (None if after is None else count_problem("after", after))
        super().__init__(comm, name, {"alpha": alpha, "after": after}, problem)

    def change(self) -> None:
        """Ask for S-SGD, on any rank: all ranks change one step after the next exchange of models."""
        self._wants_change = True

    def _gradients(self, tree: Tree) -> Procedure[Tree]:
        if not self.is_synchronous:
            return tree
        return (yield from self._reduced(tree, "gradients"))

    def _parameters(self, tree: Tree) -> Procedure[Tree]:
        if self.is_synchronous:
            return tree
        if self._is_agreed or (self._after is not None and self.num_steps > self._after):
            # before anything is waited for: the gradients of this step are everybody's
            self.is_synchronous = self.shares_gradients = True
            return (yield from self._reduced(tree, "model"))
        wish: Any = np.array([self._wants_change], np.float32)
        found = yield call("all_reduce_many", {**leaves(tree), WISH: wish}, f"{self.name}/model", op="avg")
        self._is_agreed = bool(found[WISH][0] > 0)
        return mapped(lambda x, mean: towards(x, mean, self._alpha), tree, rebuilt(tree, found))
