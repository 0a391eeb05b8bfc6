"""The GPU of this process through CuPy: arrays, NCCL without kfcomm, and time on its streams."""

from __future__ import annotations

from collections.abc import Callable
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


class Direct:
    """NCCL, called as a program without kfcomm would: a group of this device alone."""

    def __init__(self) -> None:
        self._comm = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)

    def all_reduce(self, x: Any, out: Any, stream: Any) -> None:
        """Put a sum of float32 on the stream."""
        self._comm.allReduce(x.data.ptr, out.data.ptr, x.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr)

    def close(self) -> None:
        """Give it back."""
        self._comm.destroy()


class Clock:
    """Seconds on a stream, from the moment before something is called to where its results are ready there."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._first, self._last = cupy.cuda.Event(), cupy.cuda.Event()

    def start(self) -> None:
        """The stream is idle, and time begins."""
        self._stream.synchronize()
        self._first.record(self._stream)

    def elapsed_s(self) -> float:
        """Waits for what is on the stream by now. Only for a world of one, where no other rank needs this thread."""
        self._last.record(self._stream)
        self._last.synchronize()
        return float(cupy.cuda.get_elapsed_time(self._first, self._last)) / 1e3


def timed(clock: Clock, call: Callable[[], None]) -> float:
    """Seconds of a call and of what it puts on the stream."""
    clock.start()
    call()
    return clock.elapsed_s()
