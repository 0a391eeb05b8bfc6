"""Lists of arrays in the blocking interface: read on the caller's thread, lists of the same kind back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kfcomm.errors import CollectiveError, ConfigError
from kfcomm.testing import run_threads, sync_world
from tests.conformance.worlds import HANG_S

SIZE = 2


def test_lists_of_arrays() -> None:
    def main(comm: Any) -> Any:
        xs = [np.full(3, comm.rank), np.full((2, 2), 1.0)]
        later = comm.all_reduce_async(tuple(xs), "later")
        for x in xs:
            x += 0
        outs = [np.empty(3, int), np.empty((2, 2))]
        assert comm.all_reduce(xs, "into", out=outs) is outs
        found = {
            "sum": comm.all_reduce(xs, "sum"),
            "later": later.wait(),
            "into": outs,
            "root": comm.reduce(xs, 1, "root"),
            "part": comm.reduce_scatter([xs[0], xs[0] + 1], "part"),
            "many": comm.all_reduce_many({"a": xs[0]}, "many", out={"a": outs[0]}),
            "numbers": comm.all_reduce([1, 2], "numbers"),
        }
        return {name: repr(value) for name, value in found.items()}

    with sync_world(SIZE, timeout=HANG_S) as comms:
        first, second = run_threads(comms, main)
    sums = [np.ones(3, int), np.full((2, 2), 2.0)]
    assert first == second | {"root": "None", "part": repr(sums[0])}
    assert second["sum"] == second["into"] == second["root"] == repr(sums)
    assert second["later"] == repr(tuple(sums))
    assert second["part"] == repr(np.full(3, 3))
    assert second["numbers"] == repr(np.array([2, 4]))


def test_a_list_that_cannot_be_read_is_told_to_the_others() -> None:
    def main(comm: Any) -> str:
        with pytest.raises((ConfigError, CollectiveError)) as caught:
            comm.all_reduce([np.ones(2), "text" if comm.rank else np.ones(2)], "k")
        return caught.typename

    with sync_world(SIZE, timeout=HANG_S) as comms:
        assert run_threads(comms, main) == ["CollectiveAborted", "ConfigError"]
