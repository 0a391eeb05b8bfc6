"""``DistributedDataParallel`` over backend kfcomm: its buckets in shared memory, and a hook that compresses gradients.

*Buckets.* DDP's reducer, in C++, copies the value of a work's future to the gradients, and does not look again at the
tensor that it gave. So the result need not be copied to that tensor. With the bucket itself and the result in memory
that all ranks of the host can read, a call moves 1.25 times the bytes through memory, instead of 5 times. See "Arrays
that need no copy". Other callers of ``all_reduce`` get the result in their tensor. The innermost Python frame
distinguishes the two, in the same way on all ranks: the reducer calls from C++ in a backward pass, or from
``DistributedDataParallel`` itself.

*Hook.* DDP calls it with each bucket when its gradients are complete, in the same order on all ranks, and takes a
future. A compression of several exchanges runs on a thread of the state, bucket by bucket, while the backward pass
continues.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd import graph
from torch.nn.parallel import distributed

from kfcomm.collectives.group import IN_ORDER
from kfcomm.common.arguments import checked_name
from kfcomm.errors import ConfigError, KfcommError
from kfcomm.sync.communicator import Communicator
from kfcomm.sync.handle import Handle
from kfcomm.torch.c10d import Ending, TorchWork, as_torch
from kfcomm.torch.compiling import uncompiled_methods
from kfcomm.torch.compression import FACTORS, Compression, Compressor, GradientAverage
from kfcomm.torch.failures import keep
from kfcomm.torch.kept_works import above
from kfcomm.torch.tensors import place, read
from kfcomm.transports.shm.heap import NOWHERE

SHARED_FROM_NBYTES = 1 << 20
"""Smaller buckets gain nothing."""
MAX_KINDS = 256
"""Kinds of buckets, by dtype and size, for which memory is kept."""
SWAP = "_swap_data_ptr_"
"""Method of storages by which a bucket's memory is exchanged, with all views of it. torch 2.13 has it, 2.7 does not."""
REDUCERS = frozenset({graph.__file__, distributed.__file__})
"""Files of the innermost Python frame when the reducer calls."""


def is_bucket(tensor: Any) -> bool:
    """Whether the caller of the caller is a reducer, with a bucket that is large enough."""
    nbytes = tensor.numel() * tensor.element_size()
    return nbytes >= SHARED_FROM_NBYTES and above(2).f_code.co_filename in REDUCERS


class SharedBuffers:
    """Memory that peers can read, for contributions of this rank."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._vacant: dict[tuple[str, int], list[Any]] = {}

    def own(self, tensor: Any) -> Any:
        """The bucket itself, flat, moved to where peers can read it; None if it cannot be moved."""
        heaps, storage = self._comm._session.network.heaps(), tensor.untyped_storage()
        x = read(tensor)
        if heaps is None or heaps.place_of(x) != NOWHERE:
            return None if heaps is None else x
        block = heaps.empty(x.nbytes) if x.nbytes == storage.nbytes() and hasattr(storage, SWAP) else None
        if block is None:
            return None
        np.copyto(block, x.view(np.uint8))
        former = torch.from_numpy(block).untyped_storage()
        getattr(storage, SWAP)(former)
        # A program may have an array of the former memory, which must not be freed before it.
        storage.former = former
        return read(tensor)

    def tensor(self, count: int, dtype: torch.dtype) -> Any:
        """A new flat tensor in such memory; in other memory where nothing is gained."""
        nbytes = count * dtype.itemsize
        heaps = self._comm._session.network.heaps() if nbytes >= SHARED_FROM_NBYTES else None
        block = None if heaps is None else heaps.empty(nbytes)
        return torch.empty(count, dtype=dtype) if block is None else torch.from_numpy(block).view(dtype)

    def filled(self, x: Any) -> Any:
        """A copy of a flat array in such memory, which is reused from step to step."""
        try:
            buffer = self._vacant[x.dtype.name, x.size].pop()
        except (KeyError, IndexError):
            buffer = self._comm.empty(x.shape, x.dtype)
        np.copyto(buffer, x)
        return buffer

    def lend(self, buffer: Any, handle: Handle[Any]) -> None:
        """Reuse a buffer after a collective that reads it; not after a failed one, which peers may still be reading."""

        def vacate(over: Any) -> None:
            if over.cancelled() or over.exception() is not None:
                return
            kind = buffer.dtype.name, buffer.size
            if kind in self._vacant:
                self._vacant[kind].append(buffer)
                return
            if len(self._vacant) >= MAX_KINDS:
                self._vacant.clear()
            self._vacant[kind] = []  # kept from the second use on: after the first step the reducer forms new buckets

        handle.add_done_callback(vacate)


@uncompiled_methods
class BucketWork(TorchWork):
    """Reduction of a bucket, with a future of another tensor than the one that was given."""

    def __init__(self, handle: Handle[Any], ending: Ending) -> None:
        # Nothing here refers to the work itself: the result's memory would be kept until a garbage collection.
        (self._tensor,) = ending.tensors
        super().__init__(handle, ending._replace(finish=partial(_fill, self._tensor, handle)))

    def _result(self) -> list[Any]:
        self._await(timedelta(0))
        return [_seen(self._tensor, self._handle)]


def _fill(tensor: Any, handle: Handle[Any]) -> None:
    """Copy the result to the tensor, for callers that wait for the work itself."""
    tensor.detach().copy_(_seen(tensor, handle).view(tensor.shape))


def _seen(tensor: Any, handle: Handle[Any]) -> Any:
    """The result, flat, where it was made; read-only."""
    return torch.from_numpy(np.asarray(_SeenBuckets(handle.result()))).view(tensor.dtype)


class _SeenBuckets:
    """The bytes of an array, declared as writable even if they are not: torch takes no others."""

    def __init__(self, array: Any) -> None:
        self._array = array
        at = array.__array_interface__["data"][0]
        self.__array_interface__ = {"version": 3, "shape": (array.nbytes,), "typestr": "|u1", "data": (at, False)}


class CompressionState:
    """The state of `compression_hook` for one model.

    ::

        model = DistributedDataParallel(net)
        state = kfcomm.torch.CompressionState("powersgd", rank=2, begin_after=100)
        model.register_comm_hook(state, kfcomm.torch.compression_hook)

    Args:
        compression: a kind, see ``Compression``; or a compressor of ``kfcomm.compression``.
        group: the process group of the model; None for the default one.
        name: of the model; models that are trained at the same time need different names.
        begin_after: see ``Compression``. DDP forms new buckets after the first step; compression errors are kept by
            parameter, so that none is lost then.
        options: see ``Compression``.

    Raises:
        ConfigError: the kind or an option is unknown, or the group is not one of backend kfcomm.
    """

    def __init__(
        self, compression: str | Compressor, *, group: Any = None, name: str = "ddp", begin_after: int = 0,
        **options: Any,
    ) -> None:  # fmt: skip
        # Here, since a backend's collectives need this module.
        from kfcomm.torch.registration import backend_of

        self.name = checked_name(name)
        if compression == FACTORS:
            raise ConfigError("factors are recorded in the layers of a model: give them to kfcomm.torch.attach")
        kind = Compression(compression, **options) if isinstance(compression, str) else compression
        self._average = GradientAverage(self.name, kind, begin_after=begin_after)
        self.backend = backend_of(group)
        self._names: dict[torch.Tensor, str] = {}
        self._thread = ThreadPoolExecutor(1, "kfcomm-hook")

    def name_of(self, parameter: torch.Tensor) -> str:
        """The name of a parameter: its place in the order of DDP, which is the same on all ranks."""
        return self._names.setdefault(parameter, str(len(self._names)))

    def begin(self, bucket: Any) -> Any:
        """Average the gradients of a bucket; a future of its buffer."""
        wire_dtype, compressor = self._average.now()
        if bucket.is_last():
            self._average.stepped()
        if compressor is None:
            return self._exchanged(bucket.buffer(), wire_dtype)
        parameters = zip(bucket.parameters(), bucket.gradients(), strict=True)
        views = {self.name_of(parameter): gradient.detach() for parameter, gradient in parameters}
        begun: Any = torch.futures.Future()
        # what a callback raises reaches the backward pass; an error set from Python would end the process
        # this communicator: after a loss the thread may come to a bucket when the group has another one
        found = begun.then(partial(self._averaged, self.backend.communicator, compressor, views, bucket.buffer()))
        self._thread.submit(begun.set_result, None)
        return found

    def _exchanged(self, buffer: Any, wire_dtype: str | None) -> Any:
        array, finish = place(buffer)
        name = f"{IN_ORDER}{self.name}: a bucket of {buffer.numel()} {str(buffer.dtype).removeprefix('torch.')}"
        handle = self.backend.communicator.all_reduce_async(array, name, op="avg", out=array, wire_dtype=wire_dtype)
        work = TorchWork(handle, Ending([buffer], finish, self.backend._completers))
        return work.get_future().then(lambda done: done.value()[0])

    def _averaged(self, comm: Communicator, compressor: Compressor, views: dict[str, Any], buffer: Any, _: Any) -> Any:
        try:
            found = compressor.average(comm, views, name=self.name)
        except KfcommError as error:
            raise keep(as_torch(error)) from None
        for name, view in views.items():
            view.copy_(torch.from_numpy(found[name]))
        return buffer


def compression_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For ``DistributedDataParallel.register_comm_hook``; see ``CompressionState``.

    Args:
        state: of the model.
        bucket: its gradients.

    Returns:
        A future of the bucket's buffer, which holds the averages.
    """
    found: torch.futures.Future[torch.Tensor] = state.begin(bucket)
    return found


compression_hook.__annotations__.clear()
"""DDP compares annotations with types, and refuses these, which are postponed."""
