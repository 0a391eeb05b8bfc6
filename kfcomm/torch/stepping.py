"""Run of an algorithm of ``kfcomm.train`` in each step of an optimizer, before the optimizer's own step.

A ``GradScaler`` leaves a step out on a rank whose gradients are infinite, and other ranks would wait for it. So the
optimizer tells the scaler that it handles scales itself, as torch's fused optimizers do: then every step is made, the
algorithm runs on all ranks, and a step with infinite gradients updates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from kfcomm.errors import ConfigError
from kfcomm.torch.compiling import uncompiled
from kfcomm.torch.memory import is_on_device
from kfcomm.torch.reductions import is_elastic
from kfcomm.torch.state import broadcast_optimizer_state
from kfcomm.torch.steps import Closure, Withholding, hook_steps, mean_loss
from kfcomm.train.agreement import Agreement
from kfcomm.train.procedure import Pending

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from kfcomm.torch.driver import StepDriver

Tensors = dict[str, torch.Tensor]
"""By the number of the parameter group, and the place in it: ``0/3``."""


class StepExchange:
    """An algorithm in the steps of one optimizer.

    Args:
        optimizer: its parameters are exchanged.
        agreement: the algorithm.
        met: called at the beginning of each step, see `Comparison`.
        driver: of the steps; None where nothing is guarded or adapted.
        copies: the algorithm gets copies in host memory, see `needs_copies`.
    """

    syncs = True  # backward passes exchange nothing

    def __init__(
        self, optimizer: torch.optim.Optimizer, agreement: Agreement, met: Callable[[], object] = lambda: None,
        driver: StepDriver | None = None, *, copies: bool = False,
    ) -> None:  # fmt: skip
        self.agreement = agreement
        self._copies = copies
        self._met = met
        self._driver = driver
        self._optimizer = optimizer
        self._scaled = ScaledSteps(optimizer)
        self._hook: RemovableHandle = hook_steps(optimizer, self._before_step, self._around_step)
        self._is_done = False
        """Whether the program has called ``agree`` for this step."""
        self._is_shared = agreement.shares_gradients

    def __repr__(self) -> str:
        return repr(self.agreement)

    @property
    def is_left_out(self) -> bool:
        """Whether a ``GradScaler`` has found infinite gradients on this rank for the step under way."""
        return self._scaled.is_infinite

    @property
    def keeps_replicas(self) -> bool:
        """Whether the models of the ranks differ."""
        return self.agreement.keeps_replicas

    def agree(self) -> None:
        """Exchange models and gradients now, unless that was done since the latest step."""
        if not self._is_done:
            if self._driver is None or self._driver.judge(self.finish):
                self._finish(self._begin())
            self._is_done = True

    wait = agree

    def finish(self) -> None:
        """Nothing is under way between steps."""

    close = finish

    def remove(self) -> None:
        """Remove the hooks."""
        self._hook.remove()
        self._scaled.remove()

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """State of the algorithm."""
        return self.agreement.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the algorithm from a state."""
        self.agreement.load_state_dict(state)
        self._is_shared = self.agreement.shares_gradients

    def merging(self) -> Mapping[str, str]:
        """Conversions of the algorithm's values that differ between ranks."""
        return self.agreement.merging()

    # ---------------------------------------------------------------- the optimizer's step

    def _before_step(self) -> None:
        self._scaled.begin()
        is_done, self._is_done = self._is_done, False
        # Gradients are divided by the scale already.
        if self._driver is not None and not self._driver.begin(self.finish, scale=1.0):
            return
        if not is_done:
            self._finish(self._begin())
        self._scaled.leave_out(are_shared=self.agreement.shares_gradients)

    def _around_step(self) -> Callable[[Closure], Any]:
        if self._is_done:
            self._is_done = False
            raise ConfigError("a step with a closure agrees when that has made gradients: agree() is for steps without")
        # A model may be spread only once the gradients are judged.
        begun = [self._begin if self._driver is not None else _returning(self._begin())]

        def settled(loss: Any) -> Any:
            # Gradients each time that the closure has made them, the model the first time.
            self._finish(begun.pop()() if begun else None)
            if not self.agreement.shares_gradients:
                return loss
            return mean_loss(self.agreement.comm, loss, f"{self.agreement.name}/loss")

        if self._driver is None:
            return lambda closure: settled(closure())
        return self._driver.around(self.finish, settled)

    def _begin(self) -> Pending[Tensors]:
        self._met()
        return self.agreement.parameters(given_to(parameters_of(self._optimizer), copies=self._copies))

    def _finish(self, model: Pending[Tensors] | None) -> None:
        """Exchange gradients, and put the resulting ones and the resulting model in their places."""
        parameters = parameters_of(self._optimizer)
        given = given_to(gradients_of(self._optimizer), copies=self._copies)
        gradients = self.agreement.gradients(given).wait()
        of = dict(zip(parameters, each(self._optimizer), strict=True))
        for name, found in gradients.items():
            # An algorithm that leaves gradients alone returns the very tensors.
            if found is not given[name]:
                of[name].grad = found.to(of[name].device)
        if model is not None:
            put(model.wait(), parameters)
        if self.agreement.shares_gradients and not self._is_shared:
            self._is_shared = True  # models are equal now, and stay so with equal states
            broadcast_optimizer_state(self._optimizer, self.agreement.comm, name=f"{self.agreement.name}/state")


def _returning(pending: Pending[Tensors]) -> Callable[[], Pending[Tensors]]:
    return lambda: pending


class ScaledSteps:
    """Steps of an optimizer in which a ``GradScaler`` leaves scales and infinite gradients to the optimizer."""

    FLAG = "_step_supports_amp_scaling"

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._withholding = Withholding(optimizer)
        self._is_scaled = self.is_infinite = False
        self._former = getattr(optimizer, self.FLAG, False)
        setattr(optimizer, self.FLAG, True)
        self._hook = optimizer.register_step_post_hook(self._after_step)

    def remove(self) -> None:
        """Leave steps out again."""
        setattr(self._optimizer, self.FLAG, self._former)
        self._hook.remove()

    def begin(self) -> None:
        """Divide gradients by the scale, if a scaler makes the step and the program has not done it."""
        self._is_scaled, self.is_infinite = getattr(self._optimizer, "found_inf", None) is not None, False
        if not self._is_scaled:
            return
        scale, self.is_infinite = self._optimizer.grad_scale, bool(self._optimizer.found_inf)
        # The optimizer's own step is to find nothing left to do; the scaler deletes both attributes after it.
        self._optimizer.grad_scale = self._optimizer.found_inf = None
        if scale is not None:
            factor = float(scale.double().reciprocal().float())  # as the scaler has it
            for one in each(self._optimizer):
                if one.grad is not None:
                    one.grad.mul_(factor)

    @uncompiled
    def _after_step(self, *_: Any) -> None:
        self._withholding.end()

    def leave_out(self, *, are_shared: bool) -> None:
        """Let the step update nothing if gradients are infinite: this rank's own, or the shared ones."""
        if not self._is_scaled:
            return
        if are_shared:
            given = [one.grad for one in each(self._optimizer) if one.grad is not None]
            self.is_infinite = not all(bool(one.isfinite().all()) for one in given)
        if self.is_infinite:
            self._withholding.begin()


def needs_copies(parameters: Iterable[torch.Tensor], comm: Any, *, reads_peers: bool) -> bool:
    """Whether an algorithm gets copies in host memory of a model that is on a device.

    In an elastic job, since collectives of device memory do not survive the loss of a rank; of a model that is partly
    in host memory, since a batch of arrays is not; and where ranks read each other's models (``reads_peers``).
    """
    places = {is_on_device(one) for one in parameters}
    return True in places and (reads_peers or False in places or is_elastic(comm))


def given_to(tensors: Tensors, *, copies: bool) -> Tensors:
    """Return these tensors as an algorithm gets them."""
    return {name: one.cpu() for name, one in tensors.items()} if copies else tensors


def put(found: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
    """Copy a resulting model to the parameters."""
    for name, one in found.items():
        # Nothing to copy where the result is the parameter's own memory.
        if one.data_ptr() != parameters[name].data_ptr():
            parameters[name].copy_(one)


def parameters_of(optimizer: torch.optim.Optimizer) -> Tensors:
    """The parameters, in their own memory."""
    return {
        f"{number}/{place}": one.detach()
        for number, group in enumerate(optimizer.param_groups)
        for place, one in enumerate(group["params"])
    }


def trained_of(optimizer: torch.optim.Optimizer) -> Tensors:
    """The parameters that get gradients."""
    found = zip(parameters_of(optimizer).items(), each(optimizer), strict=True)
    return {name: one for (name, one), own in found if own.requires_grad}


def gradients_of(optimizer: torch.optim.Optimizer) -> Tensors:
    """The gradients that exist, in their own memory."""
    found = {}
    for name, one in zip(parameters_of(optimizer), each(optimizer), strict=True):
        if one.grad is not None:
            if one.grad.layout is not torch.strided:
                raise ConfigError(f"the gradient of parameter {name} is sparse: only dense ones can be agreed on")
            found[name] = one.grad.detach()
    return found


def each(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All parameters, in the order of the groups."""
    return [one for group in optimizer.param_groups for one in group["params"]]
