"""Optimizers of torch with the distributed algorithms of ``kfcomm.train``.

::

    optimizer = kfcomm.torch.optimizers.sma(torch.optim.SGD(model.parameters(), lr=0.1), comm, alpha=0.1)

Each of these functions takes any ``torch.optim.Optimizer`` and returns the same object, whose class is now a subclass
of its own and of `Agreeing`, as torch's ``fully_shard`` does it with modules. So the loop, schedulers and scalers that
hold it need no change. All ranks get the parameters of rank 0. Every ``step()`` runs the algorithm first and then the
optimizer's own step; with a closure, each time that the closure has made gradients. Tensors are exchanged where torch
has them; the resulting gradients become ``parameter.grad``, resulting models are copied into the parameters once.
``kfcomm.torch.attach`` is for synchronous SGD whose gradients travel while torch computes.

In an elastic job: ``detach()`` when the ranks have changed, and wrap again.

Invariant: the algorithm runs once per step, on every rank, whichever code calls the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kfcomm.common.arguments import checked_name
from kfcomm.errors import ConfigError
from kfcomm.sync.adapter import Adapter
from kfcomm.torch.state import broadcast_optimizer_state, broadcast_parameters
from kfcomm.torch.steps import hook_steps, mean_loss
from kfcomm.train.agreement import Agreement, introduction
from kfcomm.train.asynchronous import PairAveraging
from kfcomm.train.averages import SMA, AdaSGD, DiLoCo, ElasticAveraging, LocalAdaAlter, LocalSGD, SynchronousSGD
from kfcomm.train.procedure import Comm, Pending

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle

    from kfcomm.train.gradient_monitor import GradientMonitor

NAME = "optimizer"

__all__ = [
    "Agreeing", "adasgd", "diloco", "elastic_averaging", "local_adaalter", "local_sgd", "pair_averaging", "sma",
    "synchronous_sgd",
]  # fmt: skip


def synchronous_sgd(
    optimizer: torch.optim.Optimizer, comm: Any, *, op: str = "avg", monitor: GradientMonitor | None = None,
    name: str = NAME,
) -> Agreeing:  # fmt: skip
    """Step with the mean of all ranks' gradients: `kfcomm.train.SynchronousSGD`.

    Args:
        optimizer: any of torch's.
        comm: a communicator of ``kfcomm.sync``.
        op: ``avg``, or ``adasum``.
        monitor: is updated with the gradients.
        name: of the collectives; optimizers of one communicator need different names.

    Raises:
        CollectiveMismatch: on all ranks: they have different optimizers, or different algorithms.
        ConfigError: the optimizer has an algorithm already, or ``comm`` does not block; or on all ranks: their
            parameters differ, or a number is out of its range on one of them.

    Cost: a broadcast of the parameters, and the cost of the algorithm.
    """
    return agreeing(optimizer, comm, name, lambda *_: SynchronousSGD(comm, op=op, monitor=monitor, name=name))


def sma(optimizer: torch.optim.Optimizer, comm: Any, alpha: float = 0.1, *, name: str = NAME) -> Agreeing:
    """Move models towards their mean at each step, by α: `kfcomm.train.SMA`. Errors as of ``synchronous_sgd``."""
    return agreeing(optimizer, comm, name, lambda *_: SMA(comm, alpha, name=name))


def elastic_averaging(
    optimizer: torch.optim.Optimizer, comm: Any, alpha: float, *, every: int = 1, name: str = NAME
) -> Agreeing:
    """Move models and a center together: `kfcomm.train.ElasticAveraging`. Errors as of ``synchronous_sgd``."""
    return agreeing(
        optimizer, comm, name, lambda model, _: ElasticAveraging(comm, model, alpha, every=every, name=name)
    )


def adasgd(
    optimizer: torch.optim.Optimizer, comm: Any, alpha: float = 0.1, *, after: int | None = None, name: str = NAME
) -> Agreeing:
    """SMA, and S-SGD after a change: `kfcomm.train.AdaSGD`. Errors as of ``synchronous_sgd``.

    The change comes after ``after`` steps, or by ``optimizer.agreement.change()``. All ranks then get rank 0's state of
    the optimizer too (momenta, rates), without which equal gradients would make equal models different.
    """
    return agreeing(optimizer, comm, name, lambda *_: AdaSGD(comm, alpha, after=after, name=name))


def local_sgd(optimizer: torch.optim.Optimizer, comm: Any, every: int, *, name: str = NAME) -> Agreeing:
    """Replace models by their mean at every H-th step: `kfcomm.train.LocalSGD`. Errors as of ``synchronous_sgd``."""
    return agreeing(optimizer, comm, name, lambda *_: LocalSGD(comm, every, name=name))


def diloco(
    optimizer: torch.optim.Optimizer, comm: Any, *, every: int = 500, lr: float = 0.7, momentum: float = 0.9,
    name: str = NAME,
) -> Agreeing:  # fmt: skip
    """An outer Nesterov step per H inner ones: `kfcomm.train.DiLoCo`. Errors as of ``synchronous_sgd``."""
    return agreeing(
        optimizer, comm, name, lambda model, _: DiLoCo(comm, model, every=every, lr=lr, momentum=momentum, name=name)
    )


def local_adaalter(
    optimizer: torch.optim.Optimizer, comm: Any, every: int, *, epsilon: float = 1.0, initial: float = 1.0,
    name: str = NAME,
) -> Agreeing:  # fmt: skip
    """Steps along g / √(B² + tε²), with models and B² averaged at every H-th: `kfcomm.train.LocalAdaAlter`.

    The optimizer has to be plain SGD, and each parameter that requires a gradient has to have one in every step. Errors
    as of ``synchronous_sgd``.
    """
    return agreeing(
        optimizer, comm, name,
        lambda _, trained: LocalAdaAlter(comm, trained, every, epsilon=epsilon, initial=initial, name=name),
    )  # fmt: skip


def pair_averaging(
    optimizer: torch.optim.Optimizer, comm: Any, *, weights: Sequence[float] | None = None,
    max_staleness: float = 100.0, seed: int = 0, name: str = NAME,
) -> Agreeing:  # fmt: skip
    """The mean with one peer's model at each step, without a barrier: `kfcomm.train.PairAveraging`.

    Ranks wait for each other once at the end, since each may be asked for its model until then. Errors as of
    ``synchronous_sgd``.
    """
    return agreeing(
        optimizer, comm, name,
        lambda model, _: PairAveraging(
            comm, model, weights=weights, max_staleness=max_staleness, seed=seed, name=name
        ),
    )  # fmt: skip


Tensors = dict[str, torch.Tensor]
"""By the number of the parameter group, and the place in it: ``0/3``."""


class Agreeing(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer with a distributed algorithm; also an instance of its own class. A copy of it has no algorithm."""

    _exchange: StepExchange

    @property
    def agreement(self) -> Agreement:
        """The algorithm; see ``kfcomm.train``."""
        return self._exchange.agreement

    def agree(self) -> None:
        """Run the algorithm now instead of in the next ``step()``.

        Call it after ``backward()``, on every rank, before code that reads gradients: clipping,
        ``GradScaler.unscale_``, and ``GradScaler.step``, which could leave out a step that other ranks make.

        Raises:
            CollectiveError: an exchange failed.
            ConfigError: a gradient is sparse.
        """
        self._exchange.agree()

    def detach(self) -> None:
        """Remove the algorithm: become an optimizer of one rank again."""
        self._exchange.hook.remove()
        del self._exchange
        self.__class__ = _own_class(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy the optimizer without the algorithm."""
        return _blank, (_own_class(self),), self.__getstate__()


class StepExchange:
    """Run of an algorithm in each step, before the optimizer's own step."""

    def __init__(self, optimizer: torch.optim.Optimizer, agreement: Agreement) -> None:
        self.agreement = agreement
        self.hook: RemovableHandle = hook_steps(optimizer, self._before_step, self._around_step)
        self._optimizer = optimizer
        self._is_done = False
        """Whether the program has called ``agree`` for this step."""
        self._is_shared = agreement.shares_gradients

    def agree(self) -> None:
        """Exchange models and gradients now."""
        self._finish(self._begin())
        self._is_done = True

    def _before_step(self) -> None:
        is_done, self._is_done = self._is_done, False
        if not is_done:
            self._finish(self._begin())

    def _around_step(self) -> Callable[[Any], Any]:
        if self._is_done:
            self._is_done = False
            raise ConfigError("a step with a closure agrees when that has made gradients: agree() is for steps without")
        begun = [self._begin()]

        def settled(loss: Any) -> Any:
            # Gradients each time that the closure has made them, the model the first time.
            self._finish(begun.pop() if begun else None)
            if not self.agreement.shares_gradients:
                return loss
            return mean_loss(self.agreement.comm, loss, f"{self.agreement.name}/loss")

        return settled

    def _begin(self) -> Pending[Tensors]:
        return self.agreement.parameters(parameters_of(self._optimizer))

    def _finish(self, model: Pending[Tensors] | None) -> None:
        """Exchange gradients, and put the resulting ones and the resulting model in their places."""
        parameters, given = parameters_of(self._optimizer), gradients_of(self._optimizer)
        gradients = self.agreement.gradients(given).wait()
        of = dict(zip(parameters, _each(self._optimizer), strict=True))
        for name, found in gradients.items():
            # An algorithm that leaves gradients alone returns the very tensors.
            if found is not given[name]:
                of[name].grad = found
        if model is not None:
            for name, found in model.wait().items():
                # Nothing to copy where the result is the parameter's own memory.
                if found.data_ptr() != parameters[name].data_ptr():
                    parameters[name].copy_(found)
        if self.agreement.shares_gradients and not self._is_shared:
            self._is_shared = True  # models are equal now, and stay so with equal states
            broadcast_optimizer_state(self._optimizer, self.agreement.comm, name=f"{self.agreement.name}/state")


def agreeing(
    optimizer: torch.optim.Optimizer, comm: Comm, name: str, make: Callable[[Tensors, Tensors], Agreement]
) -> Agreeing:
    """Give an optimizer an algorithm, made of its parameters and those of them that get gradients."""
    _check(optimizer, comm)
    name = checked_name(name)
    meeting = introduction(comm.rank, _described(optimizer), f"{name}/optimizer", "the ranks have different optimizers")
    # Compared before the first broadcast: different optimizers would give it different tensors.
    Pending(comm, meeting).wait()
    parameters = parameters_of(optimizer)
    broadcast_parameters(parameters, comm, name=f"{name}/parameters")
    trained = {one: x for (one, x), own in zip(parameters.items(), _each(optimizer), strict=True) if own.requires_grad}
    agreement = make(parameters, trained)
    agreement.introduce().wait()
    own: Any = type(optimizer)
    made: Any = optimizer
    made._exchange = StepExchange(optimizer, agreement)
    made.__class__ = type(own.__name__, (Agreeing, own), {"__module__": own.__module__})
    return made  # type: ignore[no-any-return]


def _check(optimizer: torch.optim.Optimizer, comm: Comm) -> None:
    if not isinstance(comm, Adapter):
        raise ConfigError(f"optimizers need a communicator of kfcomm.sync, not a {type(comm).__name__}")
    if isinstance(optimizer, Agreeing):
        raise ConfigError(f"this {_own_class(optimizer).__name__} agrees already, by {optimizer.agreement!r}")


def parameters_of(optimizer: torch.optim.Optimizer) -> Tensors:
    """The parameters, in their own memory."""
    return {
        f"{number}/{place}": one.detach()
        for number, group in enumerate(optimizer.param_groups)
        for place, one in enumerate(group["params"])
    }


def gradients_of(optimizer: torch.optim.Optimizer) -> Tensors:
    """The gradients that exist, in their own memory."""
    found = {}
    for name, one in zip(parameters_of(optimizer), _each(optimizer), strict=True):
        if one.grad is not None:
            if one.grad.layout is not torch.strided:
                raise ConfigError(f"the gradient of parameter {name} is sparse: only dense ones can be agreed on")
            found[name] = one.grad.detach()
    return found


def _each(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _own_class(optimizer: torch.optim.Optimizer) -> Any:
    """The class that it had before."""
    return type(optimizer).__bases__[1]


def _blank(kind: Any) -> Any:
    """An optimizer without state, which unpickling sets."""
    return kind.__new__(kind)


def _described(optimizer: torch.optim.Optimizer) -> str:
    """Description of the optimizer, which ranks compare."""
    numbers = {
        name: float(value) if isinstance(value, torch.Tensor) else value for name, value in optimizer.defaults.items()
    }
    given = ", ".join(f"{name}={value!r}" for name, value in numbers.items())
    each = _each(optimizer)
    return f"{type(optimizer).__name__}({given}) of {len(each)} parameters, {sum(one.numel() for one in each)} numbers"
