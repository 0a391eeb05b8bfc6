"""AdaGrad with local steps: models and accumulators are averaged at every H-th step."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, ClassVar

from kfcomm.errors import ConfigError
from kfcomm.train.agreement import Agreement
from kfcomm.train.procedure import Comm, Procedure
from kfcomm.train.rules import Accumulators, accumulate
from kfcomm.train.trees import Tree, leaves, mapped, rebuilt
from kfcomm.types import override


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
    takes_model = True
    shared_state = ("_shared", "_num_local")
    rank_state: ClassVar = {"_own": "mean"}

    def __init__(
        self, comm: Comm, like: Tree, every: int, *, epsilon: float = 1.0, initial: float = 1.0,
        name: str | None = None,
    ) -> None:  # fmt: skip
        self._rule = rule = Accumulators(every, epsilon, initial)
        self._accumulate_from(like)
        super().__init__(comm, name, rule.numbers, rule.problem)

    def _accumulate_from(self, like: Tree) -> None:
        self._own = self._shared = mapped(self._rule.start, like)
        # g∘g of gradients that come while a meeting is under way: they are not in its mean, and are added to it.
        self._meanwhile: Tree | None = None
        self._num_local = self._num_told = 0
        self._along: Tree | None = None

    @override
    def restart(self, model: Tree) -> None:
        """Begin anew: accumulators too. See ``Agreement.restart``."""
        super().restart(model)
        self._accumulate_from(model)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state by name; while the ranks meet, as if this meeting had failed. See ``Agreement``."""
        return super().state_dict() | {"own": self._all_own()}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; see ``Agreement.load_state_dict``."""
        super().load_state_dict(state)
        self._meanwhile = None

    def _all_own(self) -> Tree:
        return self._own if self._meanwhile is None else mapped(operator.add, self._own, self._meanwhile)

    @override
    def _introduce_gradients(self, tree: Tree) -> Procedure[None]:
        # Before the wait: else a meeting that is under way too might end first, or not.
        self._along = self._taken(tree)
        try:
            yield from super()._introduce_gradients(tree)
        except BaseException:
            self._along = None
            raise

    @override
    def _gradients(self, tree: Tree) -> Procedure[Tree]:
        yield from ()
        along, self._along = self._along, None
        return self._taken(tree) if along is None else along

    def _taken(self, gradients: Tree) -> Tree:
        """Add gradients to the accumulators; returns the factors of the learning rate."""
        self._num_local += 1
        if self._meanwhile is None:
            self._own = self._accumulated(self._own, gradients)
        else:
            self._meanwhile = self._accumulated(self._meanwhile, gradients)
        shared = leaves(self._shared)
        found = {one: self._rule.direction(g, shared[one], self._num_local) for one, g in leaves(gradients).items()}
        return rebuilt(gradients, found)

    def _accumulated(self, accumulators: Tree, gradients: Tree) -> Tree:
        # Parameters without a gradient in this step, as torch has them, count as zero.
        found = leaves(accumulators)
        unknown = leaves(gradients).keys() - found.keys()
        if unknown:
            raise ConfigError(f"the model has no arrays for the gradients {', '.join(sorted(unknown)[:4])}")
        return rebuilt(accumulators, found | {one: accumulate(found[one], g) for one, g in leaves(gradients).items()})

    @override
    def _step_begins(self) -> None:
        self._own, self._meanwhile = self._all_own(), None
        if (self.num_steps + 1) % self._rule.every == 0:
            self._prepare_meeting()

    def _prepare_meeting(self) -> None:
        self._meanwhile, self._num_told = mapped(lambda x: 0 * x, self._own), self._num_local

    @override
    def _parameters(self, tree: Tree) -> Procedure[Tree]:
        if self.num_steps % self._rule.every:
            return tree
        if self._meanwhile is None:  # a rank that has just taken over a state did not know of the meeting
            self._prepare_meeting()
        mean = yield from self._reduced({"model": tree, "accumulators": self._own}, "model")
        self._shared = mean["accumulators"]
        self._own = mapped(operator.add, self._shared, self._meanwhile)
        self._meanwhile = None
        self._num_local -= self._num_told
        return mean["model"]
