"""Optimizers of torch with the distributed algorithms of ``kfcomm.train``.

::

    optimizer = kfcomm.torch.optimizers.sma(torch.optim.SGD(model.parameters(), lr=0.1), comm, alpha=0.1)

Each of these functions takes any ``torch.optim.Optimizer`` and returns the same object, whose class is now a subclass
of its own and of `Agreeing`, as torch's ``fully_shard`` does it with modules. So the loop, schedulers and scalers that
hold it need no change. All ranks get the parameters of rank 0. Every ``step()`` runs the algorithm first and then the
optimizer's own step; with a closure, each time that the closure has made gradients. Tensors are exchanged where torch
has them; the resulting gradients become ``parameter.grad``, resulting models are copied into the parameters once.
``kfcomm.torch.attach`` is for synchronous SGD whose gradients travel while torch computes.

In an elastic job an optimizer is wrapped once, before its ``Elastic`` begins, and nothing is exchanged meanwhile: all
ranks get the parameters that its ``State`` holds. Where ranks keep replicas, give the ``State`` an attachment instead
(``kfcomm.torch.attach(..., algorithm=...)``), which knows what differs between ranks.

Invariant: the algorithm runs once per step, on every rank, whichever code calls the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kfcomm.common.arguments import checked_name
from kfcomm.errors import ConfigError
from kfcomm.sync.adapter import Adapter
from kfcomm.torch.reductions import is_elastic
from kfcomm.torch.state import broadcast_parameters
from kfcomm.torch.stepping import (
    StepExchange,
    Tensors,
    each,
    given_to,
    needs_copies,
    parameters_of,
    trained_of,
)
from kfcomm.train.adaalter import LocalAdaAlter
from kfcomm.train.adasgd import AdaSGD
from kfcomm.train.agreement import Agreement, introduction
from kfcomm.train.asynchronous import PairAveraging
from kfcomm.train.averages import SMA, DiLoCo, ElasticAveraging, LocalSGD, SynchronousSGD
from kfcomm.train.procedure import Comm, Pending

if TYPE_CHECKING:
    from kfcomm.train.gradient_monitor import GradientMonitor

NAME = "optimizer"

__all__ = [
    "Agreeing", "adasgd", "diloco", "elastic_averaging", "local_adaalter", "local_sgd", "pair_averaging", "sma",
    "synchronous_sgd",
]  # fmt: skip


def synchronous_sgd(
    optimizer: torch.optim.Optimizer, comm: Any, *, op: str = "avg", monitor: GradientMonitor | None = None,
    name: str = NAME, wire_dtype: str | None = None,
) -> Agreeing:  # fmt: skip
    """Step with the mean of all ranks' gradients: `kfcomm.train.SynchronousSGD`.

    Args:
        optimizer: any of torch's.
        comm: a communicator of ``kfcomm.sync``.
        op: ``avg``, or ``adasum``.
        monitor: is updated with the gradients.
        name: of the collectives; optimizers of one communicator need different names.
        wire_dtype: ``float16`` or ``bfloat16``: of gradients on their way, see `kfcomm.Communicator.all_reduce`.

    Raises:
        CollectiveMismatch: on all ranks: they have different optimizers, or different algorithms.
        ConfigError: the optimizer has an algorithm already, or ``comm`` does not block; or on all ranks: their
            parameters differ, or a number is out of its range on one of them.

    Cost: a broadcast of the parameters, and the cost of the algorithm.
    """
    options: Any = {"op": op, "monitor": monitor, "name": name, "wire_dtype": wire_dtype}
    return agreeing(optimizer, comm, name, lambda *_: SynchronousSGD(comm, **options))


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
        reads_peers=True,
    )  # fmt: skip


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
        self._exchange.remove()
        del self._exchange
        self.__class__ = _own_class(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy the optimizer without the algorithm."""
        return _blank, (_own_class(self),), self.__getstate__()


def agreeing(
    optimizer: torch.optim.Optimizer, comm: Comm, name: str, make: Callable[[Tensors, Tensors], Agreement], *,
    reads_peers: bool = False,
) -> Agreeing:  # fmt: skip
    """Give an optimizer an algorithm, made of its parameters and those of them that get gradients.

    ``reads_peers``: it reads the models of other ranks, from their host memory.
    """
    _check(optimizer, comm)
    name = checked_name(name)
    said = _described(optimizer)
    meeting = introduction(comm.rank, said, f"{name}/optimizer", "the ranks have different optimizers")
    # Compared before the first broadcast: different optimizers would give it different tensors. A rank that joins an
    # elastic world must not wait for the others; it gets parameters by its Elastic, and meets them in the first step.
    if not is_elastic(comm):
        Pending(comm, meeting).wait()
    parameters = parameters_of(optimizer)
    if not is_elastic(comm):
        broadcast_parameters(parameters, comm, name=f"{name}/parameters")
    copies = needs_copies(parameters.values(), comm, reads_peers=reads_peers)
    agreement = make(*(given_to(one, copies=copies) for one in (parameters, trained_of(optimizer))))
    if not is_elastic(comm):
        agreement.introduce().wait()
    own: Any = type(optimizer)
    made: Any = optimizer
    made._exchange = StepExchange(optimizer, agreement, copies=copies)
    made.__class__ = type(own.__name__, (Agreeing, own), {"__module__": own.__module__})
    return made  # type: ignore[no-any-return]


def _check(optimizer: torch.optim.Optimizer, comm: Comm) -> None:
    if not isinstance(comm, Adapter):
        raise ConfigError(f"optimizers need a communicator of kfcomm.sync, not a {type(comm).__name__}")
    if isinstance(optimizer, Agreeing):
        raise ConfigError(f"this {_own_class(optimizer).__name__} agrees already, by {optimizer.agreement!r}")


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
    count, numbers = len(each(optimizer)), sum(one.numel() for one in each(optimizer))
    return f"{type(optimizer).__name__}({given}) of {count} parameters, {numbers} numbers"
