"""Jobs on Dask: parts, results, errors. Each client is a process with a cluster of its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.drivers import driven

pytest.importorskip("distributed", reason="needs Dask: pip install distributed")

ASYNC = "kfcomm.world.communicator"


def on_dask(name: str, folder: Path) -> Any:
    """Answer of a client of `programs`."""
    pytest.importorskip("dask.array", reason="needs Dask's arrays: pip install dask[array]")
    return driven("tests.dask.programs", name, folder, DASK_TEMPORARY_DIRECTORY=str(folder))[0]


def test_ranks_have_their_parts_without_a_copy(tmp_path: Path) -> None:
    found, again = on_dask("parts", tmp_path)
    assert [row[0] for row in found] == list(range(len(found)))
    assert sorted(index for row in found for index in row[2]) == [
        [row, column] for row in range(6) for column in range(2)
    ]
    assert sorted(index for row in found for index in row[3]) == [[row] for row in range(6)]
    for _, word, x, y, is_same, total, _ in found:
        assert (word, total) == ("hello", 600.0)
        assert all(is_same)
        assert {index[0] for index in y} <= {index[0] for index in x}
    assert len({row[-1] for row in found}) == len(found)
    assert again == "again"


def test_functions_without_data_run_on_all_workers(tmp_path: Path) -> None:
    for every, some in on_dask("functions", tmp_path):
        assert every == [[rank, ASYNC, 3.0] for rank in range(3)]
        assert some == [[rank, ASYNC, 2.0] for rank in range(2)]


def test_culprit_is_raised_first(tmp_path: Path) -> None:
    told = on_dask("failures", tmp_path)
    kind, text, notes, _ = told["raises"]
    assert (kind, text) == ("ZeroDivisionError", "here")
    assert re.match(r"on rank 1 \((?s:.*) in fails", notes[0])
    assert told["result"][0] == "ConfigError"
    assert re.match(r"rank 0: its result did not come back: .*lock", told["result"][1])
    kind, text, *_ = told["dies"]
    assert kind == "PeerLost"
    assert re.match(r"the worker tcp://\S+ of rank 1 is lost", text)


def test_refusals_name_what_is_wrong(tmp_path: Path) -> None:
    told = on_dask("refusals", tmp_path)
    assert told.pop("broken")[0] == "ZeroDivisionError"
    kind, text, *_ = told.pop("busy")
    assert kind == "RendezvousError"
    assert "have not joined" in text
    assert {row[0] for row in told.values()} == {"ConfigError"}
    texts = {name: row[1] for name, row in told.items()}
    assert texts["client"] == "expected a connected distributed.Client that is not asynchronous"
    assert texts["not persisted"] == "Array is not in the workers' memory: pass x.persist() instead of x"
    assert "'refusals.<locals>.other' with its arguments cannot be pickled" in texts["unpicklable"]
    assert "cannot pickle '_thread.lock' object" in texts["unpicklable"]
    assert "did you mean 'strategy'?" in texts["setting"]
    assert texts["own"] == "rank: chosen by run for each rank; leave out"
    assert texts["too few"] == "num_workers=3, but the cluster has 2 workers"
    assert texts["both"].startswith("num_workers is for functions without collections")
    assert re.search(r"has kfcomm \S+ \(protocol \d+\), the caller 9.9 \(protocol 99\)", texts["versions"])
    assert texts["no workers"].startswith("the cluster has no workers")
