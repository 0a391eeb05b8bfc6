"""Explanations of the choices of `auto`, and the predicted gain of one strategy over another."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from kfcomm.strategies import build
from kfcomm.strategies.auto import explained
from kfcomm.strategies.chunks import ChunkSizes
from kfcomm.strategies.cost import network_of, predict_seconds
from kfcomm.strategies.gains import Gain, predicted_gain
from kfcomm.strategies.matrices import rates_of
from kfcomm.strategies.network import NetworkModel
from kfcomm.strategies.price import Market, Priced
from kfcomm.types import Costs, Layout, Rates, Uplink

MIB = 1 << 20
PORT = 25e6


def racks() -> Layout:
    """Two racks of four hosts, in turns, with a narrow uplink each."""
    layout = Layout.even(8, 8)
    rates = rates_of(layout, [[PORT] * 8] * 8, [[1e-4] * 8] * 8)
    uplinks = Uplink((0, 2, 4, 6), PORT, PORT), Uplink((1, 3, 5, 7), PORT, PORT)
    costs = Costs(cross_alpha_s=1e-4, cross_beta_s_per_byte=1 / PORT, rates=rates._replace(uplinks=uplinks))
    return replace(layout, costs=costs)


def unlike() -> tuple[Layout, Rates]:
    ports = [50.0, 100.0, 400.0, 400.0, 400.0]
    layout = Layout.even(5, 5)
    return layout, rates_of(layout, [[min(a, b) * 1e6 for b in ports] for a in ports], [[1e-4] * 5] * 5)


def test_uplinks_and_savings_of_graphs_by_racks_are_said() -> None:
    lines = list(explained(racks()))
    assert (
        lines[1] == "  hosts 0, 2, 4, 6 share an uplink of 25.0 MB/s out and 25.0 in, 25% of what their ports can send"
    )
    assert any(re.search(r"the busiest uplink carries \d\.\d\d, in \d+ steps; the next best", line) for line in lines)


def test_savings_of_combinations_are_said() -> None:
    lines = list(explained(Layout.even(8, 2)))
    assert "hosts that are alike" in lines[0]
    assert any("not shared out" in line for line in lines)
    assert any("the busiest host sends to others, or receives" in line for line in lines)


def test_a_gain_is_that_of_the_messages_in_use() -> None:
    layout = Layout.even(8, 8)
    star, ring = build("star", layout), build("ring", layout)
    short, long = (predicted_gain(star, ring, layout, {size: 1}).factor for size in (1 << 10, 64 * MIB))
    assert short < 1 < long
    # Sizes between two powers count as the greater one, so often as there are messages of them.
    both = predicted_gain(star, ring, layout, {3 << 19: 2, 2 * MIB: 1})
    assert both == pytest.approx([3 * one for one in predicted_gain(star, ring, layout, {2 * MIB: 1})])
    assert Gain(0.0, 0.0).factor == 1.0


def test_work_of_messages_is_not_counted_as_latency() -> None:
    rows = [[0.0, 5e-5], [5e-5, 0.0]]
    layout = Layout.even(2, 2)
    network = network_of(layout, rows, [[0.0, 1e9], [1e9, 0.0]], [[0.0, 2e-5], [2e-5, 0.0]])
    assert (network.cross_alpha_s, network.overhead_s) == (pytest.approx(3e-5), 2e-5)


def test_a_chunk_size_of_its_own_is_that_of_every_message() -> None:
    layout = Layout.even(4, 4)
    own = replace(build("ring", layout).select(0), chunk_nbytes=1 << 14)
    assert {ChunkSizes(layout).of(own, nbytes) for nbytes in (1, MIB, 64 * MIB)} == {1 << 14}


def test_long_messages_of_a_direct_strategy_cost_what_its_stars_do() -> None:
    layout = Layout.even(4, 4)
    priced = Priced(build("direct", layout).select(0), Market(layout, NetworkModel()))
    first, second = priced.seconds(16 * MIB), priced.seconds(32 * MIB)
    assert second == pytest.approx(2 * first, rel=0.1)


def test_whole_messages_on_one_host_cost_what_the_worst_pair_does() -> None:
    layout = Layout.even(4)
    shared = build("clique", layout).select(MIB)
    assert predict_seconds(replace(shared, is_whole=True), layout, MIB) > predict_seconds(shared, layout, MIB)


def test_messages_without_bytes_take_latencies_alone() -> None:
    layout, rates = unlike()
    latencies = tuple(tuple(1e-4 * (1 + (a * b) % 3) for b in range(5)) for a in range(5))
    known = replace(layout, costs=Costs(rates=rates._replace(latency_s=latencies)))
    assert 2e-4 <= predict_seconds(build("binary_tree", known), known, 0) < 1e-2
