"""Saved costs of messages: files are complete, and not trusted."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.errors import ConfigError
from kfcomm.rendezvous.host import (
    LEAST,
    MOST,
    describe_saved,
    forget_costs,
    is_plausible,
    path_of_costs,
    save_costs,
    saved_costs,
)
from kfcomm.types import UNMEASURED, Costs, Layout

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
