"""Comparison between ranks when they attach a model: every difference that would make replicas differ later."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kfcomm.errors import ConfigError
from kfcomm.torch.buckets import dtype_problem
from kfcomm.torch.tensors import read

Named = tuple[str, torch.Tensor]


def parameters_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Named]:
    """Parameters of the optimizer that get gradients, with their names, in the order of the model.

    Raises:
        ConfigError: the optimizer has none, one is not the model's, or one cannot be averaged.
    """
    wanted = {one for group in optimizer.param_groups for one in group["params"] if one.requires_grad}
    found = [(name, parameter) for name, parameter in model.named_parameters() if parameter in wanted]
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if parameter.device.type != "cpu":
            raise ConfigError(
                f"parameter {name} is not in host memory: attach is for models on the CPU, not on "
                f"{parameter.device.type!r}"
            )
    if not found:
        raise ConfigError("the optimizer has no parameter of the model that gets a gradient")
    if len(found) < len(wanted):
        raise ConfigError(f"{len(wanted) - len(found)} parameters of the optimizer are not the model's")
    for name, parameter in found:
        if (problem := dtype_problem(parameter)) is not None:
            raise ConfigError(f"the gradient of {name} cannot be averaged: {problem}")
    return found


def optimizer_said(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> dict[str, str]:
    """An optimizer in words: its class, the numbers of its groups, and its state of each parameter."""
    said = {"optimizer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        own = {key: _said(value) for key, value in group.items() if key != "params"}
        own["params"] = ", ".join(names.get(one, "another") for one in group["params"])
        said[f"group {number} of the optimizer"] = str(own)
    for parameter, name in names.items():
        state = optimizer.state.get(parameter)
        if state:
            said[f"the optimizer's state of {name}"] = str({key: _said(value) for key, value in state.items()})
    return said


def _said(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    if value.numel() < 2:
        return repr(value.tolist())
    if value.device.type != "cpu":
        return f"{tuple(value.shape)}"
    return f"{tuple(value.shape)}, checksum {zlib.crc32(read(value, as_bytes=True).view('uint8')):08x}"


def title(name: str, part: Sequence[Named]) -> str:
    """Of a bucket, for people who look at what hangs or takes long."""
    first = f"{name}/{part[0][0]}"
    return first if len(part) == 1 else f"{first} and {len(part) - 1} more"
