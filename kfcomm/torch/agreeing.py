"""An optimizer of torch whose steps agree with those of the other ranks, by hooks on its own steps.

It stays the object that it was: schedulers, scalers and whoever else holds it need not be told. Its class becomes one
made of its own and `Agreeing`, as torch's ``fully_shard`` does it with modules.

Invariant: each step agrees once, on every rank, whoever calls it; tensors are given to a way to agree where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from kfcomm.common.arguments import checked_name
from kfcomm.errors import ConfigError
from kfcomm.sync.skin import Skin
from kfcomm.torch.outermost import is_outermost
from kfcomm.torch.state import broadcast_optimizer_state, broadcast_parameters
from kfcomm.train.agreement import Agreement, introduction
from kfcomm.train.procedure import Comm, Pending

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

Tensors = dict[str, torch.Tensor]
"""By the number of the group, and the place in it: ``0/3``."""


class Agreeing(torch.optim.Optimizer):  # type: ignore[misc]
    """What an optimizer has more, once it agrees with those of other ranks: see ``kfcomm.torch.optimizers``.

    It is an instance of its own class, too. A copy of it agrees with nobody.
    """

    _exchange: Exchange

    @property
    def agreement(self) -> Agreement:
        """The way to agree: see ``kfcomm.train``."""
        return self._exchange.agreement

    def agree(self) -> None:
        """Agree now on what ``step()`` would agree on; it does not do so again.

        After ``backward()``, on every rank, before anything that looks at gradients: clipping,
        ``GradScaler.unscale_`` and ``GradScaler.step``, which may leave out a step that others make.

        Raises:
            CollectiveError: an exchange failed.
            ConfigError: a gradient is sparse.
        """
        self._exchange.agree(self)

    def detach(self) -> None:
        """Be the optimizer of one rank again."""
        self._exchange.hook.remove()
        del self._exchange
        self.__class__ = _own_class(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Of a copy."""
        return _blank, (_own_class(self),), self.__getstate__()


class Exchange:
    """What happens in a step before the optimizer does anything.

    Attributes:
        agreement: the way to agree.
        hook: on the optimizer's steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, agreement: Agreement) -> None:
        self.agreement = agreement
        self.hook: RemovableHandle = optimizer.register_step_pre_hook(self.before_step)
        self._is_done = False
        self._is_shared = agreement.shares_gradients

    def agree(self, optimizer: torch.optim.Optimizer) -> None:
        """Models and gradients, now."""
        self._finish(optimizer, self._begin(optimizer))
        self._is_done = True

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Agree, unless the program has; with a closure, as soon as there are gradients."""
        if not is_outermost(optimizer):
            return None
        is_done, self._is_done = self._is_done, False
        closure = kwargs.get("closure") if len(args) < 2 else args[1]
        if closure is None:
            if not is_done:
                self._finish(optimizer, self._begin(optimizer))
            return None
        if is_done:
            raise ConfigError("a step with a closure agrees when that has made gradients: agree() is for steps without")
        agreeing = self._agreeing(optimizer, closure)
        return (args, {**kwargs, "closure": agreeing}) if len(args) < 2 else ((args[0], agreeing, *args[2:]), kwargs)

    def _begin(self, optimizer: torch.optim.Optimizer) -> Pending[Tensors]:
        return self.agreement.parameters(parameters_of(optimizer))

    def _finish(self, optimizer: torch.optim.Optimizer, model: Pending[Tensors] | None) -> None:
        """The gradients are there: put the agreed ones, and the agreed model, in their places."""
        parameters, given = parameters_of(optimizer), gradients_of(optimizer)
        gradients = self.agreement.gradients(given).wait()
        of = dict(zip(parameters, _each(optimizer), strict=True))
        for name, found in gradients.items():
            if found is not given[name]:
                of[name].grad = found
        if model is not None:
            for name, found in model.wait().items():
                if found.data_ptr() != parameters[name].data_ptr():
                    parameters[name].copy_(found)
        if self.agreement.shares_gradients and not self._is_shared:
            self._is_shared = True  # models are equal now, and stay so if what is done with gradients is
            broadcast_optimizer_state(optimizer, self.agreement.comm, name=f"{self.agreement.name}/state")

    def _agreeing(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure whose gradients are agreed on, each time; the model is, at the first."""
        begun = [self._begin(optimizer)]

        def agreed() -> Any:
            loss = closure()
            self._finish(optimizer, begun.pop() if begun else None)
            return self._mean(loss) if self.agreement.shares_gradients and loss is not None else loss

        return agreed

    def _mean(self, loss: Any) -> Any:
        """Of all ranks' losses: what looks at them, as a line search does, has to come to the same everywhere."""
        comm, name = self.agreement.comm, f"{self.agreement.name}/loss"
        found = comm.all_reduce(torch.as_tensor(loss).detach(), name=name, op="avg")
        return found if isinstance(loss, torch.Tensor) else float(found)


def agreeing(
    optimizer: torch.optim.Optimizer, comm: Comm, name: str, make: Callable[[Tensors, Tensors], Agreement]
) -> Agreeing:
    """Make an optimizer agree from now on; all ranks have the parameters of rank 0 then.

    Args:
        optimizer: one of torch's.
        comm: blocking.
        name: of the collectives.
        make: the way to agree, of the parameters, and of those that have gradients.

    Raises:
        CollectiveMismatch: on all ranks: they have different optimizers, or agree in different ways.
        ConfigError: it agrees already, or ``comm`` does not block; or on all ranks: their parameters differ, or a
            number is out of its range on one of them.
    """
    _check(optimizer, comm)
    name = checked_name(name)
    meeting = introduction(comm.rank, _said(optimizer), f"{name}/optimizer", "the ranks have different optimizers")
    Pending(comm, meeting).wait()
    parameters = parameters_of(optimizer)
    broadcast_parameters(parameters, comm, name=f"{name}/parameters")
    trained = {one: x for (one, x), own in zip(parameters.items(), _each(optimizer), strict=True) if own.requires_grad}
    agreement = make(parameters, trained)
    agreement.introduce().wait()
    own: Any = type(optimizer)
    made: Any = optimizer
    made._exchange = Exchange(optimizer, agreement)
    made.__class__ = type(own.__name__, (Agreeing, own), {"__module__": own.__module__})
    return made  # type: ignore[no-any-return]


def _check(optimizer: torch.optim.Optimizer, comm: Comm) -> None:
    if not isinstance(comm, Skin):
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
    """The gradients of those that have some, in their own memory.

    Raises:
        ConfigError: one is sparse.
    """
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
    """That which it had before it agreed."""
    return type(optimizer).__bases__[1]


def _blank(kind: Any) -> Any:
    """An optimizer whose state is to come."""
    return kind.__new__(kind)


def _said(optimizer: torch.optim.Optimizer) -> str:
    """The optimizer in words, which ranks compare."""
    numbers = {
        name: float(value) if isinstance(value, torch.Tensor) else value for name, value in optimizer.defaults.items()
    }
    given = ", ".join(f"{name}={value!r}" for name, value in numbers.items())
    each = _each(optimizer)
    return f"{type(optimizer).__name__}({given}) of {len(each)} parameters, {sum(one.numel() for one in each)} numbers"
