"""Messages of ``torch.distributed``, and its barrier that names the missing ranks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np

from kfcomm.errors import CollectiveTimeout, KfcommError
from kfcomm.sync.communicator import Communicator
from kfcomm.torch.errors import as_torch
from kfcomm.torch.tensors import place, read
from kfcomm.torch.work import Ending, Work

OUTCOME_WITHIN_S = 1.0
"""Wait after a rank's own timeout: rank 0 may have arrived later, and tells all ranks which are missing."""


class Messages:
    """Messages between the ranks of one process group."""

    _comm: Communicator
    _completers: ThreadPoolExecutor
    _timeout: timedelta
    _num_monitored = 0

    def send(self, tensors: Sequence[Any], to: int, tag: int) -> Any:
        """Implement ``dist.isend``; done when the tensor may be changed."""
        (tensor,) = tensors
        handle = self._comm.send_async(read(tensor, as_bytes=True), to, tag)
        return Work(handle, self._ending(tensors, None))

    def recv(self, tensors: Sequence[Any], source: int, tag: int) -> Any:
        """Implement ``dist.irecv``."""
        return self._receive(tensors, source, tag)

    def recv_anysource(self, tensors: Sequence[Any], tag: int) -> Any:
        """Implement ``dist.irecv``, from whichever rank sends first."""
        return self._receive(tensors, None, tag)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        """Implement ``dist.monitored_barrier``; with the group's timeout, unless it is given another.

        Raises:
            CollectiveTimeout: on rank 0, naming the first missing rank, or with ``wait_all_ranks`` all of them; and on
                the ranks that have arrived, as soon as rank 0 knows.
        """
        timeout_s = (opts.timeout if opts.timeout >= timedelta(0) else self._timeout).total_seconds()
        tag = f"monitored_barrier/{self._num_monitored}"
        self._num_monitored += 1
        try:
            if self._comm.rank == 0:
                self._attend(tag, timeout_s, wait_all_ranks)
            else:
                self._arrive(tag, timeout_s)
        except KfcommError as error:
            raise as_torch(error) from None

    def _receive(self, tensors: Sequence[Any], source: int | None, tag: int) -> Any:
        (tensor,) = tensors
        out, finish = place(tensor, as_bytes=True)
        handle = self._comm.recv_any_async(source, tag, out=out)
        return Work(handle, self._ending(tensors, finish), is_any=True)

    def _ending(self, tensors: Sequence[Any], finish: Any) -> Ending:
        return Ending(tensors, finish, self._completers)

    def _attend(self, tag: str, timeout_s: float, wait_all_ranks: bool) -> None:
        """On rank 0: wait for all ranks, then send them the outcome."""
        if timeout_s <= 0:
            raise CollectiveTimeout(
                "[Rank 0]: Rank 0 timed out in monitoredBarrier after 0 ms", key="monitored_barrier"
            )
        others = range(1, self._comm.size)
        come = {rank: self._comm.recv_async(rank, tag, timeout=timeout_s) for rank in others}
        missing = []
        for rank, handle in come.items():
            try:
                handle.wait()
            except CollectiveTimeout:
                missing.append(rank)
                if not wait_all_ranks:
                    break
        # An empty outcome lets the ranks continue.
        outcome = np.array(missing, np.int64)
        for rank, handle in come.items():
            if rank not in missing and (handle.done() or not handle.cancel()):
                self._comm.send(outcome, rank, f"{tag}/verdict")
        if missing:
            raise self._late(missing, timeout_s)

    def _arrive(self, tag: str, timeout_s: float) -> None:
        """On other ranks: tell rank 0, and wait for its outcome."""
        said = self._comm.recv_async(0, f"{tag}/verdict", timeout=timeout_s + min(timeout_s, OUTCOME_WITHIN_S))
        self._comm.send(np.zeros(0, np.int64), 0, tag)
        missing = said.wait()
        if len(missing):
            raise self._late([int(rank) for rank in missing], timeout_s)

    def _late(self, missing: list[int], timeout_s: float) -> CollectiveTimeout:
        ranks = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
        rank = self._comm.rank
        text = f"[Rank {rank}]: {ranks} failed to pass monitoredBarrier in {1e3 * timeout_s:.0f} ms"
        if rank:
            reached = (
                "successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0"
            )
            text = f"[Rank {rank}]: Rank {rank} {reached}: {ranks} failed to pass it in {1e3 * timeout_s:.0f} ms"
        arrived = [one for one in range(self._comm.size) if one not in missing]
        return CollectiveTimeout(text, key="monitored_barrier", arrived=arrived, missing=missing)
