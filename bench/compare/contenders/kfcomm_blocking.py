"""kfcomm's blocking interface, as a program without an event loop uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import kfcomm
from bench.compare.contenders.base import Library
from bench.compare.data import Array


class Blocking(Library):
    """The world that ``kfcomm run`` has made; links and strategy are its settings."""

    def __init__(self) -> None:
        self._comm = kfcomm.sync.init()
        self.rank = self._comm.rank
        self.size = self._comm.size

    def barrier(self) -> None:
        """See the base class."""
        self._comm.barrier("bench/meet")

    def wrap(self, number: int, array: Array) -> Any:
        """A name and the array."""
        return f"bench/{number}", array

    def all_reduce(self, item: Any) -> object:
        """See the base class."""
        name, array = item
        return self._comm.all_reduce(array, name, out=array)

    def all_reduce_all(self, items: Sequence[Any]) -> None:
        """See the base class."""
        begin = self._comm.all_reduce_async
        for pending in [begin(array, name, out=array) for name, array in items]:
            pending.wait()

    def versions(self) -> dict[str, str]:
        """See the base class."""
        return {"kfcomm": kfcomm.__version__}

    def close(self) -> None:
        """See the base class."""
        self._comm.close()
