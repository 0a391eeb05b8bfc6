"""Line by line: each row of "Move over from torch.distributed" is run, their line and ours, and gives the same."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

import kfcomm.torch
from tests.torch.fleet import Fleet
from tests.torch.test_launching import ROOT

PAGE = ROOT / "docs" / "howto" / "from-torch.md"


def rows() -> list[tuple[list[str], list[str]]]:
    """Of the table: lines of torch, and ours; of two lines the second is another rank's."""
    table = PAGE.read_text().partition("## Line by line")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \| (`.*?) \|$", table, re.MULTILINE)
    return [(re.findall(r"`([^`]+)`", theirs), re.findall(r"`([^`]+)`", ours)) for theirs, ours in cells]


def ran(lines: list[str], comm: Any) -> dict[str, Any]:
    """Variables of the page after this rank's line."""
    rank, size = comm.rank, comm.size
    length = {"all_gather": 6 * size, "reduce_scatter": 6 // size}
    y = next((count for verb, count in length.items() if verb in lines[0]), 6)
    found = {
        "dist": dist, "comm": comm, "x": torch.arange(6.0) + rank, "y": torch.zeros(y), "value": {"rank": rank},
        "each": [None] * size,
    }  # fmt: skip
    if len(lines) == 1:
        if not lines[0].startswith("comm.group") or rank < 2:  # its members alone call it
            exec(lines[0], found)
    elif rank < len(lines):
        exec(lines[rank], found)
    if "work" in found:
        found["work"].wait()
    return found


def each_row() -> int:
    comm = kfcomm.torch.communicator()
    table = rows()
    *before, (last, ours) = table
    for theirs, mine in before:
        wanted, found = ran(theirs, comm), ran(mine, comm)
        assert found["each"] == wanted["each"], theirs
        is_result = "reduce(x, 0)" not in theirs[0] or comm.rank == 0  # torch leaves anything in the others' x
        for name in ("x", "y") if is_result else ():
            assert torch.equal(found[name].flatten(), wanted[name].flatten()), (theirs, name)
    ran(ours, comm.group(range(comm.size)))
    ran(last, comm)
    assert not dist.is_initialized()
    return len(table)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_their_line_and_ours(fleet: Fleet) -> None:
    assert fleet.run(each_row) == [13] * 3
