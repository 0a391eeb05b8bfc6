"""Averages of buckets that are made in host memory by several blocking calls: compressed ones, Adasum on a device.

A bucket on a device is copied to the host and back, on the stream of its exchange.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kfcomm.types import override

if TYPE_CHECKING:
    from kfcomm.sync import Communicator
    from kfcomm.torch.buckets import Bucket

Arrays = Mapping[str, np.ndarray[Any, Any]]


class CompressorAverage(Protocol):
    """Way to average gradients, as ``kfcomm.compression`` has it."""

    def __call__(self, comm: Any, gradients: Arrays, *, name: str) -> Arrays:
        """The averages of arrays by name, in memory of their own or in that of the gradients."""


class HostAverage(threading.Thread):
    """Average of one bucket, in the place of an exact one's collective."""

    # A thread, as several blocking calls are made, for which the backward pass must not wait.

    def __init__(self, comm: Communicator, bucket: Bucket, averaging: CompressorAverage) -> None:
        super().__init__(name=f"kfcomm {bucket.name}", daemon=True)
        self._calls, self._bucket, self._averaging = _Calls(comm), bucket, averaging
        self._error: BaseException | None = None

    @override
    def run(self) -> None:
        try:
            with self._bucket.memory.aside():  # what else it reads from a device is ready there
                self._average()
        except BaseException as error:  # noqa: BLE001  `wait` raises it
            self._error = error

    def _average(self) -> None:
        bucket = self._bucket
        whole = bucket.memory.fetched(bucket.tensor)
        views = {one: view.numpy() for one, view in bucket.views_of(whole).items()}  # torch counts no writes here
        for name, found in self._averaging(self._calls, views, name=bucket.name).items():
            if found is not views[name]:
                views[name][...] = found
        bucket.memory.put(bucket.tensor, whole)

    def done(self) -> bool:
        """Whether it is over."""
        return not self.is_alive()

    def wait(self) -> None:
        """Wait for the end; raise the error of one that has failed."""
        self.join()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """End its call on every rank, and wait until it makes no more: the next pass makes calls by the same names."""
        self._calls.end()
        self.join()


class _Calls:
    """The blocking verbs of a communicator, which another thread can end.

    Raises:
        CancelledError: (each verb) they have been ended.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._lock = threading.Lock()
        self._is_over = False
        self._latest: Any = None

    def __getattr__(self, name: str) -> Any:
        begin = getattr(self._comm, f"{name}_async", None)
        if begin is None:
            return getattr(self._comm, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                if self._is_over:
                    raise CancelledError
                self._latest = handle = begin(*args, **kwargs)
            return handle.result()

        return call

    def end(self) -> None:
        """Cancel the call under way, and refuse more."""
        with self._lock:
            self._is_over = True
        if self._latest is not None:
            self._latest.cancel()


def adasum(comm: Communicator, gradients: Arrays, *, name: str) -> Arrays:
    """The adaptive sum of each gradient by itself."""
    views = [one.reshape(-1) for one in gradients.values()]
    comm.all_reduce(views, name, op="adasum", out=views)
    return gradients


def reduced(comm: Communicator, gradients: Arrays, *, name: str) -> Arrays:
    """The exact mean of each gradient."""
    found = comm.all_reduce_many(gradients, name=name, op="avg")
    return {one: found[one] for one in gradients}
