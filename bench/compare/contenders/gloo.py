"""Gloo, as torch.distributed uses it: over TCP, one thread for arithmetic in each process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from bench.compare.contenders.base import Library
from bench.compare.data import Array
from kfcomm.types import override


class Gloo(Library):
    """The world named by ``RANK``, ``WORLD_SIZE`` and ``COMPARE_MEETING`` (a folder)."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        torch.set_num_threads(1)
        meeting = f"file://{os.environ['COMPARE_MEETING']}/store"
        dist.init_process_group("gloo", init_method=meeting, rank=self.rank, world_size=self.size)

    @override
    def barrier(self) -> None:
        dist.barrier()

    def wrap(self, number: int, array: Array) -> Any:
        """A tensor that shares the array's memory."""
        return torch.from_numpy(array)

    @override
    def all_reduce(self, item: Any) -> object:
        return dist.all_reduce(item)

    @override
    def all_reduce_all(self, items: Sequence[Any]) -> None:
        for pending in [dist.all_reduce(item, async_op=True) for item in items]:
            pending.wait()

    @override
    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__}

    @override
    def close(self) -> None:
        dist.destroy_process_group()
