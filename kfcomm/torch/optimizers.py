"""Optimizers of torch that agree with those of the other ranks, in the ways of ``kfcomm.train``.

::

    optimizer = kfcomm.torch.optimizers.sma(torch.optim.SGD(model.parameters(), lr=0.1), comm, alpha=0.1)

Each of these functions takes any ``torch.optim.Optimizer`` and gives it back, as an `Agreeing` one: the loop, its
schedulers and its scaler stay as they are. All ranks have the parameters of rank 0 then. Every ``step()`` agrees first,
and then does what it always did; with a closure, each time that the closure has made gradients. Arrays are given to
the exchange where torch has them; agreed gradients become ``parameter.grad``, agreed models are copied to their places
once. ``kfcomm.torch.attach`` is for synchronous SGD whose gradients travel while torch computes.

In an elastic job: ``detach()`` when the ranks have changed, and wrap again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kfcomm.torch.agreeing import Agreeing, agreeing
from kfcomm.train.local import DiLoCo, LocalAdaAlter, LocalSGD
from kfcomm.train.pair_averaging import PairAveraging
from kfcomm.train.synchronous import SMA, AdaSGD, ElasticAveraging, SynchronousSGD

if TYPE_CHECKING:
    import torch

    from kfcomm.train.monitor import GradientMonitor

NAME = "optimizer"

__all__ = [
    "Agreeing", "adasgd", "diloco", "elastic_averaging", "local_adaalter", "local_sgd", "pair_averaging", "sma",
    "synchronous_sgd",
]  # fmt: skip


def synchronous_sgd(
    optimizer: torch.optim.Optimizer, comm: Any, *, op: str = "avg", monitor: GradientMonitor | None = None,
    name: str = NAME,
) -> Agreeing:  # fmt: skip
    """Every step is one with the mean of all ranks' gradients: `kfcomm.train.SynchronousSGD`.

    Args:
        optimizer: any of torch's.
        comm: a communicator of ``kfcomm.sync``.
        op: ``avg``, or ``adasum``.
        monitor: learns from the gradients.
        name: of the collectives; another one for each optimizer of a communicator.

    Raises:
        CollectiveMismatch: on all ranks: they have different optimizers, or agree in different ways.
        ConfigError: it agrees already, or ``comm`` does not block; or on all ranks: their parameters differ, or a
            number is out of its range on one of them.

    Cost: a broadcast of the parameters, and what the way to agree costs.
    """
    return agreeing(optimizer, comm, name, lambda *_: SynchronousSGD(comm, op=op, monitor=monitor, name=name))


def sma(optimizer: torch.optim.Optimizer, comm: Any, alpha: float = 0.1, *, name: str = NAME) -> Agreeing:
    """Models are drawn to their mean at each step, by α: `kfcomm.train.SMA`. See ``synchronous_sgd``."""
    return agreeing(optimizer, comm, name, lambda *_: SMA(comm, alpha, name=name))


def elastic_averaging(
    optimizer: torch.optim.Optimizer, comm: Any, alpha: float, *, every: int = 1, name: str = NAME
) -> Agreeing:
    """Models and a center are drawn to each other: `kfcomm.train.ElasticAveraging`. See ``synchronous_sgd``."""
    return agreeing(
        optimizer, comm, name, lambda model, _: ElasticAveraging(comm, model, alpha, every=every, name=name)
    )


def adasgd(
    optimizer: torch.optim.Optimizer, comm: Any, alpha: float = 0.1, *, after: int | None = None, name: str = NAME
) -> Agreeing:
    """SMA, and S-SGD later: `kfcomm.train.AdaSGD`. See ``synchronous_sgd``; ``optimizer.agreement.change()``.

    At the change all ranks get rank 0's state of the optimizer, too (momenta, rates): else equal gradients would lead
    equal models apart.
    """
    return agreeing(optimizer, comm, name, lambda *_: AdaSGD(comm, alpha, after=after, name=name))


def local_sgd(optimizer: torch.optim.Optimizer, comm: Any, every: int, *, name: str = NAME) -> Agreeing:
    """Models become their mean at every H-th step: `kfcomm.train.LocalSGD`. See ``synchronous_sgd``."""
    return agreeing(optimizer, comm, name, lambda *_: LocalSGD(comm, every, name=name))


def diloco(
    optimizer: torch.optim.Optimizer, comm: Any, *, every: int = 500, lr: float = 0.7, momentum: float = 0.9,
    name: str = NAME,
) -> Agreeing:  # fmt: skip
    """An outer step of Nesterov's momentum for H of the optimizer: `kfcomm.train.DiLoCo`. See ``synchronous_sgd``."""
    return agreeing(
        optimizer, comm, name, lambda model, _: DiLoCo(comm, model, every=every, lr=lr, momentum=momentum, name=name)
    )


def local_adaalter(
    optimizer: torch.optim.Optimizer, comm: Any, every: int, *, epsilon: float = 1.0, initial: float = 1.0,
    name: str = NAME,
) -> Agreeing:  # fmt: skip
    """Steps along g / √(B² + tε²), which ranks share at every H-th: `kfcomm.train.LocalAdaAlter`.

    See ``synchronous_sgd``. The optimizer is to be plain SGD; each parameter that can have a gradient has one, in
    every step.
    """
    return agreeing(
        optimizer, comm, name,
        lambda _, trained: LocalAdaAlter(comm, trained, every, epsilon=epsilon, initial=initial, name=name),
    )  # fmt: skip


def pair_averaging(
    optimizer: torch.optim.Optimizer, comm: Any, *, weights: Sequence[float] | None = None,
    max_staleness: float = 100.0, seed: int = 0, name: str = NAME,
) -> Agreeing:  # fmt: skip
    """The mean with one peer's model at each step, and no barrier: `kfcomm.train.PairAveraging`.

    See ``synchronous_sgd``. Ranks meet once at the end, as each may be asked until then.
    """
    return agreeing(
        optimizer, comm, name,
        lambda model, _: PairAveraging(
            comm, model, weights=weights, max_staleness=max_staleness, seed=seed, name=name
        ),
    )  # fmt: skip
