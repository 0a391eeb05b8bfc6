"""Jobs on Ray: results, errors, lost nodes, sizes. Each driver is a process with a cluster of its own."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.drivers import driven, output_of
from tests.public_api import changes

pytest.importorskip("ray", reason="needs Ray: pip install ray")

BLOCKING, ASYNC = "kfcomm.sync.communicator", "kfcomm.world.communicator"


@contextlib.contextmanager
def settings() -> Iterator[dict[str, str]]:
    """Variables of Ray, whose sockets need a short path."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as short:
        yield {"RAY_TMPDIR": short, "RAY_USAGE_STATS_ENABLED": "0", "RAY_COLOR_PREFIX": "0", "RAY_DEDUP_LOGS": "0"}


def on_ray(name: str, folder: Path) -> tuple[Any, str]:
    """Answer of a driver of `programs`, and its output."""
    with settings() as variables:
        return driven("tests.ray.programs", name, folder, **variables)


def test_results_by_rank_on_two_nodes(tmp_path: Path) -> None:
    told, said = on_ray("results", tmp_path)
    assert told["blocking"] == [[[rank, BLOCKING, 6.0] for rank in range(4)], 2]
    assert told["asynchronous"] == [[rank, ASYNC, 2.0] for rank in range(2)]
    assert told["called"] == [[2, 1, 0]] * 3
    assert told["alone"] == [[0, ASYNC, 1.0]]
    assert sorted(re.findall(r"hello from rank (\d)", said)) == ["0", "1", "2", "3"]


def test_culprit_is_raised_first(tmp_path: Path) -> None:
    told, _ = on_ray("failures", tmp_path)
    kind, text, notes, _ = told["raises"]
    assert (kind, text) == ("ZeroDivisionError", "here")
    assert re.match(r"on rank 2 \((?s:.*) in fails", notes[0])
    assert all("failed too: " in note for note in notes[1:])
    assert told["odd"][:2] == ["RuntimeError", "Odd: 1 and 2"]
    assert told["exits"][:2] == ["RuntimeError", "sys.exit(3) in the function"]
    assert told["exits well"][:2] == ["none", [None, None]]
    kind, text, *_ = told["is killed"]
    assert kind == "PeerLost"
    assert re.match(r"the worker of rank 1 on \S+ is lost: ", text)
    assert told["result"][0] == "ConfigError"
    assert re.match(r"rank 0: its result cannot be pickled: .*cannot pickle '_thread.lock' object", told["result"][1])


def test_refusals_name_what_is_wrong(tmp_path: Path) -> None:
    told, _ = on_ray("refusals", tmp_path)
    assert {row[0] for row in told.values()} == {"ConfigError"}
    texts = {name: row[1] for name, row in told.items()}
    assert texts["no Ray"].startswith("Ray does not run in this process: call ray.init() first")
    few = r"within 1 s Ray found no places for 3 workers with CPU 1 each: .* has CPU 2, .*, and CPU 2, .* is free"
    assert re.fullmatch(few, texts["too few"])
    assert "1 workers with CPU 1, TPU 4 each" in texts["no such"]
    assert "'refusals.<locals>.other' with its arguments cannot be pickled" in texts["unpicklable"]
    assert "cannot pickle '_thread.lock' object" in texts["unpicklable"]
    assert "did you mean 'strategy'?" in texts["setting"]
    assert texts["own"] == "store: chosen by run for each rank; leave out"
    assert texts["not callable"] == "expected a function that takes a communicator, got int"
    assert texts["workers"] == "num_workers=0 must be a whole number from 1 on"
    assert texts["elastic"] == "num_workers=9 is outside elastic=(1, 4)"
    assert texts["bounds"].startswith("elastic=4 must be the least and the largest number of workers")
    assert texts["resources"].startswith("resources_per_worker: 'CPU': -1 must be a name and a number")
    assert texts["none"].startswith("resources_per_worker is empty")
    assert re.search(r"has kfcomm \S+ \(protocol \d+\), the caller 9.9 \(protocol 99\)", texts["versions"])
    assert max(row[3] for row in told.values()) < 30


def test_lost_store_ends_an_elastic_job(tmp_path: Path) -> None:
    told, _ = on_ray("unserved", tmp_path)
    assert told[:2] == [
        "RendezvousError",
        "the actor with the store of the job is gone, perhaps with the node of the driver",
    ]


def test_killed_node_is_replaced(tmp_path: Path) -> None:
    """Two of four ranks are killed in an all_reduce: the others finish it, and two new ones join."""
    told, said = on_ray("node", tmp_path)
    assert len(told) == 4
    for births, total, sizes, _ in told:
        assert len(births) == 4
        assert max(births[:2]) < 4 <= min(births[2:])
        assert total == 2.0
        assert sizes[-1] == 4
    assert "is lost" in said


def test_sizes_are_asked_of_the_placement_group(tmp_path: Path) -> None:
    told, _ = on_ray("sizes", tmp_path)
    assert told == [[[0], [2, 3, 1]]]


def test_pipeline_has_the_losses_of_one_process(tmp_path: Path) -> None:
    with settings() as variables:
        said = output_of(["examples/pipeline.py", "--ray"], tmp_path, **variables)
    assert "of one process: equal" in said


def test_public_api_is_the_recorded_one() -> None:
    assert changes("ray") == {"gone": [], "new": []}
