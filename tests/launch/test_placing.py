"""Shares of processors, and processes that are started on them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.launch.placing import bound, listed, nodes_of, processors
from tests.launch.launched import finished

EIGHT = list(range(8))
TWO_NODES = [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_cores_are_shared_within_nodes() -> None:
    shares = [processors(place, 4, "core", EIGHT, TWO_NODES) for place in range(4)]
    assert shares == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert [processors(place, 3, "core", EIGHT, []) for place in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_more_ranks_than_processors_take_turns() -> None:
    assert [processors(place, 3, "core", [4, 5], []) for place in range(4)] == [[4], [5], [4], [5]]


def test_numa_nodes_have_equally_many_ranks() -> None:
    found = [processors(place, 4, "numa", EIGHT, TWO_NODES) for place in range(5)]
    assert found == [TWO_NODES[0], TWO_NODES[0], TWO_NODES[1], TWO_NODES[1], TWO_NODES[0]]
    assert processors(1, 2, "numa", [0, 2], TWO_NODES) == [0, 2]  # the launcher may use no other node
    assert processors(0, 2, "numa", EIGHT, []) == EIGHT


def test_unbound_ranks_have_no_processors_of_their_own() -> None:
    assert processors(0, 4, "none", EIGHT, TWO_NODES) == []
    assert processors(0, 4, "core", [], []) == []


@given(st.sets(st.integers(0, 200), min_size=1), st.integers(1, 50), st.data())
def test_every_processor_is_used_once_and_shares_differ_by_one(
    available: set[int], size: int, data: st.DataObject
) -> None:
    nodes = data.draw(st.lists(st.lists(st.integers(0, 200)), max_size=3))
    nodes = [sorted(set(node) - {one for before in nodes[:at] for one in before}) for at, node in enumerate(nodes)]
    shares = [processors(place, size, "core", sorted(available), nodes) for place in range(size)]
    if size <= len(available):
        assert sorted(one for share in shares for one in share) == sorted(available)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all(share and set(share) <= available for share in shares)


def test_nodes_of_the_system(tmp_path: Path) -> None:
    for number, text in ((10, "4-5\n"), (2, "0-1,3\n"), (3, "\n")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(text)
    (tmp_path / "node7").mkdir()
    assert nodes_of(tmp_path) == [[0, 1, 3], [4, 5]]
    assert nodes_of(tmp_path / "missing") == []
    with pytest.raises(ValueError, match="x"):
        listed("x")


def test_affinity_of_the_launcher_is_restored() -> None:
    before = os.sched_getaffinity(0)
    with bound([min(before)]):
        assert os.sched_getaffinity(0) == {min(before)}
    with bound([]):
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before


PROGRAM = "import os; print(*sorted(os.sched_getaffinity(0)))"


def test_ranks_run_on_their_processors() -> None:
    before = sorted(os.sched_getaffinity(0))
    done = finished("run", "-n", "2", "--bind-to", "core", sys.executable, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    expected = [processors(place, 2, "core", before, nodes_of()) for place in range(2)]
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] {' '.join(map(str, one))}" for rank, one in enumerate(expected)
    ]
    done = finished("run", "-n", "1", sys.executable, "-c", PROGRAM)
    assert done.stdout.split()[1:] == list(map(str, before))
    done = finished("run", "-n", "1", "--bind-to", "socket", "true")
    assert done.returncode == 2
    assert "'none', 'core', 'numa'" in done.stderr
