"""Arrays on the device for tests, made without any kernel that would have to be compiled, and streams that are held up.

CuPy is imported when something here is called, so that a machine without it can collect the tests.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

import numpy as np

from tests.processes.stage import HANG_S


def library(name: str) -> Any:
    """Import a framework without the warnings of its import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return __import__(name)


def on_device(values: Any) -> Any:
    """A CuPy array of these values, there for every stream."""
    cupy = library("cupy")
    values = np.asarray(values)
    made = cupy.empty(values.shape, values.dtype)
    made.set(values)
    cupy.cuda.get_current_stream().synchronize()
    return made


def like(x: Any) -> Any:
    """A CuPy array of the same shape and dtype with zeros in it."""
    return on_device(np.zeros(x.shape, x.dtype))


def new_stream() -> Any:
    """A stream that waits for no other by itself."""
    return library("cupy").cuda.Stream(non_blocking=True)


def copy(source: Any, target: Any, stream: Any) -> None:
    """Put a copy of all of ``source`` on a stream."""
    target.data.copy_from_device_async(source.data, source.nbytes, stream)


class Gate:
    """Holds up a stream: later work on it begins when `open` is called."""

    def __init__(self, stream: Any) -> None:
        self._opened = threading.Event()
        # a gate that nobody opens ends a test as a failure, not as a hang
        stream.launch_host_func(lambda opened: opened.wait(HANG_S), self._opened)

    @property
    def is_open(self) -> bool:
        """Whether it was opened."""
        return self._opened.is_set()

    def open(self) -> None:
        """Let the stream go on."""
        self._opened.set()


class Hog:
    """Takes the memory of the device but for ``left_nbytes``, as another program may; a context manager."""

    def __init__(self, left_nbytes: int) -> None:
        self._runtime = library("cupy").cuda.runtime
        self._left_nbytes = left_nbytes
        self._held: list[int] = []

    def __enter__(self) -> None:
        library("cupy").get_default_memory_pool().free_all_blocks()
        free_nbytes, _ = self._runtime.memGetInfo()
        piece_nbytes = free_nbytes - self._left_nbytes
        while piece_nbytes >= 1 << 20:
            try:
                self._held.append(self._runtime.malloc(piece_nbytes))
            except self._runtime.CUDARuntimeError:  # fragments: take them in smaller pieces
                piece_nbytes //= 2
            else:
                piece_nbytes = min(piece_nbytes, self._runtime.memGetInfo()[0] - self._left_nbytes)

    def __exit__(self, *_: object) -> None:
        for pointer in self._held:
            self._runtime.free(pointer)
