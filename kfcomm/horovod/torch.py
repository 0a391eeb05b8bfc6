"""The calls of Horovod's torch scripts, over one communicator of this process.

::

    import kfcomm.horovod.torch as hvd        # was: import horovod.torch as hvd

Names, arguments and defaults are Horovod's. Errors are kfcomm's. Not here: ``join`` and process sets; see "Move over
from Horovod" for what takes their place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from kfcomm.arrays.devices.cuda import nccl_version
from kfcomm.errors import ConfigError
from kfcomm.horovod import elastic
from kfcomm.horovod.world import communicator, init, is_initialized, local_rank, local_size, rank, shutdown, size
from kfcomm.torch import optimizers, state
from kfcomm.types import Op

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "Max", "Min", "Product", "Sum", "allgather",
    "allgather_object", "allreduce", "allreduce_", "allreduce_async", "barrier", "broadcast", "broadcast_",
    "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters", "communicator", "elastic", "init",
    "is_initialized", "local_rank", "local_size", "nccl_built", "poll", "rank", "shutdown", "size", "synchronize",
]  # fmt: skip

Average, Sum, Min, Max, Product = Op.AVG, Op.SUM, Op.MIN, Op.MAX, Op.PROD
Adasum = "adasum"


class Compression:
    """Element types of tensors on the wire."""

    none = None
    fp16 = "float16"
    bf16 = "bfloat16"


def allreduce(
    tensor: Any, average: bool | None = None, name: str | None = None, compression: str | None = None,
    op: str | None = None,
) -> Any:  # fmt: skip
    """The average, or what ``op`` makes, of all ranks' tensors, as a new tensor; ``average=False`` is ``op=Sum``."""
    return communicator().all_reduce(tensor, name, op=_op(average, op), wire_dtype=compression)


def allreduce_(tensor: Any, average: bool | None = None, name: str | None = None, op: str | None = None) -> Any:
    """``allreduce`` in place; returns the tensor."""
    return communicator().all_reduce(tensor, name, op=_op(average, op), out=tensor)


def allreduce_async(tensor: Any, average: bool | None = None, name: str | None = None, op: str | None = None) -> Any:
    """Begin an ``allreduce``; a handle for ``poll`` and ``synchronize``."""
    return communicator().all_reduce_async(tensor, name, op=_op(average, op))


def _op(average: bool | None, op: str | None) -> str:
    if average is not None and op is not None:
        raise ConfigError(f"expected average or op, got average={average!r} and op={op!r}")
    return (Sum if average is False else Average) if op is None else op


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


def nccl_built() -> bool:
    """Whether NCCL is there, with CuPy, so that tensors of different devices do not pass host memory."""
    try:
        return nccl_version() > 0
    except ConfigError:  # CuPy is missing
        return False


def DistributedOptimizer(  # noqa: N802  Horovod's
    optimizer: torch.optim.Optimizer, named_parameters: Any = None, compression: str | None = None,
    backward_passes_per_step: int = 1, op: str = Average, gradient_predivide_factor: float = 1.0,
) -> Any:  # fmt: skip
    """Average gradients in each ``step()``; returns the same object, after all ranks got rank 0's parameters.

    It gets Horovod's methods ``synchronize()``, which averages before the step, and ``skip_synchronize()``.
    ``kfcomm.torch.attach`` averages during the backward pass, which is faster, and has more compressions.

    Args:
        optimizer: of the model.
        named_parameters: not needed: parameters match by their place in the optimizer.
        compression: of `Compression`; with ``Average`` only.
        backward_passes_per_step: not needed: each ``step()`` averages what the passes before it have added up.
        op: ``Average`` or ``Adasum``.
        gradient_predivide_factor: not needed: gradients are divided once, by the number of ranks.

    Raises:
        ConfigError: see ``kfcomm.torch.optimizers.synchronous_sgd``.
    """
    made: Any = optimizers.synchronous_sgd(optimizer, communicator(), op=op, wire_dtype=compression)
    made.synchronize, made.skip_synchronize = made.agree, nullcontext
    return made
