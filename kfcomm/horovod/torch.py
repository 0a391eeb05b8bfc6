"""The calls of Horovod's torch scripts, over one communicator of this process.

::

    import kfcomm.horovod.torch as hvd        # was: import horovod.torch as hvd

Names, arguments and defaults are Horovod's. Errors are kfcomm's. Not here: ``elastic``, ``join`` and process sets; see
"Move over from Horovod" for what takes their place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

import kfcomm.sync
from kfcomm.errors import ConfigError
from kfcomm.sync.communicator import Communicator
from kfcomm.torch import optimizers, state
from kfcomm.types import Op

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "Max", "Min", "Product", "Sum", "allgather",
    "allgather_object", "allreduce", "allreduce_", "allreduce_async", "barrier", "broadcast", "broadcast_",
    "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters", "communicator", "init", "is_initialized",
    "local_rank", "local_size", "poll", "rank", "shutdown", "size", "synchronize",
]  # fmt: skip

Average, Sum, Min, Max, Product = Op.AVG, Op.SUM, Op.MIN, Op.MAX, Op.PROD
Adasum = "adasum"


class Compression:
    """Element types of tensors on the wire."""

    none = None
    fp16 = "float16"
    bf16 = "bfloat16"


class _World:
    comm: Communicator | None = None


_world = _World()
"""Horovod's functions take no communicator: a process has one."""


def init() -> None:
    """Join the world of the launcher. May be called again."""
    if _world.comm is None:
        _world.comm = kfcomm.sync.init()


def shutdown() -> None:
    """Leave the world. May be called again."""
    comm, _world.comm = _world.comm, None
    if comm is not None:
        comm.close()


def is_initialized() -> bool:
    """Whether ``init`` was called."""
    return _world.comm is not None


def communicator() -> Communicator:
    """The communicator behind these functions: for strategies, statistics and dumps.

    Raises:
        ConfigError: ``init`` was not called.
    """
    if _world.comm is None:
        raise ConfigError("Horovod's functions need a world: call hvd.init() first")
    return _world.comm


def rank() -> int:
    """Rank of this process."""
    return communicator().rank


def size() -> int:
    """Number of ranks."""
    return communicator().size


def local_rank() -> int:
    """Rank of this process on its host."""
    return communicator().local_rank


def local_size() -> int:
    """Number of ranks on this host."""
    return communicator().local_size


def allreduce(tensor: Any, name: str | None = None, compression: str | None = None, op: str = Average) -> Any:
    """The average, or what ``op`` makes, of all ranks' tensors, as a new tensor."""
    return communicator().all_reduce(tensor, name, op=op, wire_dtype=compression)


def allreduce_(tensor: Any, name: str | None = None, op: str = Average) -> Any:
    """``allreduce`` in place; returns the tensor."""
    return communicator().all_reduce(tensor, name, op=op, out=tensor)


def allreduce_async(tensor: Any, name: str | None = None, op: str = Average) -> Any:
    """Begin an ``allreduce``; a handle for ``poll`` and ``synchronize``."""
    return communicator().all_reduce_async(tensor, name, op=op)


def allgather(tensor: Any, name: str | None = None) -> Any:
    """The tensors of all ranks, one after the other along the first dimension, in which they may differ."""
    return communicator().all_gather(tensor, name, concat=True)


def broadcast(tensor: Any, root_rank: int, name: str | None = None) -> Any:
    """The tensor of one rank, as a new tensor."""
    return communicator().broadcast(tensor, root_rank, name)


def broadcast_(tensor: Any, root_rank: int, name: str | None = None) -> Any:
    """Copy the tensor of one rank to all ranks, in place; returns the tensor."""
    return communicator().broadcast(tensor, root_rank, name, out=tensor)


def barrier() -> None:
    """Wait for all ranks."""
    communicator().barrier()


def poll(handle: Any) -> bool:
    """Whether a call that was begun is done."""
    return bool(handle.done())


def synchronize(handle: Any) -> Any:
    """Wait for a call that was begun, and return its result."""
    return handle.wait()


def broadcast_parameters(params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int = 0) -> None:
    """Copy tensors of one rank to all ranks, in place: ``kfcomm.torch.broadcast_parameters``."""
    state.broadcast_parameters(params, communicator(), root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Copy the state of one rank's optimizer: ``kfcomm.torch.broadcast_optimizer_state``."""
    state.broadcast_optimizer_state(optimizer, communicator(), root_rank)


def broadcast_object(obj: Any, root_rank: int = 0) -> Any:
    """The object of one rank, without pickling: ``kfcomm.torch.broadcast_object``."""
    return state.broadcast_object(obj, communicator(), root_rank)


def allgather_object(obj: Any) -> list[Any]:
    """The objects of all ranks, without pickling: ``kfcomm.torch.all_gather_object``."""
    return state.all_gather_object(obj, communicator())


def DistributedOptimizer(  # noqa: N802  Horovod's
    optimizer: torch.optim.Optimizer, named_parameters: Any = None, compression: str | None = None, op: str = Average,
) -> Any:  # fmt: skip
    """Average gradients in each ``step()``; returns the same object, after all ranks got rank 0's parameters.

    ``kfcomm.torch.attach`` does it during the backward pass, which is faster, and takes a compression.

    Args:
        optimizer: of the model.
        named_parameters: not needed: parameters match by their place in the optimizer.
        compression: must be None.
        op: ``Average`` or ``Adasum``.

    Raises:
        ConfigError: a compression was asked for; further see ``kfcomm.torch.optimizers.synchronous_sgd``.
    """
    if compression is not None:
        raise ConfigError(
            f"DistributedOptimizer(compression={compression!r}) is not supported: call "
            f"kfcomm.torch.attach(model, optimizer, hvd.communicator(), compression={compression!r})"
        )
    return optimizers.synchronous_sgd(optimizer, communicator(), op=op)
