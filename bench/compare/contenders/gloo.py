"""Gloo, as torch.distributed uses it: over TCP, one thread for arithmetic in each process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from bench.compare.contenders.base import Library
from bench.compare.data import Array


class Gloo(Library):
    """The world named by ``RANK``, ``WORLD_SIZE`` and ``COMPARE_MEETING`` (a folder)."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        torch.set_num_threads(1)
        meeting = f"file://{os.environ['COMPARE_MEETING']}/store"
        dist.init_process_group("gloo", init_method=meeting, rank=self.rank, world_size=self.size)

    def barrier(self) -> None:
        """See the base class."""
        dist.barrier()

    def wrap(self, number: int, array: Array) -> Any:
        """A tensor that shares the array's memory."""
        return torch.from_numpy(array)

    def all_reduce(self, item: Any) -> object:
        """See the base class."""
        return dist.all_reduce(item)

    def all_reduce_all(self, items: Sequence[Any]) -> None:
        """See the base class."""
        for pending in [dist.all_reduce(item, async_op=True) for item in items]:
            pending.wait()

    def versions(self) -> dict[str, str]:
        """See the base class."""
        return {"torch": torch.__version__}

    def close(self) -> None:
        """See the base class."""
        dist.destroy_process_group()
