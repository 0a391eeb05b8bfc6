"""Open MPI and MPICH, through mpi4py's buffer interface. Which library and which links: see `launch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mpi4py
from mpi4py import MPI

from bench.compare.contenders.base import Library
from bench.compare.data import Array
from kfcomm.types import override


class Mpi(Library):
    """The world that mpiexec has made."""

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD
        self.rank = self._comm.Get_rank()
        self.size = self._comm.Get_size()

    @override
    def barrier(self) -> None:
        self._comm.Barrier()

    def wrap(self, number: int, array: Array) -> Any:
        """Buffer, count and type: mpi4py has nothing left to find out."""
        return [array, array.size, MPI.FLOAT]

    @override
    def all_reduce(self, item: Any) -> object:
        self._comm.Allreduce(MPI.IN_PLACE, item)
        return None

    @override
    def all_reduce_all(self, items: Sequence[Any]) -> None:
        begin = self._comm.Iallreduce
        MPI.Request.Waitall([begin(MPI.IN_PLACE, item) for item in items])

    @override
    def versions(self) -> dict[str, str]:
        library = MPI.Get_library_version().replace("\0", "").splitlines()[0]
        return {"mpi4py": mpi4py.__version__, "mpi": " ".join(library.split(",")[0].split())}

    @override
    def close(self) -> None:
        MPI.Finalize()
