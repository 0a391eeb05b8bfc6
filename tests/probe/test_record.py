from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kfcomm.errors import ConfigError
from kfcomm.probe import Probe
from kfcomm.rendezvous.host import saved_costs
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


def test_nobody_changes_what_was_measured() -> None:
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


def test_what_work_was_measured_is_kept_too(tmp_path: Path) -> None:
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


def test_what_to_make_of_it() -> None:
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
        ({"hosts": 5}, "this is no probe: 'int' object is not iterable"),
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
def test_what_is_no_probe(change: dict[str, Any], message: str, tmp_path: Path) -> None:
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
