"""SMA first, S-SGD later, changed by all ranks at one step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from kfcomm.arrays.on_device import is_on_device
from kfcomm.train.agreement import Agreement
from kfcomm.train.procedure import Comm, Procedure, call
from kfcomm.train.rules import alpha_problem, count_problem, towards
from kfcomm.train.trees import Tree, leaves, mapped, rebuilt
from kfcomm.types import override

WISH = "/change"
"""No array of a tree has such a name, but one under an empty key."""


class AdaSGD(Agreement):
    """SMA first, S-SGD later, without a restart: noise helps in the beginning, fast convergence at the end.

    KungFu's AdaSGD (Mai et al., OSDI 2020, https://www.usenix.org/conference/osdi20/presentation/mai). It changes after
    a given number of steps, or when some rank has called ``change()``: that travels with the models, so that all ranks
    change at the next step. There all continue with the mean of the models: S-SGD begins with equal ones.

    Args:
        comm: communicator of the ranks that agree.
        alpha: of SMA.
        after: steps with SMA; None: until a rank calls ``change()``.
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
    shared_state = ("is_synchronous", "_is_agreed")
    rank_state: ClassVar = {"_wishes": "sum"}

    def __init__(self, comm: Comm, alpha: float = 0.1, *, after: int | None = None, name: str | None = None) -> None:
        self._alpha = alpha
        self._after = after
        self._wishes = 0.0
        self._is_agreed = False
        problem = alpha_problem(alpha) or (None if after is None else count_problem("after", after))
        super().__init__(comm, name, {"alpha": alpha, "after": after}, problem)
        self._set_synchronous(False)

    @override
    def restart(self, model: Tree) -> None:
        """Begin anew, with SMA. See ``Agreement.restart``."""
        super().restart(model)
        self._wishes, self._is_agreed = 0.0, False
        self._set_synchronous(False)

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; see ``Agreement.load_state_dict``."""
        super().load_state_dict(state)
        self._set_synchronous(self.is_synchronous)

    def change(self) -> None:
        """Ask for S-SGD, on any rank: all ranks change one step after the next exchange of models."""
        self._wishes = 1.0

    def _set_synchronous(self, is_synchronous: bool) -> None:
        self.is_synchronous = self.shares_gradients = is_synchronous
        self.keeps_replicas = self._turn.keeps_replicas = not is_synchronous

    @override
    def _gradients(self, tree: Tree) -> Procedure[Tree]:
        if not self.is_synchronous:
            return tree
        return (yield from self._reduced(tree, "gradients"))

    @override
    def _step_begins(self) -> None:
        # Before any wait: the gradients of this step are already averaged.
        is_due = self._is_agreed or (self._after is not None and self.num_steps >= self._after)
        self._changes = is_due and not self.is_synchronous
        if self._changes:
            self._set_synchronous(True)

    @override
    def _parameters(self, tree: Tree) -> Procedure[Tree]:
        if self._changes:
            return (yield from self._reduced(tree, "model"))
        if self.is_synchronous:
            return tree
        # With the models: all ranks learn of a wish at the same step, without a message of its own.
        wish: Any = np.array([self._wishes], np.float32)
        own = leaves(tree)
        is_far = any(map(is_on_device, own.values()))
        found = yield call("all_reduce_many", own if is_far else {**own, WISH: wish}, f"{self.name}/model", op="avg")
        # A batch is all in host memory or all on a device.
        wishes = (yield call("all_reduce", wish, f"{self.name}/wish", op="max")) if is_far else found[WISH]
        self._is_agreed = bool(wishes[0] > 0)
        return mapped(lambda x, mean: towards(x, mean, self._alpha), tree, rebuilt(tree, found))
