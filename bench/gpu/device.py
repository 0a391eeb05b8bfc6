"""The GPU of this process, without kfcomm: arrays of CuPy, NCCL called directly, and torch.distributed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import cupy
import numpy as np
from cupy.cuda import nccl


def filled(count: int, value: float) -> Any:
    """A flat float32 array on the device, there for every stream. No kernel is compiled for it."""
    made = cupy.empty(count, np.float32)
    made.set(np.full(count, value, np.float32))
    cupy.cuda.Device().synchronize()
    return made


def timed(call: Callable[[], object], stream: Any) -> float:
    """Seconds of a call, and of what it puts on a stream."""
    stream.synchronize()
    begun_s = time.perf_counter()
    call()
    stream.synchronize()
    return time.perf_counter() - begun_s


class Direct:
    """NCCL, called as a program without kfcomm would: a group of this device alone."""

    def __init__(self) -> None:
        self._comm = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)

    def all_reduce(self, xs: Sequence[Any], outs: Sequence[Any], stream: Any) -> None:
        """Put sums of float32 on the stream, one after the other."""
        for x, out in zip(xs, outs, strict=True):
            self._comm.allReduce(x.data.ptr, out.data.ptr, x.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr)

    def close(self) -> None:
        """Give it back."""
        self._comm.destroy()


class Torch:
    """torch.distributed in this process.

    Args:
        backend: ``nccl`` or ``gloo``.
        meeting: a file that is not there, where its ranks meet.
        rank, size: in its world.
    """

    def __init__(self, backend: str, meeting: str, rank: int = 0, size: int = 1) -> None:
        self._torch = import_module("torch")
        self._distributed = import_module("torch.distributed")
        self._distributed.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=size)

    @staticmethod
    def is_here() -> bool:
        """Whether torch is installed, and can use the GPU."""
        return find_spec("torch") is not None and bool(import_module("torch").cuda.is_available())

    def tensors(self, counts: Sequence[int]) -> list[Any]:
        """Tensors of zeros, whose sums are zeros."""
        return [self._torch.zeros(count, device="cuda") for count in counts]

    def all_reduce(self, tensors: Sequence[Any]) -> float:
        """Seconds of sums in place, one call each, until the device is done."""
        synchronize = self._torch.cuda.synchronize
        synchronize()
        begun_s = time.perf_counter()
        for tensor in tensors:
            self._distributed.all_reduce(tensor)
        synchronize()
        return time.perf_counter() - begun_s

    def close(self) -> None:
        """Leave its world."""
        self._distributed.destroy_process_group()
