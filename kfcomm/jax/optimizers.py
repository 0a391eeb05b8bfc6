"""Distributed training algorithms as gradient transformations like those of optax, which is not needed.

::

    optimizer = optax.chain(optax.clip(1.0), kfcomm.jax.optimizers.synchronous_sgd(comm), optax.adam(1e-3))
    optimizer = optax.chain(optax.sgd(0.1), kfcomm.jax.optimizers.sma(comm, alpha=0.1))

Those that exchange gradients come before an optimizer; those that exchange models come after it, and need ``params``;
``adasgd`` and ``local_adaalter`` do both, and take the optimizer. All state is in the transformation's state, a pytree
that is saved and compiled with the rest. ``update`` works on arrays and inside ``jit``, see ``kfcomm.jax.all_reduce``.
The formulas are the rules of ``kfcomm.train``, mapped over the leaves of pytrees; the steps around them are pure
functions of the state here, since ``jit`` needs that.

In an elastic job ``init`` exchanges nothing, since a rank that joins must not wait for others. The ranks compare their
algorithms in the first ``update`` with the same ranks, and what depends on their number follows it, also inside
``jit``. Where ranks keep replicas, ``params`` and the transformation's state differ between them:
``State(params=PerRank(params, "mean"), optimizer=PerRank(state, "mean"))``.

Invariant: all ranks call ``init``, which compares their algorithms and their ``params`` where ranks cannot change; a
difference is an error on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import jax
import numpy as np
from jax import numpy as jnp

from kfcomm.errors import ConfigError
from kfcomm.jax.collectives import called
from kfcomm.jax.compared import ComparedAlgorithm
from kfcomm.train.asynchronous import PairAveraging, pairs_problem
from kfcomm.train.procedure import is_elastic
from kfcomm.train.rules import (
    Accumulators,
    Mean,
    MoveToCenter,
    MoveToMean,
    OuterStep,
    Rule,
    accumulate,
    alpha_problem,
    count_problem,
    lowered_alpha,
    op_problem,
    towards,
)
from kfcomm.train.training import Training

Tree: TypeAlias = Any
T = TypeVar("T")

NAME = "optimizer"


class Transformation(NamedTuple):
    """A pair of functions, as optax's ``GradientTransformation`` is.

    Attributes:
        init: ``init(params)`` gives the first state.
        update: ``update(updates, state, params)`` gives the new updates and the next state.
    """

    init: Callable[[Tree], Any]
    update: Callable[..., tuple[Tree, Any]]


class Optimizer(Protocol):
    """Object with these two functions, such as an optimizer of optax."""

    init: Callable[[Tree], Any]
    update: Callable[..., tuple[Tree, Any]]


class NoState(NamedTuple):
    """Empty state."""


class Elastic(NamedTuple):
    """State of elastic averaging."""

    count: Any  # steps so far
    center: Tree  # z


class Outer(NamedTuple):
    """State of DiLoCo."""

    count: Any  # steps so far
    model: Tree  # θ
    velocity: Tree  # v


class Accumulated(NamedTuple):
    """State of Local AdaAlter."""

    count: Any  # steps so far
    shared: Tree  # B²
    own: Tree  # A²
    inner: Any  # of the optimizer


class Counted(NamedTuple):
    """State of a transformation that counts steps."""

    count: Any
    inner: Any = NoState()  # of the optimizer, if there is one


def synchronous_sgd(comm: Any, *, op: str = "avg", name: str = NAME) -> Transformation:
    """Replace gradients by their mean over all ranks, or their Adasum; comes before an optimizer.

    Args:
        comm: a communicator of ``kfcomm.sync``.
        op: ``avg`` or ``adasum``.
        name: of the collectives; transformations of one communicator need different names.

    Raises:
        ConfigError: ``comm`` does not block, or a number is out of its range: then ``init`` raises it on the other
            ranks.
        CollectiveMismatch: from ``init``, on all ranks: they have different algorithms.

    Cost: an ``all_reduce`` of the gradients, S bytes, at each step.
    """
    algorithm = ComparedAlgorithm(comm, name, f"synchronous_sgd(op={op!r})", op_problem(op))

    def update(updates: Tree, state: NoState, params: Tree = None) -> tuple[Tree, NoState]:
        algorithm.meet(updates)
        return algorithm.reduced(updates, "gradients", op), state

    return Transformation(algorithm.starting(lambda _: NoState()), update)


def sma(comm: Any, alpha: float = 0.1, *, name: str = NAME) -> Transformation:
    """Move models towards their mean; comes after an optimizer. `kfcomm.train.SMA`, errors as ``synchronous_sgd``."""
    return _of_models(comm, name, "sma", MoveToMean(alpha), lambda _: NoState())


def elastic_averaging(comm: Any, alpha: float, *, every: int = 1, name: str = NAME) -> Transformation:
    """Move models and a center towards each other at every H-th step; comes after an optimizer.

    `kfcomm.train.ElasticAveraging`; errors as ``synchronous_sgd``. The center is in the state.
    """
    rule = MoveToCenter(lowered_alpha(alpha, comm.size) if is_elastic(comm) else alpha, every, comm.size)
    return _of_models(comm, name, "elastic_averaging", rule, lambda params: Elastic(_zero(), _own(params)), alpha)


def local_sgd(comm: Any, every: int, *, name: str = NAME) -> Transformation:
    """Replace models by their mean at every H-th step; comes after an optimizer.

    `kfcomm.train.LocalSGD`; errors as ``synchronous_sgd``. The step's own update is added to the mean.
    """
    return _of_models(comm, name, "local_sgd", Mean(every), lambda _: Counted(_zero()))


def diloco(comm: Any, *, every: int = 500, lr: float = 0.7, momentum: float = 0.9, name: str = NAME) -> Transformation:
    """An outer step with Nesterov momentum per H steps of an optimizer; comes after it. `kfcomm.train.DiLoCo`."""

    def start(params: Tree) -> Outer:
        return Outer(_zero(), _own(params), jax.tree.map(jnp.zeros_like, params))

    return _of_models(comm, name, "diloco", OuterStep(every, lr, momentum), start)


def local_adaalter(
    comm: Any, optimizer: Optimizer, every: int, *, epsilon: float = 1.0, initial: float = 1.0, name: str = NAME
) -> Transformation:
    """An optimizer (plain SGD) along g / √(B² + tε²), with models and accumulators averaged at every H-th step.

    `kfcomm.train.LocalAdaAlter`; errors as ``synchronous_sgd``.
    """
    rule = Accumulators(every, epsilon, initial)
    algorithm = ComparedAlgorithm(comm, name, _said("local_adaalter", rule.numbers), rule.problem)

    def update(updates: Tree, state: Accumulated, params: Tree = None) -> tuple[Tree, Accumulated]:
        num_local = state.count % every + 1
        along = jax.tree.map(lambda g, shared: rule.direction(g, shared, num_local), updates, state.shared)
        own = jax.tree.map(accumulate, state.own, updates)
        steps, inner = optimizer.update(along, state.inner, params)

        def meet() -> tuple[Tree, Tree, Tree]:
            model, accumulators = algorithm.reduced((params, own), "model")
            return model, accumulators, accumulators

        target, next_own, shared = _if(num_local == every, meet, lambda: (params, own, state.shared))
        return _moved(steps, params, target), Accumulated(state.count + 1, shared, next_own, inner)

    def start(params: Tree) -> Accumulated:
        full = jax.tree.map(rule.start, params)
        return Accumulated(_zero(), full, _own(full), optimizer.init(params))

    return Transformation(algorithm.starting(start), algorithm.on_models(update))


def adasgd(comm: Any, optimizer: Optimizer, alpha: float = 0.1, *, after: int, name: str = NAME) -> Transformation:
    """An optimizer with SMA for ``after`` steps, and with the mean of all gradients from then on.

    `kfcomm.train.AdaSGD`; errors as ``synchronous_sgd``. At the change all ranks get rank 0's state of the optimizer:
    with different states equal gradients would make equal models different. Updates are differences, so that the models
    at the change are equal up to rounding; ``kfcomm.jax.broadcast`` makes them equal to the bit.
    """
    problem = alpha_problem(alpha) or count_problem("after", after)
    algorithm = ComparedAlgorithm(comm, name, f"adasgd(alpha={alpha!r}, after={after!r})", problem)

    def update(updates: Tree, state: Counted, params: Tree = None) -> tuple[Tree, Counted]:
        count = state.count + 1
        share = jnp.where(count <= after, alpha, 1.0)

        def draw() -> Tree:
            mean = algorithm.reduced(params, "model")
            return jax.tree.map(lambda x, m: towards(x, m, share.astype(x.dtype)), params, mean)

        target = _if(count <= after + 1, draw, lambda: params)
        gradients = _if(count > after, lambda: algorithm.reduced(updates, "gradients"), lambda: updates)
        before = _if(count == after + 1, lambda: algorithm.of_first(state.inner, "state"), lambda: state.inner)
        steps, inner = optimizer.update(gradients, before, params)
        return _moved(steps, params, target), Counted(count, inner)

    return Transformation(
        algorithm.starting(lambda params: Counted(_zero(), optimizer.init(params))), algorithm.on_models(update)
    )


def pair_averaging(
    comm: Any, *, weights: Sequence[float] | None = None, max_staleness: float = 100.0, seed: int = 0,
    name: str = NAME,
) -> Transformation:  # fmt: skip
    """The mean with one peer's model at each step, without a barrier; comes after an optimizer.

    It calls `kfcomm.train.PairAveraging`, whose state is in the process and not in the transformation's; errors as
    ``synchronous_sgd``. Ranks wait for each other once at the end, since each may be asked for its model until then.
    """
    problem = pairs_problem(comm, weights, max_staleness)
    algorithm = ComparedAlgorithm(comm, name, f"pair_averaging(max_staleness={max_staleness!r})", problem)
    begun: list[PairAveraging] = []  # made by the first call, as it publishes a model, which needs values

    def call(model: list[Any]) -> list[Any]:
        if not begun:
            options: dict[str, Any] = {"weights": weights, "max_staleness": max_staleness, "seed": seed}
            begun.append(PairAveraging(comm, model, name=name, **options))
        return list(begun[0].parameters(model).wait())

    def update(updates: Tree, state: NoState, params: Tree = None) -> tuple[Tree, NoState]:
        leaves, structure = jax.tree.flatten(params)
        return _moved(updates, params, structure.unflatten(called(comm, call, leaves))), state

    return Transformation(algorithm.starting(lambda _: NoState()), algorithm.on_models(update))


def adaptive(training: Training, optimizer: Optimizer) -> Transformation:
    """An optimizer whose gradients or models are exchanged by a `kfcomm.train.Training`.

    ::

        training = kfcomm.train.Training(comm, params, policies=[GuardSteps()], learning_rate=0.1,
                                         state={"inner": optimizer.init(params)})
        transformation = kfcomm.jax.optimizers.adaptive(training, optimizer)
        for step in training.steps(sampler, passes=10):
            loss, gradients = value_and_grad(training.model, batch(step.indices))
            updates, training.state.inner = transformation.update(
                gradients, training.state.inner, training.model, loss=loss)
            training.model = optax.apply_updates(training.model, updates)

    ``update`` is called once in a step, in a function that is compiled or not. In a void step the updates are zero and
    the optimizer's state stays. Updates are multiplied by the learning rate that policies set, over the first one:
    the optimizer has the first one. The state is the optimizer's.

    Args:
        training: over a communicator of ``kfcomm.sync``, with a ``learning_rate`` if policies change it.
        optimizer: of optax, or like one.

    Raises:
        ConfigError: from ``update``: no step is under way, or it has no ``params``.
    """
    first_rate = training.learning_rate

    def call(given: list[Any], structure: Any) -> list[Any]:
        *leaves, told = given
        half = len(leaves) // 2
        gradients, params = structure.unflatten(leaves[:half]), structure.unflatten(leaves[half:])
        training.model = params
        loss = float(told[0]) if told[1] else None
        model, reduced = training.exchange(gradients, loss=loss)
        rate = 1.0 if first_rate is None else (training.learning_rate or 0.0) / first_rate
        flags = np.array([reduced is None, rate], told.dtype)
        found = jax.tree.leaves(gradients if reduced is None else reduced) + jax.tree.leaves(model)
        return [*(np.asarray(one) if isinstance(one, np.ndarray) else one for one in found), flags]

    def update(updates: Tree, state: Any, params: Tree = None, *, loss: Any = None) -> tuple[Tree, Any]:
        if params is None:
            raise ConfigError("adaptive exchanges models, too: update(updates, state, params) needs params")
        leaves, structure = jax.tree.flatten(updates)
        kind = jnp.result_type(float)
        told = jnp.stack([jnp.asarray(0 if loss is None else loss, kind), jnp.asarray(loss is not None, kind)])
        given = [jnp.asarray(one) for one in (*leaves, *jax.tree.leaves(params))]
        *found, flags = called(training.comm, partial(call, structure=structure), [*given, told])
        half = len(leaves)
        is_void, rate = flags[0] > 0, flags[1]
        model = structure.unflatten(found[half:])
        steps, inner = optimizer.update(structure.unflatten(found[:half]), state, model)
        scaled = jax.tree.map(lambda one: jnp.where(is_void, 0, one * rate.astype(one.dtype)), steps)
        kept = jax.tree.map(lambda old, new: jnp.where(is_void, old, new), state, inner)
        return _moved(scaled, params, model), kept

    # A compiled step runs behind the program: the training's step must not end before its exchange.
    training.before_end = jax.effects_barrier
    return Transformation(optimizer.init, update)


def _of_models(
    comm: Any, name: str, title: str, rule: Rule, start: Callable[[Tree], Any], alpha: float | None = None
) -> Transformation:
    """The transformation of a rule on models; its state is a count, if any, and the trees that the rule keeps.

    ``alpha`` was given for any number of ranks, where the rule depends on it.
    """
    numbers = rule.numbers if alpha is None else rule.numbers | {"alpha": alpha}
    algorithm = ComparedAlgorithm(comm, name, _said(title, numbers), rule.problem)

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        count, kept = (state[0] + 1, state[1 : 1 + rule.num_kept]) if state else (0, ())

        def meet() -> list[Tree]:
            mean = algorithm.reduced(params, "model")
            leaves, structure = jax.tree.flatten(params)
            now: Rule = rule
            if isinstance(rule, MoveToCenter) and alpha is not None and is_elastic(comm):
                size = algorithm.meet(params)
                now = replace(rule, alpha=jnp.minimum(alpha, 1 / size), size=size)
            rows = [now.meet(*row) for row in zip(leaves, *map(jax.tree.leaves, (mean, *kept)), strict=True)]
            found = [structure.unflatten(row[place] for row in rows) for place in range(1 + len(kept))]
            return [jax.tree.map(lambda x, like: x.astype(like.dtype), tree, params) for tree in found]

        target, *kept = _if(count % rule.every == 0, meet, lambda: [params, *kept])
        return _moved(updates, params, target), type(state)(count, *kept) if state else state

    return Transformation(algorithm.starting(start), algorithm.on_models(update))


def _said(title: str, numbers: Mapping[str, Any]) -> str:
    return f"{title}({', '.join(f'{one}={value!r}' for one, value in numbers.items())})"


def _moved(updates: Tree, params: Tree, target: Tree) -> Tree:
    """Updates that add the way from ``params`` to ``target``."""
    return jax.tree.map(lambda u, x, to: u + (to - x), updates, params, target)


def _if(condition: Any, then: Callable[[], T], otherwise: Callable[[], T]) -> T:
    """The result of one of two functions, also for a traced condition."""
    if isinstance(condition, jax.core.Tracer):
        found: T = jax.lax.cond(condition, then, otherwise)
        return found
    return then() if condition else otherwise()


def _own(tree: Tree) -> Tree:
    """The same arrays in containers of their own, into which a handed state is loaded."""
    return jax.tree.map(lambda x: x, tree)


def _zero() -> Any:
    return jnp.zeros((), jnp.int32)
