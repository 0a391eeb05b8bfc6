"""Comparison of attachments between ranks: a difference is an error on all ranks before any exchange."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch

from kfcomm.errors import ConfigError
from kfcomm.torch.buckets import Named, dtype_problem
from kfcomm.torch.memory import problem_of_devices
from kfcomm.torch.reductions import aside, is_elastic
from kfcomm.torch.state import check_alike
from kfcomm.torch.tensors import read


class Comparison:
    """Comparison of the ranks of an attachment, when they first meet.

    In a fixed world that is when they attach. The ranks of an elastic world change, and one that joins must not wait
    for the others, which train: there they compare in the first pass or step after a change.

    Attributes:
        about: descriptions by name.
    """

    def __init__(self, comm: Any, name: str, about: dict[str, str]) -> None:
        self._comm = comm
        self._name = name
        self.about = about
        self._is_elastic = is_elastic(comm)
        self._uids: Any = None

    def look(self) -> bool:
        """Compare if the ranks have changed; whether they have.

        Raises:
            ConfigError: on all ranks: they differ; or this is an elastic world in which no ``Elastic`` is open.
        """
        if not self._is_elastic or self._comm.births == self._uids:
            return False
        if not self._comm.outlives:
            raise ConfigError(
                f"{self._name!r} is attached in an elastic job: train in the steps of an Elastic, which gives all "
                "ranks the same state: for step in attached.steps(), or Elastic(comm, State(training=attached))"
            )
        check_alike(self._comm, aside(self._comm, self._name), self.about, None)
        self._uids = self._comm.births
        return True


def parameters_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Named]:
    """Parameters of the optimizer that get gradients, with their names, in the order of the model."""
    wanted = {one for group in optimizer.param_groups for one in group["params"] if one.requires_grad}
    found = [(name, parameter) for name, parameter in model.named_parameters() if parameter in wanted]
    problem = problem_of_devices((*model.named_parameters(), *model.named_buffers()))
    if problem is not None:
        raise ConfigError(problem)
    if not found:
        raise ConfigError("the optimizer has no parameter of the model that gets a gradient")
    if len(found) < len(wanted):
        raise ConfigError(f"{len(wanted) - len(found)} parameters of the optimizer are not the model's")
    for name, parameter in found:
        if (problem := dtype_problem(parameter)) is not None:
            raise ConfigError(f"the gradient of {name} cannot be averaged: {problem}")
    return found


def described_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], *, with_numbers: bool
) -> dict[str, str]:
    """Description of an optimizer for comparison: its class, and the parameters of its groups.

    ``with_numbers``: also the options of the groups, and the state of each parameter. A rank that joins gets these.
    """
    said = {"optimizer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        own = {key: _described(value) for key, value in group.items() if with_numbers and key != "params"}
        own["params"] = ", ".join(names.get(one, "another") for one in group["params"])
        said[f"group {number} of the optimizer"] = str(own)
    for parameter, name in names.items():
        state = optimizer.state.get(parameter)
        if state and with_numbers:
            said[f"the optimizer's state of {name}"] = str({key: _described(value) for key, value in state.items()})
    return said


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    if value.numel() < 2:
        return repr(value.tolist())
    if value.device.type != "cpu":
        return f"{tuple(value.shape)}"
    return f"{tuple(value.shape)}, checksum {zlib.crc32(read(value, as_bytes=True).view('uint8')):08x}"
