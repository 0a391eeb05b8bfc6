"""The comparison of the simulator with a test bed, on a record that the simulator has made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.validate import NOISE, Cell, Winner, bed_of, main, processor_costs, simulated, validated, winners_of
from kfcomm.simulate import Host, Local, SimulatedNetwork, simulate
from kfcomm.types import Costs

OVERHEAD_S, COPY_S_PER_BYTE, LATENCY_S = 5e-5, 2e-9, 4e-5


def record() -> dict[str, Any]:
    """Record of a bed whose times are those of the simulator."""
    hosts = tuple(Host(f"h{number}", 25e6, LATENCY_S) for number in range(4))
    local = Local(overhead_s=OVERHEAD_S, copy=1 / COPY_S_PER_BYTE)
    network = SimulatedNetwork(hosts=hosts, local=local, efficiency=0.9, cpus=2, burst_nbytes=16000)
    figures = []
    for nbytes in (1 << 18, 1 << 21):
        for strategy in ("ring", "star", "binary_tree"):
            result = simulate(strategy, replace(network.layout, costs=Costs()), nbytes, network, key="step")
            cpu_s = 2 * result.messages * OVERHEAD_S + 2 * result.nbytes_sent * COPY_S_PER_BYTE
            figures.append({"strategy": strategy, "nbytes": nbytes, "median_s": result.seconds, "cpu_s": cpu_s})
    return {
        "machine": {"cores": 2, "commit": "abc"},
        "network": {
            "hosts": [{"name": host.name, "rate": 200e6, "ranks": 1, "burst_nbytes": 16000} for host in hosts],
            "efficiency": 0.9,
        },
        "figures": figures,
    }


def test_costs_of_messages_and_bytes_are_found_from_processor_time() -> None:
    results = simulated(record(), bed_of(record(), LATENCY_S))
    assert processor_costs(record(), results) == pytest.approx((OVERHEAD_S, COPY_S_PER_BYTE))


def test_a_bed_that_is_as_the_simulator_has_it_is_met_exactly(tmp_path: Path) -> None:
    path = tmp_path / "netlab.json"
    path.write_text(json.dumps(record()))
    cells, winners, assumed = validated(path, LATENCY_S)
    assert [cell.error for cell in cells] == pytest.approx([0] * 6, abs=1e-9)
    assert [winner.predicted for winner in winners] == ["ring", "ring"]
    assert all(winner.is_right for winner in winners)
    assert assumed["overhead_s"] == pytest.approx(OVERHEAD_S)


def test_strategies_that_were_made_on_the_bed_are_left_out(tmp_path: Path) -> None:
    path, data = tmp_path / "netlab.json", record()
    data["figures"].append({"strategy": "module:function", "nbytes": 1 << 18, "median_s": 1.0, "cpu_s": 1.0})
    path.write_text(json.dumps(data))
    cells, _, _ = validated(path, LATENCY_S)
    assert len(cells) == 6


def test_a_winner_is_right_that_is_about_as_fast_as_the_fastest() -> None:
    cells = [Cell("a", 1, 1.0, 2.0), Cell("b", 1, 1.0 + NOISE / 2, 1.0), Cell("a", 2, 1.0, 2.0), Cell("b", 2, 2.0, 1.0)]
    assert winners_of(cells) == [Winner(1, "a", "b", 1.0 + NOISE / 2), Winner(2, "a", "b", 2.0)]
    assert [winner.is_right for winner in winners_of(cells)] == [True, False]


def test_the_command_says_whether_the_aim_is_reached(tmp_path: Path) -> None:
    path, output = tmp_path / "netlab.json", tmp_path / "out.json"
    good, bad = record(), record()
    for number, figure in enumerate(bad["figures"]):
        figure["median_s"] *= 2 + number
    for data, exit_code in ((good, 0), (bad, 1)):
        path.write_text(json.dumps(data))
        done = CliRunner().invoke(main, [str(path), "--latency", "40 us", "--output", str(output)])
        assert done.exit_code == exit_code, done.output
        assert "median error" in done.output
        assert json.loads(output.read_text())["verdict"]["reached"] is (exit_code == 0)
