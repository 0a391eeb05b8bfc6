"""The Grafana dashboard in ``deploy/grafana`` asks for metrics and labels that ranks have."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.launch.launched import finished
from tests.support import free_port

BOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "kfcomm.json"
PROGRAM = """
import sys, urllib.request
import numpy as np
import kfcomm
from kfcomm.train import GradientMonitor, SynchronousSGD

with kfcomm.sync.init() as comm:
    way = SynchronousSGD(comm, monitor=GradientMonitor(comm, 8))
    for step in range(4):
        way.gradients({"w": np.arange(10.0) + step * comm.rank}).wait()
    comm.monitored_all_reduce(np.ones(100_000, np.float32), "grad/0")
    comm.barrier()
    if comm.rank == 0:
        print(urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/metrics").read().decode())
    comm.barrier()
"""
FROM_PROMETHEUS = {"job", "instance"}
"""Labels that it adds by itself."""


def asked() -> dict[str, set[str]]:
    """Metrics in the queries of the dashboard, each with the labels that are used beside it."""
    board = json.loads(BOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [one["expr"] for one in board["annotations"]["list"]]
    found: dict[str, set[str]] = {}
    for query in queries:
        labels = {label for listed in re.findall(r"by \(([^)]*)\)", query) for label in listed.split(", ")}
        for name, selected in re.findall(r"(kfcomm_\w+)\{([^}]*)\}", query):
            found.setdefault(name, set()).update(labels | set(re.findall(r"(\w+)=", selected)))
    return found


def test_all_queries_find_data_of_a_job() -> None:
    port = str(free_port())
    options = ["-n", "2", "--transport", "tcp", "--metrics-port", port]
    done = finished("run", *options, sys.executable, "-c", PROGRAM, port)
    assert done.returncode == 0, done.stderr
    text = "\n".join(line.removeprefix("[0] ") for line in done.stdout.splitlines())
    exported: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            exported.setdefault(sample.name, set()).update(sample.labels)
    wanted = asked()
    assert len(wanted) > 12
    assert {name: labels - exported.get(name, set()) - FROM_PROMETHEUS for name, labels in wanted.items()} == {
        name: set() for name in wanted
    }
    assert wanted.keys() <= exported.keys()


def test_panels_have_titles_and_places_of_their_own() -> None:
    panels = json.loads(BOARD.read_text())["panels"]
    assert len({panel["title"] for panel in panels}) == len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
