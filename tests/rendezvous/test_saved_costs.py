"""Saved costs and links of this host: files are complete, and not trusted; all ranks make the same of all rows."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.engine.membership import kept_rates, layout_of
from kfcomm.errors import ConfigError
from kfcomm.rendezvous.identity import PeerInfo
from kfcomm.rendezvous.saved_costs import (
    LEAST,
    MAX_HOSTS,
    MOST,
    Links,
    Rack,
    Saved,
    describe_saved,
    forget_costs,
    host_name,
    is_plausible,
    is_row,
    path_of_costs,
    rates_of_rows,
    row_of,
    save_costs,
    saved,
    saved_costs,
)
from kfcomm.types import UNMEASURED, Costs, Layout, Rates, Uplink

LOCAL = Costs(local_alpha_s=4e-5, overhead_s=8e-6)
CROSS = Costs(cross_alpha_s=3e-4, overhead_s=9e-6)
some_costs = st.builds(Costs, *[st.none() | st.floats(LEAST, MOST)] * len(UNMEASURED.constants))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_costs_are_unmeasured_without_a_file() -> None:
    assert saved_costs() == UNMEASURED


def test_measured_costs_replace_saved_ones(cache: Path) -> None:
    assert save_costs(LOCAL) == path_of_costs()
    assert saved_costs() == LOCAL
    save_costs(CROSS)
    assert saved_costs() == Costs(local_alpha_s=4e-5, cross_alpha_s=3e-4, overhead_s=9e-6)
    assert [path.parent for path in cache.rglob("*.json")] == [cache / "kfcomm"]
    assert not list(cache.rglob("*.[0-9]*"))


def test_the_cache_is_in_the_home_by_default() -> None:
    assert path_of_costs({}).parent == Path.home() / ".cache" / "kfcomm"
    assert path_of_costs({"XDG_CACHE_HOME": ""}) == path_of_costs({})


@pytest.mark.parametrize(
    "change",
    [{"format": 2}, {"overhead_s": "8e-6"}, {"overhead_s": -1.0}, {"overhead_s": 11.0}, {"overhead_s": True}],
)
def test_a_file_that_holds_something_else_is_left_out(
    change: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    path = save_costs(LOCAL)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with caplog.at_level(logging.WARNING, "kfcomm"):
        assert saved_costs() == UNMEASURED
    assert f"{path} is left out: it holds something else; kfcomm probe --keep makes it anew" in caplog.text
    save_costs(CROSS)
    assert saved_costs() == CROSS


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "7", "\udcff"])
def test_a_file_that_is_none_is_left_out(text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = save_costs(LOCAL)
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert saved_costs() == UNMEASURED
    assert "is left out" in caplog.text


def test_a_file_that_cannot_be_read_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    path_of_costs().mkdir(parents=True)
    assert saved_costs() == UNMEASURED
    assert "is left out: Is a directory" in caplog.text


def test_a_cache_that_cannot_be_written_is_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "file"))
    with pytest.raises(ConfigError, match=r"cannot write .*file.*: Not a directory"):
        save_costs(LOCAL)


def test_of_several_hosts_the_worst_counts() -> None:
    assert Costs.worst([LOCAL, CROSS, UNMEASURED]) == Costs(local_alpha_s=4e-5, cross_alpha_s=3e-4, overhead_s=9e-6)
    assert Costs.worst([UNMEASURED]) == UNMEASURED
    assert Layout.of("aab", costs=LOCAL).part((0, 2)).costs == LOCAL


@given(some_costs, some_costs, some_costs)
def test_the_worst_is_the_same_in_any_order(a: Costs, b: Costs, c: Costs) -> None:
    assert Costs.worst([a, b, c]) == Costs.worst([c, Costs.worst([b, a])])
    assert is_plausible(Costs.worst([a, b, c]))


@pytest.mark.parametrize(
    "costs", [None, (), [None] * 7, (None,) * 5, (0.0,) + (None,) * 6, (1,) + (None,) * 6, (None,) * 6 + (1.0,)]
)
def test_implausible_costs_are_refused(costs: object) -> None:
    assert not is_plausible(costs)


def test_how_busy_the_host_was_is_kept_and_told() -> None:
    assert describe_saved() == ""
    path = save_costs(LOCAL, 0.031)
    record = json.loads(path.read_text())
    assert record["busy"] == 0.031
    assert describe_saved() == f"{path}, measured {record['measured']}, 3% of the processors busy"
    save_costs(LOCAL)
    assert describe_saved() == f"{path}, measured {json.loads(path.read_text())['measured']}"


def test_forgotten_costs_are_removed() -> None:
    path = save_costs(LOCAL)
    assert forget_costs() == path
    assert saved_costs() == UNMEASURED
    assert forget_costs() is None
    path.mkdir()
    with pytest.raises(ConfigError, match="cannot remove"):
        forget_costs()


def test_without_a_home_costs_are_unknown_and_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as without HOME and an entry in passwd
    assert saved_costs() == UNMEASURED
    assert describe_saved() == ""
    with pytest.raises(ConfigError, match="set HOME, or XDG_CACHE_HOME"):
        save_costs(LOCAL)


# ---------------------------------------------------------------- links

NAMES = ("node1 10.0.0.1", "node2 10.0.0.2", "node3 10.0.0.3")
PORTS: Mapping[str, float] = dict(zip(NAMES, (5e7, 5e7, 6.25e6), strict=True))


def links_between(ports: Mapping[str, float] = PORTS) -> dict[str, dict[str, tuple[float, float]]]:
    return {a: {b: (min(ports[a], ports[b]), 1e-4) for b in ports if b != a} for a in ports}


LINKS = links_between()


def peer(rank: int, name: str, links: Links = LINKS, host: str | None = None) -> PeerInfo:
    hostname, address = name.split()
    one = PeerInfo.here(rank=rank, address=address, port=4711)
    one = replace(one, uid=f"uid-{rank}", hostname=hostname, host=host or hostname, links=row_of(links, name))
    return PeerInfo.from_wire(one.to_wire())


def test_links_are_saved_and_replaced_one_by_one() -> None:
    save_costs(LOCAL, links=LINKS)
    assert saved() == Saved(LOCAL, LINKS)
    newer = {NAMES[0]: {NAMES[1]: (1e6, 2e-4)}, "node4 10.0.0.4": {NAMES[0]: (3e6, 1e-4)}}
    save_costs(CROSS, links=newer)
    assert saved().links == {
        NAMES[0]: {**LINKS[NAMES[0]], **newer[NAMES[0]]}, NAMES[1]: LINKS[NAMES[1]], NAMES[2]: LINKS[NAMES[2]],
        "node4 10.0.0.4": newer["node4 10.0.0.4"],
    }  # fmt: skip
    assert "with the links of 4 hosts" in describe_saved()
    save_costs(CROSS)
    assert len(saved().links) == 4


def test_a_file_of_a_version_without_links_is_read() -> None:
    path = save_costs(LOCAL)
    assert "hosts" not in json.loads(path.read_text())
    assert saved() == Saved(LOCAL, {})


@pytest.mark.parametrize(
    "change",
    [
        {"bandwidth": [[None, 0.0, 1e6]] * 3}, {"bandwidth": [[None, -1.0, 1e6]] * 3}, {"bandwidth": [[None, 1e6]] * 3},
        {"bandwidth": [[None, math.nan, 1e6]] * 3}, {"bandwidth": [[None, "fast", 1e6]] * 3}, {"bandwidth": None},
        {"bandwidth": [[None, 1e6, 1e6]] * 2}, {"latency_s": [[None, -1.0, 0.0]] * 3}, {"hosts": ["a", "a", "b"]},
        {"latency_s": [[None] * 3] * 3}, {"hosts": [1, 2, 3]}, {"hosts": 7}, {"latency_s": [[None, 1e9, 0.0]] * 3},
    ],
)  # fmt: skip
def test_links_that_cannot_be_are_left_out(change: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    path = save_costs(LOCAL, links=LINKS)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert saved() == Saved(UNMEASURED, {})
    assert f"{path} is left out: it holds something else; kfcomm probe --keep makes it anew" in caplog.text


def test_links_of_too_many_hosts_are_not_kept() -> None:
    many = links_between({host_name("n", f"10.0.{n // 256}.{n % 256}"): 1e6 for n in range(MAX_HOSTS + 1)})
    with pytest.raises(ConfigError, match=rf"{MAX_HOSTS + 1} hosts are not kept, only of up to {MAX_HOSTS}"):
        save_costs(LOCAL, links=many)
    save_costs(LOCAL, links=LINKS)
    first = dict(list(many.items())[:MAX_HOSTS])
    fits = {a: {b: link for b, link in row.items() if b in first} for a, row in first.items()}
    save_costs(LOCAL, links=fits)
    assert len(saved().links) == MAX_HOSTS
    assert is_row(row_of(saved().links, next(iter(fits))))


def test_all_ranks_have_one_picture_in_the_order_of_the_job() -> None:
    layout = layout_of([peer(0, NAMES[2]), peer(1, NAMES[0]), peer(2, NAMES[2]), peer(3, NAMES[1])])
    assert layout.hosts == (0, 1, 0, 2)
    rates = layout.costs.rates
    assert rates is not None
    assert rates.send == rates.receive == (6.25e6, 5e7, 5e7)
    assert rates.links[1] == (6.25e6, 0.0, 5e7)
    assert rates.latency_s[0] == (0.0, pytest.approx(1e-4), pytest.approx(1e-4))
    assert layout.part([3, 1]).costs.rates == rates.part([2, 1])
    assert layout.part([0, 2]).costs.rates is None


def test_ports_are_known_in_a_job_on_a_part_of_the_hosts() -> None:
    ports = dict(zip(NAMES, (5e7, 4e7, 6.25e6), strict=True))
    rates = layout_of([peer(0, NAMES[2], links_between(ports)), peer(1, NAMES[0], links_between(ports))]).costs.rates
    assert rates == Rates((6.25e6, 4e7), (6.25e6, 4e7), ((0.0, 6.25e6), (6.25e6, 0.0)), rates and rates.latency_s)


def test_a_rank_with_another_file_does_not_see_another_picture() -> None:
    """Of each host the first rank that has kept something counts, on all ranks."""
    slower = links_between(dict.fromkeys(NAMES, 1000000.0))
    alike = [peer(0, NAMES[0]), peer(1, NAMES[1]), peer(2, NAMES[1], slower)]
    assert layout_of(alike) == layout_of([*alike[:2], replace(alike[2], links=b"")])
    assert layout_of(alike) == layout_of(
        [alike[0], replace(alike[1], links=b""), replace(alike[2], links=alike[1].links)]
    )


def test_hosts_that_were_not_measured_leave_the_picture_out() -> None:
    assert kept_rates([peer(1, "node9 10.0.0.9"), peer(0, NAMES[0])]) == (
        None, "nothing is kept on host node9 10.0.0.9",
    )  # fmt: skip
    # Its address now belongs to another host.
    moved = peer(1, NAMES[1].replace("node2", "node8"), {**LINKS, "node8 10.0.0.2": LINKS[NAMES[1]]})
    assert kept_rates([peer(0, NAMES[0]), moved]) == (
        None, "the link from host node1 10.0.0.1 to host node8 10.0.0.2 was not measured",
    )  # fmt: skip
    assert kept_rates([peer(0, NAMES[0], {}), peer(1, NAMES[1], {})]) == (None, "")
    assert kept_rates([peer(0, NAMES[0]), peer(1, NAMES[0])]) == (None, "")


# ---------------------------------------------------------------- racks

MORE = (*NAMES, "node4 10.0.0.4")
RACKED = links_between(dict.fromkeys(MORE, 5e7))
RACKS = (Rack(MORE[:2], 4e7, 3e7), Rack(MORE[2:], 3e7, 4e7))


def test_racks_are_kept_until_their_hosts_are_measured_anew() -> None:
    save_costs(LOCAL, links=RACKED, racks=RACKS)
    assert saved() == Saved(LOCAL, RACKED, RACKS)
    assert "with the links of 4 hosts in 2 racks" in describe_saved()
    save_costs(CROSS)
    part = {a: {b: link for b, link in row.items() if b in MORE[:2]} for a, row in RACKED.items() if a in MORE[:2]}
    save_costs(CROSS, links=part)  # two hosts alone do not show what they share
    assert saved().racks == RACKS
    wider = Rack(MORE[1:], 6e7, 6e7)
    save_costs(CROSS, links=RACKED, racks=[wider])
    assert saved().racks == (wider,)
    save_costs(CROSS, links=RACKED)
    assert saved().racks == ()


def racked_peers(names: Sequence[str], racks: Sequence[Rack] = RACKS) -> list[PeerInfo]:
    peers = [peer(rank, name, RACKED) for rank, name in enumerate(names)]
    return [
        PeerInfo.from_wire(replace(one, links=row_of(RACKED, name, racks)).to_wire())
        for one, name in zip(peers, names, strict=True)
    ]


def test_all_ranks_see_the_racks_in_the_order_of_the_job() -> None:
    rates = layout_of(racked_peers([MORE[2], MORE[0], MORE[3], MORE[1]])).costs.rates
    assert rates is not None
    assert rates.uplinks == (Uplink((0, 2), 3e7, 4e7), Uplink((1, 3), 4e7, 3e7))
    for names in ([MORE[0], MORE[2]], MORE[:2]):
        alone = layout_of(racked_peers(names)).costs.rates
        assert alone is not None
        assert alone.uplinks == ()


@pytest.mark.parametrize(
    ("racks", "reason"),
    [
        ([{"hosts": [MORE[0], "node9 10.0.0.9"], "send": 1e6, "receive": 1e6}], "names host 'node9 10.0.0.9', whose"),
        ([{"hosts": [MORE[0], MORE[1]], "send": 0.0, "receive": 1e6}], "rate of a rack is out of range"),
        ([{"hosts": [MORE[0], MORE[1]], "send": 1e6, "receive": math.nan}], "rate of a rack is out of range"),
        ([{"hosts": [MORE[0], MORE[1]], "send": 1e6}], "a rack needs hosts, and rates"),
        ([{"hosts": [MORE[0]], "send": 1e6, "receive": 1e6}] * 2, "a host is in two racks"),
        (7, "a rack needs hosts, and rates"), ([7], "a rack needs hosts, and rates"),
        ([{"hosts": [[]], "send": 1e6, "receive": 1e6}], "a rack needs hosts, and rates"),
    ],
)  # fmt: skip
def test_racks_that_cannot_be_are_left_out(racks: object, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    path = save_costs(LOCAL, links=RACKED)
    path.write_text(json.dumps({**json.loads(path.read_text()), "racks": racks}))
    assert saved() == Saved()
    assert str(path) in caplog.text
    assert reason in caplog.text


def test_a_half_written_file_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    path = save_costs(LOCAL, links=RACKED, racks=RACKS)
    text = path.read_text()
    for end in (0, 1, len(text) // 2, len(text) - 2):
        path.write_text(text[:end])
        assert saved() == Saved()
        assert "is left out" in caplog.text


@given(st.binary(max_size=100))
def test_rows_from_the_wire_are_not_trusted(data: bytes) -> None:
    if is_row(data):
        rates, _ = rates_of_rows(NAMES, [data] * 3)
        assert rates is None or all(rate > 0 for rate in rates.send)
    row = row_of(LINKS, NAMES[0])
    assert is_row(row)
    racked = row_of(RACKED, MORE[0], RACKS)
    assert is_row(racked)
    assert not is_row(racked[:16] + bytes(4) + racked[20:])
    assert is_row(b"")
    assert not is_row(row[:-1])
    assert not is_row(row[:8])
    assert not is_row(row[:4] + bytes(4) + row[8:])
    assert not is_row(None)


def test_costs_are_read_back_from_a_record() -> None:
    rates = layout_of([peer(0, NAMES[0]), peer(1, NAMES[1])]).costs.rates
    for costs in (UNMEASURED, CROSS, CROSS._replace(rates=rates)):
        assert Costs.of_record(json.loads(json.dumps(costs))) == costs
    assert Costs.of_record(list(CROSS.constants)) == CROSS


def test_a_layout_refuses_rates_of_other_hosts() -> None:
    rates = layout_of([peer(0, NAMES[0]), peer(1, NAMES[1])]).costs.rates
    with pytest.raises(ValueError, match="rates of 2 hosts, the layout has 3"):
        Layout((0, 1, 2), costs=Costs(rates=rates))
