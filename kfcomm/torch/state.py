"""The state of a program becomes the same on all ranks: parameters and buffers of models, states of optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from kfcomm.arguments import checked_name
from kfcomm.errors import ConfigError
from kfcomm.torch.objects import broadcast_object

if TYPE_CHECKING:
    from kfcomm.sync import Communicator


def broadcast_parameters(
    parameters: Mapping[str, Any] | Iterable[tuple[str, Any]], comm: Communicator, root: int = 0, *,
    name: str = "parameters",
) -> None:  # fmt: skip
    """Every rank's tensors become those of rank ``root``, in place: as Horovod's function of this name.

    Args:
        parameters: ``model.state_dict()`` or ``model.named_parameters()``; the same names, shapes and dtypes on every
            rank. What is no tensor stays as it is.
        comm: blocking.
        root: rank whose values they get.
        name: of the collective.

    Raises:
        ConfigError: on all ranks, if they do not give the same tensors.

    Cost: the bytes of the tensors; small ones travel together.
    """
    name = checked_name(name)
    items = parameters.items() if isinstance(parameters, Mapping) else parameters
    tensors = {one: value.detach() for one, value in items if isinstance(value, torch.Tensor)}
    about = [f"{one} {tuple(tensor.shape)} {tensor.dtype}" for one, tensor in tensors.items()]
    if not comm.consensus(about, name=f"{name}/which"):
        raise ConfigError(f"the ranks do not give the same tensors to {name!r}: names, shapes or dtypes differ")
    places = {(one.data_ptr(), one.shape, one.stride()): one for one in tensors.values() if one.numel()}
    if places:
        found = list(places.values())
        comm.broadcast(found, root, name=name, out=found)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, comm: Communicator, root: int = 0, *, name: str = "optimizer"
) -> None:
    """Every rank's optimizer gets the state and the groups of rank ``root``'s: as Horovod's function of this name.

    Args:
        optimizer: over the same parameters on every rank; it may have no state yet.
        comm: blocking.
        root: rank in the group.
        name: of the collective.

    Raises:
        ConfigError: the state holds something that cannot be sent, see ``broadcast_object``.
    """
    state = broadcast_object(optimizer.state_dict() if comm.rank == root else None, comm, root, name=name)
    if comm.rank != root:
        optimizer.load_state_dict(state)
