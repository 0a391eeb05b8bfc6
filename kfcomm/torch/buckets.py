"""Gradients that travel together: the memory of each, and its average.

A bucket is flat memory as ``comm.empty`` gives it, and the gradients of its parameters are views of it: on one host
ranks read and write them in place. A gradient that has a bucket to itself is even read from the tensor that autograd
has made, so that nothing is copied.

Steps and ranks differ in which parameters have a gradient. `marks` tell all ranks for which parameters any rank has
one; the others are left alone, as a single process leaves them alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kfcomm.arrays import adapt, dtype_of
from kfcomm.arrays.dtypes import SUPPORTED_NAMES, unsupported
from kfcomm.errors import ConfigError
from kfcomm.torch.compression import Compression, Compressor, GradientAverage
from kfcomm.torch.reductions import RestartableReduction, is_elastic, reduction
from kfcomm.types import override

if TYPE_CHECKING:
    from kfcomm.sync import Communicator

Named = tuple[str, torch.Tensor]

ALIGNED_NBYTES = 64
"""Gradients begin at multiples of this, as torch's own tensors do."""


@dataclass(eq=False, slots=True)
class BucketPlace:
    """Memory of the gradient of one parameter."""

    name: str  # of the parameter
    parameter: torch.Tensor
    view: torch.Tensor  # memory of its gradient, in the bucket
    has_come: bool = False  # a backward pass has brought some of it since it was averaged last
    is_here: bool = False  # the backward pass under way has brought it
    is_used: bool = False  # any rank has a gradient; known when the marks have arrived

    @property
    def is_foreign(self) -> bool:
        """Whether the program has put a tensor of its own in the place of the gradient."""
        gradient = self.parameter.grad
        return gradient is not None and not self.holds(gradient)

    def collect(self) -> None:
        """Make the memory hold this rank's contribution: its gradient, or zeros."""
        gradient = self.parameter.grad
        if gradient is None:
            self.view.zero_()
        elif not self.holds(gradient):
            with torch.no_grad():
                self.view.copy_(gradient)
            self.show()

    def show(self) -> None:
        """Make the memory ``parameter.grad``, by a new tensor, so that a tensor kept by the program is noticed."""
        gradient = self.parameter.grad
        if gradient is None or not self.holds(gradient):
            self.parameter.grad = self.view.detach()

    def take(self) -> torch.Tensor | None:
        """The tensor that autograd has made, if it is elsewhere and contiguous; it is replaced by the memory."""
        gradient: torch.Tensor | None = self.parameter.grad
        if gradient is None or self.holds(gradient) or not gradient.is_contiguous():
            return None
        self.parameter.grad = self.view.detach()
        return gradient.detach()

    def holds(self, gradient: torch.Tensor) -> bool:
        """Whether a tensor is this memory."""
        return bool(gradient.data_ptr() == self.view.data_ptr() and gradient.stride() == self.view.stride())


COMPRESSED = (torch.float16, torch.float32, torch.float64)


class Bucket:
    """Some gradients of one dtype, averaged together; in shared memory if all ranks are on one host."""

    def __init__(self, comm: Communicator, parameters: Sequence[Named], name: str, average: GradientAverage) -> None:
        self._dtype = parameters[0][1].dtype
        if average.compressor is not None and self._dtype not in COMPRESSED:
            raise ConfigError(f"{parameters[0][0]} is of {self._dtype}: float16, float32 and float64 can be compressed")
        self._begins = [0, *accumulate(_room(parameter) for _, parameter in parameters)]
        self._comm = comm
        self.name = name
        self.places = [BucketPlace(one, parameter, parameter.detach()) for one, parameter in parameters]
        self.nbytes = sum(parameter.numel() for _, parameter in parameters) * self._dtype.itemsize
        self.is_begun = False  # their average is under way, or has arrived
        self.average = average
        self.is_exact = average.compressor is None and average.op == "avg"  # else it is not the mean
        self._missing = len(self.places)
        self._exchange: RestartableReduction | CompressedAverage | None = None
        """Average under way."""
        self._persistent: RestartableReduction | None = None
        self._wire_dtype: Any = None
        """Of the persistent collective."""
        self._source: np.ndarray[Any, Any] | None = None
        """Source of the latest average. Kept until the next gradient exists: else that gets new pages in each step."""
        self._take_memory()

    def watch(self, model: torch.nn.Module) -> list[Any]:
        """Record what its gradients are made of, if its compression needs it; returns the hooks."""
        return self.average.watch(model, [place.name for place in self.places])

    def __repr__(self) -> str:
        return f"<Bucket {self.name}, {len(self.places)} gradients, {self.nbytes} bytes>"

    def _take_memory(self) -> None:
        count = self._begins[-1] if len(self.places) > 1 else self.places[0].parameter.numel()
        self._flat, self.is_shared = _memory(self._comm, count, dtype_of(str(self._dtype).removeprefix("torch.")))
        self._flat[:] = 0
        self._tensor = torch.from_numpy(self._flat.view("uint8")).view(self._dtype)
        for place, begin in zip(self.places, self._begins, strict=False):
            parameter = place.parameter
            place.view = self._tensor[begin : begin + parameter.numel()].view(parameter.shape)
        self._exchange = self._persistent = None
        # Tensors of the program over this memory raise the number later: see `prepare`.
        self._num_users = self._users()

    def _users(self) -> int:
        """Number of tensors in the memory."""
        count: int = torch._C._storage_Use_Count(self._tensor.untyped_storage()._cdata)
        return count

    def prepare(self) -> None:
        """Before the first gradient of a pass: take new memory if the program has kept gradients of the last one."""
        if self._users() == self._num_users:
            return
        # Memory that is still a parameter's gradient has to stay.
        if all(place.parameter.grad is None or place.is_foreign for place in self.places):
            self._take_memory()

    def came(self, place: BucketPlace) -> bool:
        """Take a gradient of the backward pass; return whether it was the last of the bucket."""
        if self._missing == len(self.places) and not place.is_here:
            self.prepare()
        # Copied now, while other buckets travel: copies at the end of the pass would all be waited for.
        if len(self.places) > 1:
            place.collect()
        if not place.is_here:
            place.is_here = True
            self._missing -= 1
        return not self._missing

    def begin(self, urgency: int, look: Callable[[Bucket, np.ndarray[Any, Any]], object]) -> None:
        """Average what the ranks have; ``look`` is called with this rank's contribution before."""
        wire_dtype, compressor = self.average.now()
        self.average.stepped()
        if compressor is None:
            source = self._collected()
            self._exchange = self._exact(source, wire_dtype, urgency)
        else:
            for place in self.places:
                place.collect()
            source = self._flat
            self._exchange = CompressedAverage(self._comm, self, compressor)
        look(self, source)
        self._exchange.start()
        self.is_begun = True

    def _exact(self, source: np.ndarray[Any, Any], wire_dtype: Any, urgency: int) -> RestartableReduction:
        # A persistent collective is bound to its memory; a gradient that is read in place may move in each step.
        if self._persistent is None or source is not self._source or wire_dtype != self._wire_dtype:
            self._source, self._wire_dtype = source, wire_dtype
            # In shared memory nothing is gained by priorities, and links with priorities are slower.
            priority = 0 if self.is_shared else urgency
            given: Any = source
            options = {"op": self.average.op, "out": self._flat, "priority": priority, "wire_dtype": wire_dtype}
            if self.average.op == "adasum":  # of each gradient by itself
                views = [place.view.view(-1).numpy() for place in self.places]
                given, options["out"] = [source] if len(views) == 1 else views, views
            self._persistent = reduction(self._comm, given, self.name, options)
        return self._persistent

    def _collected(self) -> np.ndarray[Any, Any]:
        """This rank's contribution: the memory of the bucket, or one gradient where it is."""
        if len(self.places) == 1:
            gradient = self.places[0].take()
            if gradient is not None:
                return adapt(gradient).flat
        for place in self.places:
            place.collect()
        return self._flat

    @property
    def content(self) -> np.ndarray[Any, Any]:
        """Its memory: the average, once that has arrived."""
        return self._flat

    def done(self) -> bool:
        """Whether the average has arrived, or has failed."""
        return self._exchange is None or self._exchange.done()

    def wait(self) -> None:
        """Wait for the average."""
        if self._exchange is not None:
            self._exchange.wait()

    def cancel(self) -> None:
        """End what is under way, on every rank."""
        if self._exchange is not None:
            self._exchange.cancel()

    def reset(self) -> None:
        """Begin anew, after the average was applied or has failed."""
        self.is_begun = False
        self._exchange = None
        self._missing = len(self.places)
        for place in self.places:
            place.has_come = place.is_here = False


class CompressedAverage(threading.Thread):
    """Average of one bucket by a compressor, in the place of an exact one's persistent collective."""

    # A thread, as a compressor makes several blocking calls, for which the backward pass must not wait.

    def __init__(self, comm: Communicator, bucket: Bucket, compressor: Compressor) -> None:
        super().__init__(name=f"kfcomm {bucket.name}", daemon=True)
        self._comm, self._bucket, self._compressor = comm, bucket, compressor
        self._error: BaseException | None = None

    @override
    def run(self) -> None:
        try:
            views = {place.name: place.view.numpy() for place in self._bucket.places}  # torch counts no writes to these
            for name, found in self._compressor.average(self._comm, views, name=self._bucket.name).items():
                views[name][...] = found
        except BaseException as error:  # noqa: BLE001  `wait` raises it
            self._error = error

    def done(self) -> bool:
        """Whether it is over."""
        return not self.is_alive()

    def wait(self) -> None:
        """Wait for the end; raise the error of one that has failed."""
        self.join()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Do nothing: its calls end by their own timeouts."""


def dtype_problem(parameter: torch.Tensor) -> str | None:
    """The reason why gradients of this type cannot be averaged; None if they can."""
    name = str(parameter.dtype).removeprefix("torch.")
    return None if name in SUPPORTED_NAMES else str(unsupported(name))


def share_out(parameters: Iterable[Named], nbytes: int, kinds: Mapping[str, Compression | None]) -> list[list[Named]]:
    """Group parameters, ordered as their gradients come, alike in dtype and compression, up to ``nbytes``."""
    shared: list[list[Named]] = []
    # Lists, since a compression with options in a dict cannot be hashed.
    alike: list[tuple[torch.dtype, Compression | None]] = []
    latest: list[list[Named]] = []
    left: list[int] = []
    for name, parameter in parameters:
        size = parameter.numel() * parameter.dtype.itemsize
        if size > nbytes:
            # Its neighbours stay together: else each bias between two large weights would be a collective of its own.
            shared.append([(name, parameter)])
            continue
        kind = (parameter.dtype, kinds[name])
        if kind not in alike:
            alike.append(kind)
            latest.append([])
            left.append(-1)
        place = alike.index(kind)
        if size > left[place]:
            latest[place], left[place] = [], nbytes
            shared.append(latest[place])
        latest[place].append((name, parameter))
        left[place] -= size
    return shared


def _memory(comm: Communicator, count: int, dtype: np.dtype[Any]) -> tuple[np.ndarray[Any, Any], bool]:
    """Memory as of ``comm.empty``, without its warning if ranks share none; and whether they share it."""
    # Shared memory is of one epoch and its ranks; in an elastic world a bucket lasts longer.
    is_shared = comm.local_size == comm.size and not is_elastic(comm)
    heaps = comm._session.network.heaps() if is_shared else None
    room = None if heaps is None else heaps.empty(count * dtype.itemsize)
    return (np.empty(count, dtype), False) if room is None else (room.view(dtype), True)


def _room(parameter: torch.Tensor) -> int:
    """Elements that the gradient takes in its bucket."""
    aligned: int = max(1, ALIGNED_NBYTES // parameter.dtype.itemsize)
    numbers: int = parameter.numel()
    return -(-numbers // aligned) * aligned
