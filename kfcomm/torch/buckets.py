"""Gradients that travel together: the memory of each, and its average.

A bucket is flat memory, and the gradients of its parameters are views of it. In host memory it is as ``comm.empty``
gives it: on one host ranks read and write it in place, and a gradient that has a bucket to itself is even read from the
tensor that autograd has made, so that nothing is copied. On a device a bucket is one call with the same name, address
and size in each step; all its gradients are copied to it at once.

Steps and ranks differ in which parameters have a gradient. `marks` tell all ranks for which parameters any rank has
one; the others are left alone, as a single process leaves them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from kfcomm.arrays import adapt, dtype_of
from kfcomm.arrays.dtypes import SUPPORTED_NAMES, unsupported
from kfcomm.arrays.reduce import wire_dtype_of
from kfcomm.errors import ConfigError
from kfcomm.torch.compression import Compression, GradientAverage
from kfcomm.torch.in_host_memory import HostAverage, adasum, reduced
from kfcomm.torch.memory import DeviceMemory, HostGradients, RoundedAverage
from kfcomm.torch.reductions import RestartableReduction, is_elastic, reduction

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
    """Some gradients of one dtype, averaged together; in shared memory if all ranks are on one host.

    Args:
        comm: of the ranks.
        parameters: whose gradients they are, all in one memory.
        name: of its collective.
        average: how they are averaged.
        memory: in which they are.
    """

    def __init__(
        self, comm: Communicator, parameters: Sequence[Named], name: str, average: GradientAverage,
        memory: HostGradients | DeviceMemory,
    ) -> None:  # fmt: skip
        self._dtype = parameters[0][1].dtype
        if average.compressor is not None and self._dtype not in COMPRESSED:
            raise ConfigError(f"{parameters[0][0]} is of {self._dtype}: float16, float32 and float64 can be compressed")
        self._begins = [0, *accumulate(_room(parameter) for _, parameter in parameters)]
        self._comm = comm
        self.memory = memory
        self.name = name
        self.places = [BucketPlace(one, parameter, parameter.detach()) for one, parameter in parameters]
        self.nbytes = sum(parameter.numel() for _, parameter in parameters) * self._dtype.itemsize
        self.is_begun = False  # their average is under way, or has arrived
        self.average = average
        self.is_exact = average.compressor is None and average.op == "avg"  # else it is not the mean
        self._missing = len(self.places)
        self._origins: dict[Any, None] = {}  # streams on which the gradients of a pass are made
        self._exchange: RestartableReduction | HostAverage | None = None
        """Average under way."""
        self._persistent: RestartableReduction | None = None
        self._wire_dtype: Any = None
        """Of the persistent collective."""
        self._source: Any = None
        """Source of the latest average. Kept until the next gradient exists: else that gets new pages in each step."""
        self._take_memory()

    def watch(self, model: torch.nn.Module) -> list[Any]:
        """Record what its gradients are made of, if its compression needs it; returns the hooks."""
        return self.average.watch(model, [place.name for place in self.places])

    def __repr__(self) -> str:
        return f"<Bucket {self.name}, {len(self.places)} gradients, {self.nbytes} bytes>"

    def _take_memory(self) -> None:
        count = self._begins[-1] if len(self.places) > 1 else self.places[0].parameter.numel()
        buffer = self.memory.allocate(self._comm, count, self._dtype)
        self._flat, self._tensor, self.is_local = buffer.flat, buffer.tensor, buffer.is_local
        for place, begin in zip(self.places, self._begins, strict=False):
            place.view = self._part(self._tensor, place, begin)
        self._exchange = self._persistent = None
        # Tensors of the program over this memory raise the number later: see `prepare`.
        self._num_users = self._users()

    @staticmethod
    def _part(whole: torch.Tensor, place: BucketPlace, begin: int) -> torch.Tensor:
        parameter = place.parameter
        return whole[begin : begin + parameter.numel()].view(parameter.shape)

    def views_of(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """The gradients by name in other memory of the same form."""
        parts = zip(self.places, self._begins, strict=False)
        return {place.name: self._part(whole, place, begin) for place, begin in parts}

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
        if self.memory.is_on_device:
            self._origins[self.memory.origin()] = None
        # Copied now, while other buckets travel: copies at the end of the pass would all be waited for.
        if len(self.places) > 1 and not self.memory.is_on_device:
            place.collect()
        if not place.is_here:
            place.is_here = True
            self._missing -= 1
        return not self._missing

    def begin(self, urgency: int, look: Callable[[Bucket, Any], object]) -> None:
        """Average what the ranks have; ``look`` is called with this rank's contribution before."""
        wire_dtype, compressor = self.average.now()
        self.average.stepped()
        source = self._collected(in_place=compressor is None)
        if compressor is not None:
            self._exchange = HostAverage(self._comm, self, compressor.average)
        elif self.memory.is_on_device and self.average.op == "adasum":
            self._exchange = HostAverage(self._comm, self, adasum)
        elif self.memory.is_on_device and is_elastic(self._comm):
            # Collectives of device memory end with their epoch; those of host memory survive a loss.
            self._exchange = HostAverage(self._comm, self, reduced)
        else:
            self._exchange = self._exact(source, wire_dtype, urgency)
        look(self, source)
        with self.memory.leaving():
            self._exchange.start()
        self.is_begun = True

    def _exact(self, source: Any, wire_dtype: Any, urgency: int) -> RestartableReduction:
        # A persistent collective is bound to its memory; a gradient that is read in place may move in each step.
        if self._persistent is None or source is not self._source or wire_dtype != self._wire_dtype:
            self._source, self._wire_dtype = source, wire_dtype
            # In shared memory nothing is gained by priorities, and links with priorities are slower.
            priority = 0 if self.is_local else urgency
            given: Any = source
            options = {"op": self.average.op, "out": self._flat, "priority": priority, "wire_dtype": wire_dtype}
            if isinstance(self.memory, DeviceMemory):
                self._persistent = self._on_device(self.memory, options)
                return self._persistent
            if self.average.op == "adasum":  # of each gradient by itself
                views = [place.view.view(-1).numpy() for place in self.places]
                given, options["out"] = [source] if len(views) == 1 else views, views
            self._persistent = reduction(self._comm, given, self.name, options)
        return self._persistent

    def _on_device(self, memory: DeviceMemory, options: dict[str, Any]) -> RestartableReduction:
        if not options["priority"]:
            del options["priority"]  # calls with options of their own are not cached
        given, own = options.pop("wire_dtype"), str(self._dtype).removeprefix("torch.")
        wire_dtype = own if given is None else wire_dtype_of(given, dtype_of(own)).name
        if wire_dtype == own:
            return reduction(self._comm, self._flat, self.name, options)

        def made(rounded: torch.Tensor) -> RestartableReduction:
            return reduction(self._comm, rounded, self.name, {**options, "out": rounded})

        return RoundedAverage(memory, self._flat, wire_dtype, made)

    def _collected(self, *, in_place: bool) -> Any:
        """This rank's contribution: the memory of the bucket, or one gradient where it is."""
        if isinstance(self.memory, DeviceMemory):
            self.memory.gather(self._origins)
            self._origins.clear()
            self._collect_at_once()
            return self._flat
        if in_place and len(self.places) == 1 and (gradient := self.places[0].take()) is not None:
            return adapt(gradient).flat
        for place in self.places:
            place.collect()
        return self._flat

    def _collect_at_once(self) -> None:
        """Collect all gradients by two kernels, where each copy would be one."""
        absent = [place.view for place in self.places if place.parameter.grad is None]
        foreign = [place for place in self.places if place.is_foreign]
        with torch.no_grad():
            if absent:
                torch._foreach_zero_(absent)
            if foreign:
                torch._foreach_copy_([one.view for one in foreign], [one.parameter.grad for one in foreign])
        for place in foreign:
            place.show()

    @property
    def content(self) -> Any:
        """Its memory as the verbs take it: the average, once that has arrived."""
        return self._flat

    @property
    def tensor(self) -> torch.Tensor:
        """Its memory, flat."""
        return self._tensor

    def done(self) -> bool:
        """Whether the average has arrived, or has failed."""
        return self._exchange is None or self._exchange.done()

    def wait(self) -> None:
        """Wait for the average; on a device, let the current stream do so."""
        if self._exchange is not None:
            self._exchange.wait()
            self.memory.arrived()

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


def dtype_problem(parameter: torch.Tensor) -> str | None:
    """The reason why gradients of this type cannot be averaged; None if they can."""
    name = str(parameter.dtype).removeprefix("torch.")
    return None if name in SUPPORTED_NAMES else str(unsupported(name))


def share_out(parameters: Iterable[Named], nbytes: int, kinds: Mapping[str, Compression | None]) -> list[list[Named]]:
    """Group parameters, ordered as their gradients come, alike in device, dtype, compression, up to ``nbytes``."""
    shared: list[list[Named]] = []
    # Lists, since a compression with options in a dict cannot be hashed.
    alike: list[tuple[torch.device, torch.dtype, Compression | None]] = []
    latest: list[list[Named]] = []
    left: list[int] = []
    for name, parameter in parameters:
        size = parameter.numel() * parameter.dtype.itemsize
        if size > nbytes:
            # Its neighbours stay together: else each bias between two large weights would be a collective of its own.
            shared.append([(name, parameter)])
            continue
        kind = (parameter.device, parameter.dtype, kinds[name])
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


def _room(parameter: torch.Tensor) -> int:
    """Elements that the gradient takes in its bucket."""
    aligned: int = max(1, ALIGNED_NBYTES // parameter.dtype.itemsize)
    numbers: int = parameter.numel()
    return -(-numbers // aligned) * aligned
