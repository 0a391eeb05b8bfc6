"""Choice of the method by which an attachment agrees: gradients by buckets, or an algorithm in the optimizer's step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kfcomm.errors import ConfigError
from kfcomm.torch import alike
from kfcomm.torch.alike import Comparison
from kfcomm.torch.averaging import GradientAveraging, Method, Parts, Shares, TrafficOptions, buckets_of
from kfcomm.torch.driver import StepDriver
from kfcomm.torch.reductions import is_elastic
from kfcomm.torch.rows import StepRows
from kfcomm.torch.state import broadcast_optimizer_state
from kfcomm.torch.stepping import StepExchange, given_to, needs_copies, parameters_of, put, trained_of
from kfcomm.train import Algorithm, LocalAdaAlter, PairAveraging, SynchronousSGD

OPS = {"ssgd": "avg", "adasum": "adasum"}
"""Algorithms whose gradients travel by buckets during the backward pass."""


@dataclass(frozen=True)
class MethodPlan:
    """Parts of an attachment that stay the same for all algorithms."""

    parts: Parts
    traffic: TrafficOptions
    shared: Shares
    comparison: Comparison
    driver: StepDriver | None = None


def op_of(algorithm: Algorithm) -> str | None:
    """Operation on gradients of an algorithm that exchanges them by buckets; None for others."""
    if algorithm.kind is SynchronousSGD or algorithm.kind in OPS:
        return str(algorithm.options.get("op", OPS.get(str(algorithm.kind), "avg")))
    return None


def problem_of(algorithm: Algorithm, traffic: TrafficOptions, comm: Any) -> str | None:
    """Reason why this algorithm cannot be attached with these options; None if it can."""
    op, given = op_of(algorithm), [one for one in ("wire_dtype", "compression") if getattr(traffic, one) is not None]
    if traffic.defer and is_elastic(comm):
        return (
            "defer=True has no meaning in an elastic job: the boundary of a step waits for its collectives, and ranks "
            "that join get finished parameters"
        )
    if op is None and (traffic.defer or given):
        what = "defer" if traffic.defer else given[0]
        return (
            f"{what} is for gradients that travel during the backward pass: algorithm {str(algorithm)!r} makes its "
            "exchange in the optimizer's step"
        )
    if op == "adasum" and given:
        return f"{given[0]} is for means of gradients: algorithm 'adasum' needs their exact inner products"
    for name in ("monitor", "wire_dtype"):
        if op is not None and name in algorithm.options:
            return f"a {name} is given to attach: attach(..., {name}=...)"
    return None


def _needs_copies(algorithm: Algorithm, parts: Parts) -> bool:
    is_pairwise = isinstance(algorithm.kind, type) and issubclass(algorithm.kind, PairAveraging)
    return needs_copies(
        parts.model.parameters(), parts.comm, reads_peers=is_pairwise or algorithm.kind == "pair-averaging"
    )


def method_of(plan: MethodPlan, algorithm: Algorithm) -> Method:
    """The method of an algorithm, with its hooks."""
    op, parts, met = op_of(algorithm), plan.parts, plan.comparison.look
    if op is not None:
        buckets = buckets_of(parts, plan.traffic, plan.shared, op)
        return GradientAveraging(parts, plan.traffic, buckets, met, plan.driver)
    optimizer = parts.optimizer
    # Its accumulators are of gradients: parameters without one have none.
    of_gradients = isinstance(algorithm.kind, type) and issubclass(algorithm.kind, LocalAdaAlter)
    is_trained = of_gradients or algorithm.kind == "local-adaalter"
    copies = _needs_copies(algorithm, parts)
    model = given_to(trained_of(optimizer) if is_trained else parameters_of(optimizer), copies=copies)
    made = algorithm.made(parts.comm, model, parts.name)
    method = StepExchange(optimizer, made, met, plan.driver, copies=copies)
    if plan.driver is not None:
        named = dict(alike.parameters_of(parts.model, optimizer))
        rows = StepRows(parts.comm, parts.name, named, plan.driver.watch, lambda: method.is_left_out)
        plan.driver.drive(rows)
    return method


def meet(method: Method) -> None:
    """Compare the numbers of the algorithm now, not in the first step; on all ranks."""
    if isinstance(method, StepExchange):
        method.agreement.introduce().wait()


def agree_on_model(plan: MethodPlan, *, with_state: bool) -> None:
    """Let all ranks continue with one model, the mean of their replicas, before gradients are shared."""
    optimizer, comm, name = plan.parts.optimizer, plan.parts.comm, plan.parts.name
    parameters = parameters_of(optimizer)
    ssgd = Algorithm("ssgd")
    given = given_to(parameters, copies=_needs_copies(ssgd, plan.parts))
    put(ssgd.made(comm, given, name).parameters(given).wait(), parameters)
    if with_state:
        # With unequal momenta equal gradients would make equal models different.
        broadcast_optimizer_state(optimizer, comm, name=f"{name}/state")


class MethodChoice:
    """The algorithm in force, as a part of the state: a rank that joins gets it with the rest.

    Attributes:
        algorithm: it.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self._known: dict[str, Algorithm] = {}
        self.change(algorithm)

    def change(self, algorithm: Algorithm) -> None:
        """Continue with another one."""
        self.algorithm = self._known[str(algorithm)] = algorithm

    def named(self, given: Any) -> Algorithm:
        """Algorithm of this name, with its options if it was given before; or the algorithm itself."""
        return self._known.get(given) or Algorithm.of(given) if isinstance(given, str) else Algorithm.of(given)

    def told(self) -> dict[str, Any]:
        """Its name, and its options where the name is enough to make it."""
        is_named = isinstance(self.algorithm.kind, str)
        return {"algorithm": [str(self.algorithm), dict(self.algorithm.options) if is_named else None]}

    def of(self, told: Mapping[str, Any]) -> Algorithm:
        """The algorithm of a state.

        Raises:
            ConfigError: it is a class or a function that this program has not given.
        """
        given: Sequence[Any] = told["algorithm"]
        name, options = given
        if options is not None:
            return Algorithm(name, **options)
        if name not in self._known:
            raise ConfigError(f"the state is of algorithm {name!r}, which this program has not given to attach or use")
        return self._known[name]
