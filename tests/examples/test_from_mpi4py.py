"""Rows of "Move over from mpi4py" give what the line of mpi4py gives."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kfcomm.sync
from kfcomm.testing import run_threads, sync_world
from tests.examples.pages import tables
from tests.launch.launched import ROOT

SIZE = 4
XS = [np.arange(4, dtype=np.float32) + 10 * rank for rank in range(SIZE)]
ROWS = [np.arange(4 * SIZE, dtype=np.float32).reshape(SIZE, 4) + 100 * rank for rank in range(SIZE)]
WANTED: dict[str, tuple[str, Callable[[int], Any]]] = {
    "comm.Allreduce(x, y)": ("y", lambda rank: sum(XS)),
    "comm.Allreduce(MPI.IN_PLACE, y, op=MPI.MAX)": ("y", lambda rank: np.zeros(4)),
    "comm.allreduce(rank)": ("total", lambda rank: 6),
    "comm.Reduce(x, y, root=0)": ("found", lambda rank: sum(XS) if rank == 0 else None),
    "comm.Scan(x, y)": ("y", lambda rank: sum(XS[: rank + 1])),
    "comm.Exscan(x, y)": ("y", lambda rank: sum(XS[:rank], np.zeros(4))),
    "comm.Bcast(x, root=0)": ("x", lambda rank: XS[0]),
    "comm.Gather(x, rows, root=0)": ("found", lambda rank: np.stack(XS) if rank == 0 else None),
    "comm.Allgather(x, rows)": ("rows", lambda rank: np.stack(XS)),
    "comm.Allgatherv(x[:rank], [...])": ("found", lambda rank: np.concatenate([x[:n] for n, x in enumerate(XS)])),
    "comm.Scatter(rows, x, root=0)": ("x", lambda rank: ROWS[0][rank]),
    "comm.Scatterv([...], x, root=0)": ("found", lambda rank: XS[0][:rank]),
    "comm.Reduce_scatter_block(rows, x)": ("x", lambda rank: sum(ROWS)[rank]),
    "comm.Alltoall(rows, rows)": ("found", lambda rank: np.stack([rows[rank] for rows in ROWS])),
    "comm.Sendrecv(x, right, 7, y, left, 7)": ("y", lambda rank: XS[rank - 1]),
    "comm.allgather(rank)": ("found", lambda rank: list(range(SIZE))),
}


def codes() -> dict[str, list[str]]:
    """Our code by their line."""
    ((_, table, _),) = tables(ROOT / "docs" / "howto" / "from-mpi4py.md")
    rows = re.findall(r"^\| `(.*?)`.* \| (`.*`) \|$", table, re.MULTILINE)
    return {theirs: re.findall(r"`([^`]+)`", ours) for theirs, ours in rows}


@pytest.mark.parametrize("line", WANTED)
def test_our_line_gives_what_theirs_gives(line: str) -> None:
    name, wanted = WANTED[line]

    def rank(comm: kfcomm.sync.Communicator) -> Any:
        space: dict[str, Any] = {
            "comm": comm, "np": np, "rank": comm.rank, "size": SIZE, "left": (comm.rank - 1) % SIZE,
            "right": (comm.rank + 1) % SIZE, "x": XS[comm.rank].copy(), "y": np.zeros(4, np.float32),
            "rows": ROWS[comm.rank].copy(),
        }  # fmt: skip
        for code in codes()[line]:
            exec(code, space)
        return space[name]

    with sync_world(SIZE) as comms:
        for number, found in enumerate(run_threads(comms, rank)):
            assert np.array_equal(found, wanted(number)), number


def test_a_number_and_a_tuple_become_what_the_page_says() -> None:
    def rank(comm: kfcomm.sync.Communicator) -> tuple[Any, Any]:
        return comm.all_reduce(3.0), comm.broadcast_object((1, (2, 3)))

    with sync_world(2) as comms:
        for number, value in run_threads(comms, rank):
            assert isinstance(number, np.ndarray)
            assert (number.shape, number.item()) == ((), 6.0)
            assert value == [1, [2, 3]]
