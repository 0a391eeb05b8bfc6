"""Buckets of ``DistributedDataParallel`` in shared memory: one result for all ranks of a host.

DDP's reducer, in C++, copies the value of a work's future to the gradients, and does not look again at the tensor that
it gave. So the result need not be copied to that tensor. With the contribution and the result in memory that all ranks
of the host can read, a call moves 1.25 times the bytes through memory, instead of 5 times. See "Arrays that need no
copy".

Other callers of ``all_reduce`` get the result in their tensor. The innermost Python frame distinguishes the two, alike
on all ranks of a program: the reducer calls from C++ in a backward pass, or from ``DistributedDataParallel`` itself.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch.autograd import graph
from torch.nn.parallel import distributed

from kfcomm.sync.communicator import Communicator
from kfcomm.sync.handle import Handle
from kfcomm.torch.work import Ending, Work

SHARED_FROM_NBYTES = 1 << 20
"""Smaller buckets gain nothing."""
MAX_KINDS = 256
"""Kinds of buckets, by dtype and size, for which memory is kept."""
REDUCERS = frozenset({graph.__file__, distributed.__file__})
"""Files of the innermost Python frame when the reducer calls."""


def is_bucket(tensor: Any) -> bool:
    """Whether the caller of the caller is a reducer, with a bucket that is large enough."""
    nbytes = tensor.numel() * tensor.element_size()
    return nbytes >= SHARED_FROM_NBYTES and sys._getframe(2).f_code.co_filename in REDUCERS


class SharedBuffers:
    """Memory that peers can read, for contributions of this rank; reused from step to step."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._vacant: dict[tuple[str, int], list[Any]] = {}

    def filled(self, x: Any) -> Any:
        """A copy of a flat array in such memory."""
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


class BucketWork(Work):
    """Reduction of a bucket, with a future of another tensor than the one that was given.

    Args:
        handle: of it.
        ending: its completion; the only tensor is the bucket.
    """

    def __init__(self, handle: Handle[Any], ending: Ending) -> None:
        super().__init__(handle, ending._replace(finish=self._fill))

    def _fill(self) -> None:
        """Copy the result to the tensor, for callers that wait for the work itself."""
        (tensor,) = self._ending.tensors
        tensor.detach().copy_(self._seen().view(tensor.shape))

    def _outcome(self, _: Any) -> list[Any]:
        self._await(timedelta(0))
        return [self._seen()]

    def _seen(self) -> Any:
        """The result, flat, where it was made; read-only."""
        (tensor,) = self._ending.tensors
        return torch.from_numpy(np.asarray(_Seen(self._handle.result()))).view(tensor.dtype)


class _Seen:
    """The bytes of an array, declared as writable even if they are not: torch takes no others."""

    def __init__(self, array: Any) -> None:
        self._array = array
        at = array.__array_interface__["data"][0]
        self.__array_interface__ = {"version": 3, "shape": (array.nbytes,), "typestr": "|u1", "data": (at, False)}
