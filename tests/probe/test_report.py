"""What people read: tables that line up, sentences about what stands out, and a page that draws it."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from kfcomm.probe import Probe
from kfcomm.probe.report import as_text, findings, forecasts, page
from kfcomm.types import Layout


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


def test_nothing_stands_out_among_equals() -> None:
    words = findings(made(Layout.even(4), [1e9]))
    assert words == ["No host and no link is much slower than the others.", "The slowest link is 0 → 1 with 5.00 GB/s."]
    assert "One rank has no links." in as_text(Probe(Layout((0,)), np.zeros((1, 1)), np.zeros((1, 1))))


def test_what_was_made_for_the_network_is_forecast_to_be_quickest() -> None:
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
    maps = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(maps) == 2
    texts = [
        "".join(part.itertext()) for one in maps for part in ElementTree.fromstring(one).iter() if "text" in part.tag
    ]
    assert texts.count("from rank") == 2
    figures = [one for one in texts if one in ("1000", "5000", "120", "20.0", "1.00", "5.00")]
    assert len(figures) >= (2 * size * (size - 1) if 1 < size <= 16 else 0)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert page(found) == text
    assert "packed_trees" in text
