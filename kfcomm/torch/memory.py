"""Memory of gradients: the host's, or a device's with the streams that use it.

On a device a call is made on a stream of its own, of high priority, which waits for the gradients by an event. When its
handle is done, the stream of the program waits for its result by another. So the host waits for neither, and kernels of
the backward pass run beside the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kfcomm.arrays.dtypes import dtype_of
from kfcomm.torch.reductions import RestartableReduction, is_elastic

if TYPE_CHECKING:
    from kfcomm.sync import Communicator

URGENT = -1
"""Priority of a stream, as torch counts: kernels on it run before those on others."""


def streams_of(device: torch.device) -> Any:
    """The module of torch with the streams of a device; None for host memory."""
    return None if device.type == "cpu" else torch.get_device_module(device)


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in the memory of a device."""
    return streams_of(tensor.device) is not None


def problem_of_devices(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The reason why a model with these tensors cannot be attached; None if it can."""
    devices: dict[torch.device, str] = {}
    for name, tensor in tensors:
        if tensor.device.type not in ("cpu", "cuda"):
            return f"{name} is on device {str(tensor.device)!r}: attach is for models on the CPU and one CUDA device"
        if is_on_device(tensor):
            devices.setdefault(tensor.device, name)
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        return f"the model is on several devices ({places}): attach is for models on the CPU and one CUDA device"
    return None


@dataclass(frozen=True, slots=True)
class BucketBuffer:
    """Memory of a bucket.

    Attributes:
        flat: as the verbs take it.
        tensor: the same memory.
        is_local: all ranks are on one host, where nothing is gained by priorities.
    """

    flat: Any
    tensor: torch.Tensor
    is_local: bool


class HostGradients:
    """Host memory; memory that all ranks read and write in place, if they are on one host."""

    is_on_device = False

    def allocate(self, comm: Communicator, count: int, dtype: torch.dtype) -> BucketBuffer:
        """New memory, of zeros, for so many numbers."""
        flat, is_shared = _memory(comm, count, dtype_of(str(dtype).removeprefix("torch.")))
        flat[:] = 0
        return BucketBuffer(flat, torch.from_numpy(flat.view("uint8")).view(dtype), is_shared)

    def origin(self) -> None:
        """No stream: a gradient is there when its hook is called."""

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Nothing."""
        yield

    aside = leaving

    def arrived(self) -> None:
        """Nothing: a result is there when its handle is done."""

    def fetched(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def put(self, tensor: torch.Tensor, given: torch.Tensor) -> None:
        """Nothing: they are the same."""


class DeviceMemory:
    """Memory of one device, and a stream for the exchanges of one attachment."""

    is_on_device = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = streams_of(device)
        self._side = self._streams.Stream(device=device, priority=URGENT)

    def allocate(self, comm: Communicator, count: int, dtype: torch.dtype) -> BucketBuffer:
        """New memory, of zeros, for so many numbers."""
        tensor = torch.zeros(count, dtype=dtype, device=self._device)
        return BucketBuffer(tensor, tensor, comm.local_size == comm.size)

    def origin(self) -> Any:
        """The stream on which a gradient has been made: autograd runs a node on the stream of its forward pass."""
        return self._streams.current_stream(self._device)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Work in the block on the stream of the exchanges."""
        with self._streams.stream(self._side):
            yield

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Make calls in the block begin when the work of the program is done that is on its streams now."""
        self._side.wait_stream(self._streams.current_stream(self._device))
        with self.aside():
            yield

    def gather(self, origins: Iterable[Any]) -> None:
        """Let the current stream wait for those of all gradients."""
        current = self._streams.current_stream(self._device)
        for origin in origins:
            if origin != current:
                current.wait_stream(origin)

    def arrived(self) -> None:
        """Let the current stream wait for calls that are done."""
        self._streams.current_stream(self._device).wait_stream(self._side)

    def fetched(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, for which the calling thread waits."""
        # From pinned memory the copy back need not be waited for; torch reuses it when that is done.
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._device.type == "cuda")
        with self.aside():
            host.copy_(tensor, non_blocking=True)
        event = self._streams.Event(blocking=True)  # the thread sleeps
        event.record(self._side)
        event.synchronize()
        return host

    def put(self, tensor: torch.Tensor, given: torch.Tensor) -> None:
        """Copy to the device's memory, on the stream of the exchanges."""
        with self.aside():
            tensor.copy_(given, non_blocking=True)


class RoundedAverage:
    """Average of a bucket on a device whose numbers travel in a smaller type.

    Args:
        memory: of the bucket.
        whole: the bucket.
        wire_dtype: name of the type.
        make: makes the collective of a tensor, in place.
    """

    def __init__(
        self, memory: DeviceMemory, whole: torch.Tensor, wire_dtype: str,
        make: Callable[[torch.Tensor], RestartableReduction],
    ) -> None:  # fmt: skip
        self._memory, self._whole = memory, whole
        self._rounded = torch.empty_like(whole, dtype=getattr(torch, wire_dtype))
        self._reduction = make(self._rounded)
        self._is_back = True

    def start(self) -> None:
        """Round, and begin; within ``DeviceMemory.leaving``."""
        self._rounded.copy_(self._whole)
        self._is_back = False
        self._reduction.start()

    def done(self) -> bool:
        """Whether it is over."""
        return self._reduction.done()

    def wait(self) -> None:
        """Wait for the end, and put the average in its place, once."""
        self._reduction.wait()
        if not self._is_back:
            self._is_back = True
            self._memory.put(self._whole, self._rounded)

    def cancel(self) -> None:
        """End it on every rank."""
        self._reduction.cancel()


def squared_norm_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Σ x² as a tensor of float64 on the device, without waiting for it; infinite only where an element is."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return torch.linalg.vector_norm(real.detach(), dtype=torch.float64).square()


def _memory(comm: Communicator, count: int, dtype: np.dtype[Any]) -> tuple[np.ndarray[Any, Any], bool]:
    """Memory as of ``comm.empty``, without its warning if ranks share none; and whether they share it."""
    # Shared memory is of one epoch and its ranks; in an elastic world a bucket lasts longer.
    is_shared = comm.local_size == comm.size and not is_elastic(comm)
    heaps = comm._session.network.heaps() if is_shared else None
    found = None if heaps is None else heaps.empty(count * dtype.itemsize)
    return (np.empty(count, dtype), False) if found is None else (found.view(dtype), True)
