"""Addresses of this host, and its saved costs of messages: files are complete, and not trusted."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.errors import ConfigError, RendezvousError
from kfcomm.rendezvous.host import (
    LEAST,
    MOST,
    choose_address,
    describe_saved,
    forget_costs,
    interfaces,
    is_local,
    is_loopback,
    is_plausible,
    path_of_costs,
    save_costs,
    saved_costs,
)
from kfcomm.types import UNMEASURED, Costs, Layout


def test_loopback_is_listed() -> None:
    assert ("lo", "127.0.0.1") in [(each.name, each.address) for each in interfaces()]


def test_every_listed_address_can_be_bound() -> None:
    for each in interfaces():
        assert is_local(each.address)
        family = socket.AF_INET6 if ":" in each.address else socket.AF_INET
        with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as listener:
            listener.bind((each.address, 0))


def test_the_route_decides() -> None:
    assert choose_address(None, ("127.0.0.1", 9)) == "127.0.0.1"
    for each in interfaces():
        # towards one of its own addresses a host speaks from that very address
        assert choose_address(None, (each.address, 9)) == each.address


def test_without_a_rendezvous_loopback_is_enough() -> None:
    assert choose_address(None, None) == "127.0.0.1"


@pytest.mark.parametrize("spec", ["lo", "127.0.0.1", "127.0.0.0/8", "127.0.0.1/32", "127.0.0.9/8"])
def test_by_name_address_or_network(spec: str) -> None:
    assert choose_address(spec, ("127.0.0.1", 9)) == "127.0.0.1"


def test_an_address_that_is_not_listed_but_works() -> None:
    assert choose_address("127.0.0.2", None) == "127.0.0.2"


@pytest.mark.parametrize("spec", ["no-such-interface", "198.51.100.7", "198.51.100.0/24", ""])
def test_unknown_interface_is_refused_with_a_list(spec: str) -> None:
    with pytest.raises(ConfigError, match=rf"{spec}.*lo 127\.0\.0\.1"):
        choose_address(spec, ("127.0.0.1", 9))


def test_a_name_that_does_not_resolve() -> None:
    with pytest.raises(RendezvousError, match=r"no-such-host\.invalid"):
        choose_address(None, ("no-such-host.invalid", 9))


def test_loopback_is_known_by_name_and_address() -> None:
    assert is_loopback("localhost")
    assert is_loopback("127.3.2.1")
    assert is_loopback("::1")
    assert not is_loopback("10.0.0.1")
    assert not is_loopback("node7")


def test_addresses_of_other_hosts_are_not_local() -> None:
    assert not is_local("198.51.100.7")


LOCAL = Costs(local_alpha_s=4e-5, overhead_s=8e-6)
CROSS = Costs(cross_alpha_s=3e-4, overhead_s=9e-6)
some_costs = st.builds(Costs, *[st.none() | st.floats(LEAST, MOST)] * len(Costs._fields))


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


@pytest.mark.parametrize("costs", [None, (), [None] * 6, (None,) * 5, (0.0,) + (None,) * 5, (1,) + (None,) * 5])
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
