"""Buckets of ``DistributedDataParallel``: one result for all ranks of a host, from which it takes its gradients.

Its reducer, which is C++, copies what the future of a work holds to the gradients, and never looks again at the tensor
that it gave. So the result need not be brought there: who gives what peers can read, and sees the result where it was
made, goes through the memory once and a quarter where all else takes five times. See "Arrays that need no copy".

Whoever else calls ``all_reduce`` gets the result in the tensor. It is decided by who calls, alike on all ranks of a
program: a call from C++ in a backward pass, or from ``DistributedDataParallel`` itself, has no Python in between.
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
"""Less is not worth it."""
MAX_ROOMS = 256
"""Kinds of buckets for which memory is kept."""
REDUCERS = frozenset({graph.__file__, distributed.__file__})
"""Files of the innermost Python when the reducer calls."""


def is_bucket(tensor: Any) -> bool:
    """Whether the caller of the caller is a reducer with a bucket that is worth it."""
    nbytes = tensor.numel() * tensor.element_size()
    return nbytes >= SHARED_FROM_NBYTES and sys._getframe(2).f_code.co_filename in REDUCERS


class Rooms:
    """Memory that peers can read, for what this rank gives; kept from one step of the training to the next."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._vacant: dict[tuple[str, int], list[Any]] = {}

    def filled(self, x: Any) -> Any:
        """A copy there of a flat array."""
        try:
            room = self._vacant[x.dtype.name, x.size].pop()
        except (KeyError, IndexError):
            room = self._comm.empty(x.shape, x.dtype)
        np.copyto(room, x)
        return room

    def lend(self, room: Any, handle: Handle[Any]) -> None:
        """It is vacant again when a collective that reads it is over; not if it has failed: peers may be at it yet."""

        def vacate(over: Any) -> None:
            if over.cancelled() or over.exception() is not None:
                return
            kind = room.dtype.name, room.size
            if kind in self._vacant:
                self._vacant[kind].append(room)
                return
            if len(self._vacant) >= MAX_ROOMS:
                self._vacant.clear()
            self._vacant[kind] = []  # it may not come again: after its first step the reducer makes its buckets anew

        handle.add_done_callback(vacate)


class BucketWork(Work):
    """The reduction of a bucket, whose future holds another tensor than the one that was given.

    Args:
        handle: of it.
        ending: what belongs to its end; its one tensor is the bucket.
    """

    def __init__(self, handle: Handle[Any], ending: Ending) -> None:
        super().__init__(handle, ending._replace(finish=self._fill))

    def _fill(self) -> None:
        """Whoever waits for the work itself looks at the tensor."""
        (tensor,) = self._ending.tensors
        tensor.detach().copy_(self._seen().view(tensor.shape))

    def _outcome(self, _: Any) -> list[Any]:
        self._await(timedelta(0))
        return [self._seen()]

    def _seen(self) -> Any:
        """The result, flat, where it was made: to be read alone."""
        (tensor,) = self._ending.tensors
        return torch.from_numpy(np.asarray(_Seen(self._handle.result()))).view(tensor.dtype)


class _Seen:
    """The bytes of an array, whether it may be written to or not: torch knows no others."""

    def __init__(self, array: Any) -> None:
        self._array = array
        at = array.__array_interface__["data"][0]
        self.__array_interface__ = {"version": 3, "shape": (array.nbytes,), "typestr": "|u1", "data": (at, False)}
