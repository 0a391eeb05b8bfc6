"""The table of six beds: networks, figures, and a record that is continued."""

import json

import pytest
from click.testing import CliRunner

from bench.netlab import beds
from bench.netlab.beds import AUTO, BEDS, PACKED, PROBED, Bed, best_of, forecast_s, missing, table, verdict
from bench.netlab.lab import Wires
from bench.netlab.links import TailShaper
from bench.netlab.rates import Bucket


@pytest.mark.parametrize("name", BEDS)
def test_each_bed_is_a_network_of_the_simulator(name):
    bed = BEDS[name]
    assert sum(spec.ranks for spec in bed.specs) == bed.network.layout.size
    for strategy in ("ring", PACKED):
        assert 0 < forecast_s(bed, strategy, 1 << 14) < forecast_s(bed, strategy, 1 << 18)


def test_auto_is_forecast_with_and_without_a_probe():
    bed = Bed((400.0, 50.0, 400.0))
    assert forecast_s(bed, PROBED, 1 << 20) <= forecast_s(bed, AUTO, 1 << 20)


def test_a_slow_link_and_an_uplink_take_their_time():
    plain = Bed((200.0,) * 5)
    slow = Bed((200.0,) * 5, slow=(("h0", "h1", 10.0),))
    racks = Bed((200.0,) * 8, racks=(("h0", "h1", "h2", "h3"),), uplink=50.0)
    assert forecast_s(slow, "ring", 1 << 20) > 3 * forecast_s(plain, "ring", 1 << 20)
    assert forecast_s(racks, "clique", 1 << 20) > 2 * forecast_s(Bed((200.0,) * 8), "clique", 1 << 20)


def test_a_drop_tail_queue_has_a_class_for_the_whole_and_for_slow_links():
    lines = TailShaper("port", {"10.0.0.2": 1e6}).added(Bucket.holding(8e6, 1500))
    assert [line for line in lines if "bfifo" in line] == [
        "qdisc add dev port parent 1:2 bfifo limit 50000",
        "qdisc add dev port parent 1:10 bfifo limit 32000",
    ]
    assert lines[-1].endswith("match ip dst 10.0.0.2/32 flowid 1:10")
    assert "rate 1000000bit ceil 1000000bit" in lines[3]
    assert Bed((1.0, 1.0), slow=(("h0", "h1", 0.5),)).wires == Wires({("h0", "h1"): 5e5})


def row(strategy, median_s, simulated_s, nbytes=1 << 20):
    return {
        "bed": "equal", "nbytes": nbytes, "strategy": strategy, "median_s": median_s, "simulated_s": simulated_s,
        "spans_s": [median_s],
    }  # fmt: skip


ROWS = [
    row("ring", 2.0, 1.8),
    row("star", 1.0, 1.1),
    row(AUTO, 1.5, 1.8),
    row(PROBED, 1.0, 1.1),
    row("gloo", 3.0, None),
]


def test_figures_of_the_aims():
    assert best_of(ROWS) == 1.0
    found = verdict(ROWS)
    assert found["auto, of the best: median, worst"] == "1.500, 1.500"
    assert found["auto after a probe, of the best: median, worst"] == "1.000, 1.000"
    assert found["gloo, of the best: median, worst"] == "3.000, 3.000"
    assert found["simulator from 1 MiB on: median, worst error"] == "10.0%, 20.0%"
    assert found["winners right, where clear"] == "1 of 1"
    assert "ring" in table(ROWS)


def test_a_wrong_winner_is_told():
    rows = [row("ring", 2.0, 1.0), row("star", 1.0, 1.1), row("tree", 1.01, 1.2, nbytes=1 << 16)]
    assert verdict(rows)["winners right, where clear"] == "0 of 1"


def test_recorded_cells_are_not_measured_again(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    measured = []

    def rows_of(name, nbytes, num_rounds, *, with_gloo):
        measured.append((name, nbytes))
        return [{**each, "bed": name, "nbytes": nbytes} for each in ROWS]

    monkeypatch.setattr(beds, "rows_of", rows_of)
    monkeypatch.setattr(beds, "_total_s", lambda cells, num_rounds: 60.0)
    options = ["--output", str(path), "--sizes", "64KiB,1MiB", "--only", "equal", "--only", "racks"]
    assert CliRunner().invoke(beds.main, [*options, "--show"]).exit_code == 0
    assert measured == []
    assert CliRunner().invoke(beds.main, options).exit_code == 0
    assert measured == [(name, size) for name in ("equal", "racks") for size in (1 << 16, 1 << 20)]
    record = json.loads(path.read_text())
    assert ("equal", 1 << 16) not in missing(record, [1 << 16])
    assert CliRunner().invoke(beds.main, options).exit_code == 0
    assert len(measured) == 4
