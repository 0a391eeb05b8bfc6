"""The record of a probe, on its way to files and strategies, and its report as text and page."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kfcomm.errors import ConfigError
from kfcomm.probe import Probe
from kfcomm.probe.report import as_text, findings, forecasts, page
from kfcomm.rendezvous.saved_costs import saved_costs
from kfcomm.strategies import bound_seconds, hosts_of, minimum_spanning_tree, packed_trees
from kfcomm.strategies.cost import network_of
from kfcomm.types import UNMEASURED, Layout


def probe(layout: Layout | None = None) -> Probe:
    layout = layout or Layout((0, 0, 1), num_cpus=4)
    size = layout.size
    latency = np.array([[1e-6 * (1 + a + size * b) for b in range(size)] for a in range(size)])
    return Probe(layout, latency, 1e3 / latency)


def whole(layout: Layout | None = None) -> Probe:
    """With what work was measured."""
    found = probe(layout)
    return replace(found, overhead_s=found.latency_s / 4, fold_s_per_byte=np.linspace(1e-11, 3e-11, found.size))


def test_the_diagonal_is_no_measurement() -> None:
    found = probe()
    assert found.size == 3
    assert found.latency_s.diagonal().tolist() == [0, 0, 0]
    assert found.bandwidth.diagonal().tolist() == [math.inf] * 3
    assert found.latency_s.dtype == found.bandwidth.dtype == np.float64


def test_matrices_are_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        probe().latency_s[0, 1] = 5


def test_the_slowest_links_first() -> None:
    found = probe()
    assert found.slowest(2) == [(1, 2), (0, 2)]
    assert len(found.slowest(100)) == 6


def test_it_is_kept_in_a_file(tmp_path: Path) -> None:
    found = probe()
    found.save(tmp_path / "p.json")
    again = Probe.load(tmp_path / "p.json")
    assert again.layout == found.layout
    assert np.array_equal(again.latency_s, found.latency_s)
    assert np.array_equal(again.bandwidth, found.bandwidth)
    assert json.loads(json.dumps(found.as_json(), allow_nan=False)) == found.as_json()


def test_costs_of_work_are_kept(tmp_path: Path) -> None:
    found = whole()
    found.save(tmp_path / "p.json")
    again = Probe.load(tmp_path / "p.json")
    assert np.array_equal(again.overhead_s, found.overhead_s)
    assert np.array_equal(again.fold_s_per_byte, found.fold_s_per_byte)
    assert again.costs() == found.costs()
    assert again.network() == found.network()


def test_files_of_before_work_was_measured_are_read() -> None:
    old = probe().as_json()
    del old["overhead_s"], old["fold_s_per_byte"]
    assert Probe.from_json(old).costs() == probe().costs()


def test_costs_are_the_medians_of_what_is_alike() -> None:
    found = whole()
    costs = found.costs()
    assert (costs.overhead_s, costs.gamma_s_per_byte) == (pytest.approx(found.overhead_s[0, 2]), pytest.approx(2e-11))
    assert costs.local_alpha_s == pytest.approx(found.latency_s[0, 1] * 3 / 4)
    assert costs.cross_beta_s_per_byte == pytest.approx(1 / found.bandwidth[0, 2])
    assert probe(Layout((0,))).costs() == UNMEASURED
    one_host = probe(Layout((0, 0))).costs()
    assert (one_host.cross_alpha_s, one_host.overhead_s, one_host.gamma_s_per_byte) == (None, None, None)


def test_a_latency_is_never_all_work() -> None:
    found = probe()
    busy = replace(found, overhead_s=found.latency_s * 2)
    assert busy.costs().local_alpha_s == pytest.approx(found.latency_s[0, 1] / 10)


def test_costs_are_kept_for_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert whole().keep().parent == tmp_path / "kfcomm"
    assert saved_costs() == whole().costs()


def test_strategies_and_bounds_of_a_probe() -> None:
    found = probe(Layout.even(4, 4))
    latency, bandwidth = found.latency_s.tolist(), found.bandwidth.tolist()
    assert found.minimum_spanning_tree() == minimum_spanning_tree(latency)
    assert found.packed_trees(name="mine").digest == packed_trees(found.layout, bandwidth).digest
    assert found.packed_trees(name="mine").name == "mine"
    assert found.bound_seconds(1000) == bound_seconds(found.layout, bandwidth, 1000)
    assert found.network() == network_of(found.layout, latency, bandwidth)
    assert found.hosts() == hosts_of(latency, bandwidth)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "no field 'format' of 1"),
        ({"hosts": [0, 2, 1]}, "hosts must be numbered"),
        ({"hosts": 5}, "expected a probe: 'int' object is not iterable"),
        ({"hosts": [0, 0]}, "latency_s|latency is of 3 ranks, the layout of 2"),
        ({"latency_s": [[0, -1, 0]] * 3}, r"latency\[0\]\[1\] is -1"),
        ({"bandwidth": [[None, None, 1], [1, None, 1], [1, 1, None]]}, r"bandwidth\[0\]\[1\] is inf"),
        ({"bandwidth": [[None, 1], [1, None]]}, "bandwidth is of 2 ranks"),
        ({"overhead_s": [[0, 1], [1, 0]]}, "latency is of 2 ranks"),
        ({"fold_s_per_byte": [1, 2]}, "fold_s_per_byte is one finite number of seconds"),
        ({"fold_s_per_byte": [1, 2, -1]}, "fold_s_per_byte is one finite number of seconds"),
        ({"fold_s_per_byte": 3}, "fold_s_per_byte is a list of numbers"),
    ],
)
def test_malformed_probe_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**probe().as_json(), **change}))
    with pytest.raises(ConfigError, match=rf"bad\.json: .*{message}"):
        Probe.load(path)


@pytest.mark.parametrize("text", ["[]", "{}", "{", '{"format": 1}', '"x"'])
def test_files_that_hold_something_else(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.json: "):
        Probe.load(path)


def made(layout: Layout, ports: list[float], links: dict[tuple[int, int], float] | None = None) -> Probe:
    """Hosts with these ports, links of 120 µs between them, 5 GB/s and 20 µs inside."""
    hosts = np.array(layout.hosts)
    near = hosts[:, None] == hosts
    send = np.array(ports)[hosts]
    bandwidth = np.where(near, 5e9, np.minimum.outer(send, send))
    for (a, b), rate in (links or {}).items():
        bandwidth[a, b] = rate
    return Probe(layout, np.where(near, 2e-5, 1.2e-4), bandwidth)


EIGHT = made(Layout.even(8, 8), [25e6] * 7 + [6.25e6])


def test_tables_line_up_and_say_their_units() -> None:
    lines = as_text(EIGHT).splitlines()
    assert lines[0] == "8 ranks on 8 hosts"
    start = lines.index("bandwidth, MB/s (from row to column)")
    table = lines[start + 1 : start + 10]
    assert len({len(line) for line in table}) == 1
    assert table[0].split() == list("01234567")
    for rank, line in enumerate(table[1:]):
        first, *cells = line.split()
        assert first == str(rank)
        assert cells[rank] == "·"
        assert all(cells[to] == ("6.25" if 7 in (rank, to) else "25.0") for to in range(8) if to != rank)
    assert "latency one way, µs (from row to column)" in lines


@pytest.mark.parametrize(("rate", "unit"), [(2e9, "GB/s"), (2e6, "MB/s"), (2e3, "kB/s"), (2.0, "B/s"), (0.5, "B/s")])
def test_units_suit_most_of_the_figures(rate: float, unit: str) -> None:
    assert f"bandwidth, {unit} " in as_text(made(Layout.even(3, 3), [rate] * 3))


def test_a_slow_host_is_named() -> None:
    assert findings(EIGHT) == [
        "Rank 7 sends at most 6.25 MB/s, 25% of what is usual here.",
        "Rank 7 receives at most 6.25 MB/s, 25% of what is usual here.",
        "The slowest link is 0 → 7 with 6.25 MB/s.",
    ]
    several = findings(made(Layout.even(6, 3), [1e9, 1e9, 1e8]))
    assert several[0] == "Host 2 (ranks 4-5) sends at most 100 MB/s, 10% of what is usual here."


def test_a_slow_link_is_named() -> None:
    found = findings(made(Layout.even(4, 4), [1e9] * 4, {(1, 2): 1e8}))
    assert found == [
        "From rank 1 to rank 2 goes 100 MB/s, 10% of what both ends can do.",
        "The slowest link is 1 → 2 with 100 MB/s.",
    ]


def test_a_distant_rank_is_named() -> None:
    found = made(Layout.even(4, 4), [1e9] * 4)
    latency = found.latency_s.copy()
    latency[0, 3] = 1.2e-3
    words = findings(Probe(found.layout, latency, found.bandwidth))
    assert words[0] == "0 → 3 takes 1.20 ms, 10.0 times what is usual."


def test_equal_links_have_no_findings() -> None:
    words = findings(made(Layout.even(4), [1e9]))
    assert words == ["No host and no link is much slower than the others.", "The slowest link is 0 → 1 with 5.00 GB/s."]
    assert "One rank has no links." in as_text(Probe(Layout((0,)), np.zeros((1, 1)), np.zeros((1, 1))))


def test_strategies_for_the_network_are_forecast_to_be_quickest() -> None:
    found = forecasts(made(Layout.even(8, 8), [6.25e6] + [25e6] * 7))
    assert found[0].strategy == "packed_trees"
    assert found[0].of_bound > 0.99
    assert {"ring", "star", "minimum_spanning_tree"} <= {one.strategy for one in found}
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    many = {one.strategy for one in forecasts(made(Layout.even(129, 3), [1e9] * 3))}
    assert "ring" not in many
    assert "tree" in many


@pytest.mark.parametrize(("size", "hosts"), [(1, 1), (2, 2), (6, 3), (20, 20)])
def test_a_page_has_both_maps(size: int, hosts: int) -> None:
    found = made(Layout.even(size, hosts), [1e9] * hosts)
    text = page(found)
    maps = re.findall(r'<div class="heat">(.*?)</div>', text, re.DOTALL)
    assert len(maps) == (2 if size > 1 else 0)
    cells = [cell for one in maps for cell in re.findall(r"<td[^>]*>([^<]*)</td>", one)]
    figures = [one for one in cells if one in ("1000", "5000", "120", "20.0", "1.00", "5.00")]
    assert len(figures) == (2 * size * (size - 1) if size <= 16 else 0)
    assert text.count("<svg") == (2 if size > 16 else 0)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert page(found) == text
    assert "packed_trees" in text
