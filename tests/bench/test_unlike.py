"""Hosts that are unlike: what is foretold and wanted of them, and topologies from what ranks measure across a bed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.netlab import HostSpec, Netlab, even, with_rate
from bench.netlab.measure import measure
from bench.netlab.steps import Step
from bench.netlab.unlike import PACKED, Figure, bandwidth_of, table, verdict
from kfcomm.probe import Probe
from tests.launch.launched import ROOT

pytestmark = pytest.mark.slow

PROBING = """
import asyncio, sys, kfcomm

async def main():
    async with kfcomm.init() as comm:
        found = await comm.probe(nbytes=1 << 18)
        if comm.rank == 0:
            found.save(sys.argv[1])

asyncio.run(main())
"""


def figure(strategy: str, median_s: float, share: float) -> Figure:
    return Figure(strategy, median_s, median_s, median_s, 5.0, share, share, (median_s,))


def test_bandwidth_is_the_slower_of_two_links() -> None:
    assert bandwidth_of(with_rate(even(3, 80e6), "h1", 8e6)) == [[1e7, 1e6, 1e7], [1e6, 1e6, 1e6], [1e7, 1e6, 1e7]]
    for specs in (even(2), (HostSpec("a", 8e6, ranks=2),)):
        with pytest.raises(ValueError, match="one rank and a rate"):
            bandwidth_of(specs)


@pytest.mark.parametrize(("packed_s", "share", "reached"), [(6.0, 0.9, True), (6.0, 0.79, False), (7.0, 0.9, False)])
def test_outcome_reaches_ratio_and_share(packed_s: float, share: float, reached: bool) -> None:
    found = [figure("ring", 10.0, 0.5), figure("star", 9.9, 0.5), figure(PACKED, packed_s, share)]
    said = verdict(found)
    assert said["ratio"] == round(9.9 / packed_s, 3)
    assert said["reached"] is reached
    assert len({len(line) for line in table(found).splitlines()[:-1]}) == 1


@pytest.mark.netns
def test_a_slow_host_is_found_and_made_a_leaf(tmp_path: Path) -> None:
    specs = with_rate(even(4, 200e6), "h3", 50e6)
    env = {"PYTHONPATH": str(ROOT)}
    with Netlab(specs) as bed:
        with bed.start([sys.executable, "-c", PROBING, str(tmp_path / "p.json")], env=env) as program:
            program.wait(120).check()
        timings = measure(
            bed, [Step(PACKED, 1 << 20), Step("bench.netlab.measured:minimum_spanning_tree", 1024)], env=env
        )
    assert len(timings) == 2  # whose results the worker has compared
    found = Probe.load(tmp_path / "p.json")
    assert found.layout.num_hosts == 4
    assert max(found.bandwidth[3, :3]) < 1.5 * 50e6 / 8
    assert min(found.bandwidth[0, 1:3]) > 1.5 * 50e6 / 8
    for pair in found.packed_trees().pairs:
        assert not pair.reduce.children[3]
