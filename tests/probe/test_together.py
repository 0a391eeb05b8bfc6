"""Racks whose hosts share an uplink are found by a probe, and nothing else is taken for one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kfcomm import Communicator
from kfcomm.errors import CollectiveAborted, CollectiveError, ConfigError, PeerLost
from kfcomm.probe import Probe, live, pairs, together
from kfcomm.probe.report import as_text
from kfcomm.probe.together import tests_of as suspected_in
from kfcomm.rendezvous.saved_costs import Rack, saved
from kfcomm.simulate import SimulatedNetwork
from kfcomm.types import Layout, Uplink
from tests.conformance.worlds import ends, everywhere, works, world

PORT = 25e6


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pairs, "LONG_ENOUGH_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@dataclass
class Network:
    """Rates of the messages of a probe; those at the same time share ports and uplinks fairly."""

    racks: Sequence[Sequence[int]]
    uplink: float
    ports: Sequence[float]
    slow: dict[tuple[int, int], float] = field(default_factory=dict)
    noise: random.Random | None = None
    hosts: tuple[int, ...] = ()
    under_way: dict[Any, list[tuple[int, int]]] = field(default_factory=dict)

    def rack(self, host: int) -> int | None:
        return next((number for number, rack in enumerate(self.racks) if host in rack), None)

    def rate(self, flow: tuple[int, int], beside: Sequence[tuple[int, int]]) -> float:
        a, b = flow
        rates = [self.ports[a], self.ports[b], self.slow.get(flow, np.inf)]
        for end in (0, 1):
            rack = self.rack(flow[end])
            if rack is not None and self.rack(a) != self.rack(b):
                crossing = [one for one in beside if self.rack(one[end]) == rack != self.rack(one[1 - end])]
                rates.append(self.uplink / len(crossing))
        return min(rates) * (1.0 if self.noise is None else self.noise.uniform(0.9, 1.0))

    async def during(self, way: pairs.OneWay, running: Any) -> tuple[Any, float]:
        """Result of ``running``, and the rate of its way among those that ran meanwhile."""
        flow = self.hosts[way.source], self.hosts[way.target]
        mine = self.under_way[running] = [flow]
        for other in self.under_way.values():
            if other is not mine:
                mine.append(other[0])
                other.append(flow)
        found = await running
        del self.under_way[running]
        return found, self.rate(flow, mine)


def measured_by(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    lead, press = live.lead, live.press

    async def led(way: pairs.OneWay, *more: Any) -> pairs.Measured:
        found, rate = await network.during(way, lead(way, *more))
        return replace(found, bandwidth=rate)

    async def pressed(way: pairs.OneWay, back: pairs.OneWay, nbytes: int) -> float:
        _, rate = await network.during(way, press(way, back, nbytes))
        return nbytes / rate

    monkeypatch.setattr(live, "lead", led)
    monkeypatch.setattr(live, "press", pressed)


async def probed(network: Network, monkeypatch: pytest.MonkeyPatch, size: int, hosts: int) -> Probe:
    measured_by(network, monkeypatch)
    async with world(size, hosts=hosts) as comms:
        network.hosts = comms[0].layout.hosts
        probes = await everywhere(comms, lambda comm: comm.probe(nbytes=4096, rounds=1))
    for one in probes:
        assert one.uplinks == probes[0].uplinks
        assert np.array_equal(one.bandwidth, probes[0].bandwidth)
    return probes[0]


RACKS = {
    "neighbours": ([[0, 1, 2, 3], [4, 5, 6, 7]], 1.0),
    "neighbours, 2:1": ([[0, 1, 2, 3], [4, 5, 6, 7]], 2.0),
    "in turns": ([[0, 2, 4, 6], [1, 3, 5, 7]], 1.0),
    "uneven": ([[0, 1, 2, 5, 7], [3, 4, 6]], 1.0),
    "four": ([[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]], 1.0),
    "two and others": ([[0, 1, 2, 3], [4, 5, 6, 7]], 0.5),
}


@pytest.mark.asyncio
@pytest.mark.parametrize(("racks", "ports"), RACKS.values(), ids=RACKS)
@pytest.mark.parametrize("is_noisy", [False, True])
async def test_racks_are_found(
    racks: list[list[int]], ports: float, is_noisy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(map(len, racks))
    network = Network(racks, ports * PORT, [PORT] * size, noise=random.Random(7) if is_noisy else None)
    probe = await probed(network, monkeypatch, size, size)
    assert [one.hosts for one in probe.uplinks] == sorted(map(tuple, racks))
    for one in probe.uplinks:
        assert one.send == pytest.approx(ports * PORT, rel=0.15)
        assert one.receive == pytest.approx(ports * PORT, rel=0.15)
    # What a pair between racks gets alone is what its ports and the uplinks let through.
    rates = probe.measured_layout().costs.rates
    assert rates is not None
    assert rates.links[racks[0][0]][racks[1][0]] == pytest.approx(min(1.0, ports) * PORT, rel=0.15)
    assert rates.uplinks == probe.uplinks


@pytest.mark.asyncio
async def test_racks_of_hosts_with_several_ranks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = await probed(Network([[0, 1], [2, 3]], PORT, [PORT] * 4), monkeypatch, 8, 4)
    assert probe.uplinks == (Uplink((0, 1), PORT, PORT), Uplink((2, 3), PORT, PORT))
    assert np.allclose(probe.bandwidth[0, 4:], PORT)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "network",
    [
        Network([], 0.0, [PORT] * 8, noise=random.Random(3)),
        Network([], 0.0, [PORT, PORT, PORT, PORT / 4, PORT / 8]),
        Network([], 0.0, [PORT] * 5, {(0, 3): PORT / 10, (3, 0): PORT / 10}),
        # Links between two groups that are slow each by itself.
        Network([], 0.0, [PORT] * 6, {(a, b): PORT / 4 for a in range(6) for b in range(6) if (a < 3) != (b < 3)}),
        Network([[0, 1, 2, 3], [4, 5, 6, 7]], 4 * PORT, [PORT] * 8),
        Network([[0, 1]], PORT, [PORT] * 3),
    ],
    ids=["alike", "unlike", "slow link", "far", "wide uplink", "three hosts"],
)
async def test_other_networks_have_no_racks(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(network.ports)
    probe = await probed(network, monkeypatch, size, size)
    assert probe.uplinks == ()
    assert all(
        probe.bandwidth[a, b] <= min(network.ports[a], network.ports[b], network.slow.get((a, b), np.inf))
        for a in range(size) for b in range(size) if a != b
    )  # fmt: skip


def test_without_slow_links_nothing_more_is_measured() -> None:
    def suspects(size: int, part: float) -> together.Tests:
        half = size // 2
        slots = [tuple((a, half + (a + by) % half, part) for a in range(half)) for by in range(half)]
        return suspected_in(Layout.even(size, size), slots)

    assert suspects(8, 0.9).slots == ()
    assert suspects(together.MAX_HOSTS + 2, 0.25).slots == ()
    half = together.MAX_HOSTS // 2
    assert suspects(2 * half, 0.25).groups == (tuple(range(half)), tuple(range(half, 2 * half)))
    assert 0 < len(suspects(together.MAX_HOSTS, 0.25).slots) <= together.MAX_TESTS


@pytest.mark.asyncio
async def test_a_rank_that_fails_while_pairs_measure_together_fails_all(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network([[0, 1], [2, 3]], PORT, [PORT] * 4)
    measured_by(network, monkeypatch)
    take = live.take

    async def taken(way: pairs.OneWay, back: pairs.OneWay, nbytes: int) -> None:
        if way.target == 3:
            raise ConfigError("broken on purpose")
        await take(way, back, nbytes)

    async with world(4, hosts=4, aborted=True) as comms:
        network.hosts = comms[0].layout.hosts

        def quick(comm: Communicator) -> Any:
            return comm.probe(nbytes=4096, rounds=1)

        with monkeypatch.context() as broken:
            broken.setattr(live, "take", taken)
            errors = await ends(comms, quick)
        assert isinstance(errors[3], ConfigError)
        assert all(isinstance(error, CollectiveError) and "broken on purpose" in str(error) for error in errors[:3])
        network.under_way.clear()
        await works(comms)
        probes = await everywhere(comms, quick)
        assert len(probes[0].uplinks) == 2


@pytest.mark.asyncio
async def test_a_rank_that_dies_while_pairs_measure_together_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network([[0, 1], [2, 3]], PORT, [PORT] * 4)
    measured_by(network, monkeypatch)
    take = live.take

    async def taken(way: pairs.OneWay, back: pairs.OneWay, nbytes: int) -> None:
        if way.target == 3:
            comms.kill(3)
            await asyncio.Event().wait()
        await take(way, back, nbytes)

    monkeypatch.setattr(live, "take", taken)
    async with world(4, hosts=4, quiet=False) as comms:
        network.hosts = comms[0].layout.hosts
        probing = [asyncio.ensure_future(comm.probe(nbytes=4096, rounds=1)) for comm in comms]
        errors = await asyncio.gather(*probing[:3], return_exceptions=True)
        probing[3].cancel()
        await asyncio.wait(probing[3:])
        # Others may hear of it by the rank that measured with it first.
        assert all(isinstance(error, (PeerLost, CollectiveAborted)) for error in errors), errors
        assert all("rank 3 is lost: killed" in str(error) for error in errors), errors


def test_a_probe_with_racks_is_kept_written_and_read(tmp_path: Path) -> None:
    uplinks = (Uplink((0, 1), PORT, PORT / 2), Uplink((2, 3), PORT / 2, PORT))
    names = ("a 10.0.0.1", "b 10.0.0.2", "c 10.0.0.3", "d 10.0.0.4")
    square = np.full((4, 4), PORT)
    probe = Probe(Layout.even(4, 4), np.full((4, 4), 1e-4), square, host_names=names, uplinks=uplinks)
    probe.save(tmp_path / "probe.json")
    again = Probe.load(tmp_path / "probe.json")
    assert again.uplinks == uplinks
    probe.keep()
    assert saved().racks == (Rack(names[:2], PORT, PORT / 2), Rack(names[2:], PORT / 2, PORT))
    rates = probe.network().rates
    assert rates is not None
    assert rates.uplinks == uplinks
    assert probe.bound_seconds(1) == pytest.approx(2 / PORT)
    assert replace(probe, uplinks=()).bound_seconds(1) == pytest.approx(1.5 / PORT)
    assert "Hosts 0, 1 share an uplink: 25.0 MB/s out and 12.5 MB/s in, 50% of what" in as_text(probe)
    # The simulator's uplinks are alike in both directions: the slower one counts.
    network = SimulatedNetwork.of_probe(probe)
    assert [(one.hosts, one.uplink) for one in network.switches] == [(names[:2], PORT / 2), (names[2:], PORT / 2)]
    found = network.costs().rates
    assert found is not None
    assert [one.hosts for one in found.uplinks] == [(0, 1), (2, 3)]
    record = probe.as_json()
    del record["uplinks"]
    assert Probe.from_json(record).uplinks == ()


@pytest.mark.parametrize(
    ("uplinks", "message"),
    [
        ([{"hosts": [0, 4], "send": 1.0, "receive": 1.0}], "a rack names host 4, the layout has 4: 0..3"),
        ([{"hosts": [0, 1], "send": 0.0, "receive": 1.0}], "expected finite numbers of bytes/s above 0"),
        ([{"hosts": [0, 1], "send": 1.0, "receive": float("nan")}], "expected finite numbers of bytes/s above 0"),
        ([{"hosts": [0, 1], "send": 1.0}], "field 'receive' is missing"),
        ([{"hosts": [0, 1], "send": 1.0, "receive": 1.0}] * 2, "host 0 is in two racks"),
        (3, "object is not iterable"),
    ],
)
def test_racks_that_cannot_be_are_refused(uplinks: Any, message: str) -> None:
    record = Probe(Layout.even(4, 4), np.full((4, 4), 1e-4), np.full((4, 4), PORT)).as_json()
    with pytest.raises(ConfigError, match=message):
        Probe.from_json({**record, "uplinks": uplinks})
