"""State of an attached model and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kfcomm.common.arguments import hint
from kfcomm.errors import ConfigError

MEAN = "mean"


class TrainedTensors:
    """Parameters and buffers of a model, and its optimizer's state. ``has_replicas``: they differ between ranks."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, has_replicas: Callable[[], bool]
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._has_replicas = has_replicas

    def state_dict(self) -> dict[str, Any]:
        """Tensors in their own memory, and options of the optimizer's groups."""
        told = self._optimizer.state_dict()
        # Groups hold options, which are the same on all ranks: a mean would round them.
        return {
            "model": tensors_of(self._model),
            "optimizer": {number: _counted(one) for number, one in told["state"].items()},
            "groups": told["param_groups"],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy the numbers to the tensors that there are, and load the optimizer.

        Raises:
            ConfigError: the model has other tensors.
        """
        load_tensors(self._model, state["model"])
        states = {number: _uncounted(one) for number, one in state["optimizer"].items()}
        self._optimizer.load_state_dict({"state": states, "param_groups": state["groups"]})

    def merging(self) -> dict[str, str]:
        """Models and momenta become the mean where ranks have different ones."""
        return {"model": MEAN, "optimizer": MEAN} if self._has_replicas() else {}


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and all buffers by name; one of several names for the same tensor."""
    return {name: one.detach() for name, one in (*model.named_parameters(), *model.named_buffers())}


def load_tensors(model: torch.nn.Module, given: Mapping[str, Any]) -> None:
    """Copy numbers to the model's tensors; nothing is copied unless all fit.

    Raises:
        ConfigError: names or shapes differ.
    """
    own = tensors_of(model)
    for name in (*own, *given):
        if name not in own or name not in given:
            here, there, near = ("has no", "does", hint(name, own)) if name in given else ("has a", "does not", "")
            raise ConfigError(f"the state does not fit the model: the model {here} {name!r}, the state {there}{near}")
        if own[name].shape != torch.as_tensor(given[name]).shape:
            raise ConfigError(
                f"the state does not fit the model: {name} is {tuple(own[name].shape)} here and "
                f"{tuple(given[name].shape)} in the state"
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(torch.as_tensor(given[name]))


def _counted(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state of one parameter, with its count of steps as a whole number, which a mean leaves alone."""
    step: Any = state.get("step")
    is_count = isinstance(step, torch.Tensor) and step.is_floating_point() and step.numel() == 1
    return {**state, "step": step.to(torch.int64)} if is_count else dict(state)


def _uncounted(state: Mapping[str, Any]) -> dict[str, Any]:
    step: Any = state.get("step")
    is_count = isinstance(step, torch.Tensor) and step.dtype == torch.int64
    return {**state, "step": step.to(torch.get_default_dtype())} if is_count else dict(state)
