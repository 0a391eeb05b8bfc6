"""The table of six beds: networks, figures, and a record that is continued."""

import json

import pytest
from click.testing import CliRunner

from bench.netlab import beds
from bench.netlab.beds import (
    ALL,
    AUTO,
    BEDS,
    PACKED,
    PROBED,
    SETTLED,
    STRATEGIES,
    Bed,
    Cell,
    forecast_s,
    hopeful,
    missing,
    table,
    verdict,
)  # fmt: skip
from bench.netlab.lab import Wires
from bench.netlab.links import TailShaper
from bench.netlab.rates import Bucket


@pytest.mark.parametrize("name", BEDS)
def test_each_bed_is_a_network_of_the_simulator(name):
    bed = BEDS[name]
    assert sum(spec.ranks for spec in bed.specs) == bed.network.layout.size
    for strategy in ("ring", PACKED):
        assert 0 < forecast_s(bed, strategy, 1 << 14) < forecast_s(bed, strategy, 1 << 18)


def test_strategies_that_cannot_win_can_be_left_out():
    cell = Cell("slow first", 1 << 20, ALL)
    assert hopeful(cell, float("inf")) == list(STRATEGIES)
    assert PACKED in hopeful(cell, 1.6)
    assert "star" not in hopeful(cell, 1.6)


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


def row(strategy, median_s, simulated_s, nbytes=1 << 20, part=ALL, **more):
    return {
        "bed": "equal", "nbytes": nbytes, "part": part, "strategy": strategy, "median_s": median_s,
        "simulated_s": simulated_s, "spans_s": [median_s], **more,
    }  # fmt: skip


ROWS = [
    row("ring", 2.0, 1.8),
    row("star", 1.0, 1.1),
    row(PROBED, 1.2, 1.32, beside_s=1.1),
    row(AUTO, 1.5, None, part="settled"),
    row("gloo", 3.0, None, part="rivals", beside_s=1.5),
]


def test_figures_of_the_aims():
    found = verdict(ROWS)
    assert found["auto, of the best: least, median, most"] == "1.500, 1.500, 1.500"
    assert found["auto after a probe, of the best: least, median, most"] == "1.091, 1.091, 1.091"
    assert found["gloo, of auto after a probe: least, median, most"] == "2.000, 2.000, 2.000"
    assert found["simulator from 1 MiB on: median, worst error"] == "10.0%, 10.0%"
    assert found["winners right, where clear"] == "1 of 1"
    assert "ring" in table(ROWS)


def test_a_part_alone_has_figures():
    assert "gloo" in table(ROWS[-1:])
    assert "star" in table(ROWS[1:2])
    assert verdict(ROWS[-1:])["gloo, of auto after a probe: least, median, most"] == "2.000, 2.000, 2.000"
    assert "auto, of the best: least, median, most" not in verdict(ROWS[3:])


def test_a_wrong_winner_is_told():
    rows = [row("ring", 2.0, 1.0), row("star", 1.0, 1.1), row("tree", 1.01, 1.2, nbytes=1 << 16)]
    assert verdict(rows)["winners right, where clear"] == "0 of 1"


def test_recorded_cells_are_not_measured_again(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    measured = []

    def rows(cell, num_rounds, within, mpi):
        measured.append(cell)
        return [{**each, "bed": cell.bed, "nbytes": cell.nbytes, "part": cell.part} for each in ROWS[:2]]

    monkeypatch.setattr(Cell, "rows", rows)
    monkeypatch.setattr(beds, "_cell_s", lambda cell, num_rounds, within: 60.0)
    options = ["--output", str(path), "--sizes", "64KiB,1MiB", "--only", "equal", "--only", "racks", "--part", ALL]
    assert CliRunner().invoke(beds.main, [*options, "--show"]).exit_code == 0
    assert measured == []
    assert CliRunner().invoke(beds.main, options).exit_code == 0
    assert measured == [Cell(name, size, ALL) for name in ("equal", "racks") for size in (1 << 16, 1 << 20)]
    record = json.loads(path.read_text())
    assert missing(record, ["equal"], [1 << 16], [ALL, SETTLED]) == [Cell("equal", 1 << 16, SETTLED)]
    assert CliRunner().invoke(beds.main, options).exit_code == 0
    assert len(measured) == 4
