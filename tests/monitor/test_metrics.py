"""The endpoint for Prometheus: what it says, and when it cannot be."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import kfcomm
from kfcomm.errors import ConfigError
from kfcomm.monitor import metrics
from kfcomm.rendezvous.settings import detect
from kfcomm.testing import MemoryWorld, world
from tests.launch.launched import finished
from tests.support import free_port


@pytest.fixture
def port() -> int:
    """Unused port."""
    return free_port()


@pytest.fixture
def taken() -> Iterator[int]:
    """One that somebody listens at."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield int(sock.getsockname()[1])


Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scraped(port: int) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    return samples(text_string_to_metric_families(text))


def samples(families: Any) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def named(found: Samples, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def test_calls_of_a_world_of_one(port: int) -> None:
    with kfcomm.sync.init(metrics_port=port) as comm:
        for _ in range(3):
            comm.monitored_all_reduce(np.ones(10), "x")
        found = scraped(port)
        assert named(found, "kfcomm_info", rank="0", size="1", strategy="auto") == 1
        assert named(found, "kfcomm_collectives_total", key="x") == 3
        assert named(found, "kfcomm_collective_bytes_total", key="x") == 240
        assert named(found, "kfcomm_collective_failures_total", key="x") == 0
        assert named(found, "kfcomm_collective_duration_seconds_count") == 3
        assert named(found, "kfcomm_collective_duration_seconds_bucket", le="+Inf") == 3
        counts = [value for (name, _), value in sorted(found.items(), key=_bound) if name.endswith("seconds_bucket")]
        assert counts == sorted(counts)
        assert named(found, "kfcomm_throughput_bytes_per_second", strategy="auto") > 0
        assert named(found, "kfcomm_reference_throughput_bytes_per_second", strategy="auto") > 0
        assert named(found, "kfcomm_peak_memory_bytes") > 1 << 20
        assert named(found, "kfcomm_event_loop_lag_seconds") >= 0
        comm.all_reduce(np.ones(10), "x")
        assert named(scraped(port), "kfcomm_collectives_total", key="x") == 4
    with pytest.raises(OSError, match="refused"):
        scraped(port)


def _bound(item: Any) -> float:
    return float(dict(item[0][1]).get("le", 0))


def collected(comm: Any) -> Samples:
    return samples(metrics._Collector(lambda epoch: comm._session.at(epoch).engine.meter, comm.statistics).collect())


@pytest.mark.asyncio
async def test_peers_are_labelled_by_rank_and_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_LABELLED_KEYS", 2)
    comms: MemoryWorld
    async with world(2) as comms:
        for name in ("a", "b", "c", "d"):
            handles = [comm.all_reduce(np.ones(1000, np.float32), name) for comm in comms]
            for handle in handles:
                await handle
        found = collected(comms[0])
        (peer,) = comms[0].statistics().peers
    for name in ("sent_bytes", "received_bytes", "sent_messages", "received_messages"):
        expected = getattr(peer, name.replace("bytes", "nbytes"))
        assert named(found, f"kfcomm_{name}_total", peer="1", link="memory") == expected > 0
    assert named(found, "kfcomm_waited_seconds_total", peer="1") == peer.waited_s
    assert [named(found, "kfcomm_collectives_total", key=key) for key in ("a", "b", "(others)")] == [1, 1, 2]
    assert named(found, "kfcomm_collective_duration_seconds_count") == 4


@pytest.mark.parametrize("init", [kfcomm.init, kfcomm.sync.init], ids=["async", "sync"])
def test_a_port_needs_its_package_and_monitoring(init: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="metrics_port=9400 needs monitoring, which is off"):
        init(metrics_port=9400, monitor=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    needs = r'metrics_port=9400 needs .* prometheus_client.*: pip install "kfcomm\[metrics\]"'
    with pytest.raises(ConfigError, match=needs):
        init(metrics_port=9400)


@pytest.mark.asyncio
async def test_a_port_that_is_taken_is_named_and_nothing_stays_open(taken: int) -> None:
    with pytest.raises(ConfigError, match=f"metrics_port={taken}: port {taken} of 127.0.0.1 is taken"):
        kfcomm.sync.init(metrics_port=taken)
    with pytest.raises(ConfigError, match="is taken"):
        await kfcomm.init(metrics_port=taken)


@pytest.mark.parametrize("value", ["0", "65536", "-1", "http", "1.5"])
def test_invalid_port_setting_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=f"KFCOMM_METRICS_PORT='{value}' must be a port, from 1 to 65535"):
        detect({"KFCOMM_METRICS_PORT": value})


def test_invalid_port_argument_is_refused() -> None:
    for value in (True, 9400.5, 1 << 16):
        with pytest.raises(ConfigError, match=r"metrics_port=.* must be a port"):
            detect({}, metrics_port=value)  # type: ignore[arg-type]
    assert detect({}, metrics_port=9400).metrics_port == 9400
    assert detect({"KFCOMM_METRICS_PORT": "9400"}).metrics_port == 9400
    assert detect({}).metrics_port is None


def test_a_local_rank_beyond_the_last_port() -> None:
    with pytest.raises(ConfigError, match="metrics_port=65535: port 65536 of local rank 1 is out of range"):
        metrics.attend("127.0.0.1", 65535, 1, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("value", "expected"), [("0", False), ("1", True), ("", True)])
def test_monitoring_is_a_setting(value: str, expected: bool) -> None:
    assert detect({"KFCOMM_MONITOR": value}).monitor is expected
    assert detect({"KFCOMM_MONITOR": "1"}, monitor=False).monitor is False
    with pytest.raises(ConfigError, match="KFCOMM_MONITOR='maybe' must be 0 or 1"):
        detect({"KFCOMM_MONITOR": "maybe"})


PRINT = "import os; print(os.environ.get('KFCOMM_MONITOR'), os.environ.get('KFCOMM_METRICS_PORT'))"


@pytest.mark.parametrize(
    ("options", "said"),
    [((), "None None"), (("--no-monitor",), "0 None"), (("--monitor", "--metrics-port", "9400"), "1 9400")],
)
def test_options_of_run(options: tuple[str, ...], said: str) -> None:
    done = finished("run", "-n", "1", *options, sys.executable, "-c", PRINT)
    assert done.stdout == f"[0] {said}\n", done


def test_the_launcher_refuses_for_all_ranks_at_once() -> None:
    done = finished("run", "-n", "2", "--no-monitor", "--metrics-port", "9400", sys.executable, "-c", PRINT)
    assert (done.returncode, done.stdout) == (2, "")
    assert "metrics_port=9400 needs monitoring, which is off" in done.stderr


def test_garbage_gets_nothing_and_disturbs_no_rank(port: int) -> None:
    with kfcomm.sync.init(metrics_port=port) as comm, socket.create_connection(("127.0.0.1", port)) as silent:
        for garbage in (b"\0" * 100 + b"\r\n\r\n", b"POST /metrics HTTP/1.1\r\n\r\n", b""):
            with socket.create_connection(("127.0.0.1", port)) as sock:
                sock.sendall(garbage)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass
        assert named(scraped(port), "kfcomm_info", rank="0", size="1", strategy="auto") == 1
        comm.close()
        assert silent.recv(1) == b""


def test_the_package_is_imported_when_it_is_asked_for() -> None:
    program = "import sys, kfcomm\nwith kfcomm.sync.init(): pass\nprint('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.asyncio
async def test_counters_never_fall_when_the_ranks_change() -> None:
    async with world(3, transport="shm") as comms:

        async def works(comm: kfcomm.Communicator) -> None:
            for _ in range(10):
                await comm.all_reduce(np.ones(100), "x")

        async def shrinks(comm: kfcomm.Communicator) -> kfcomm.Communicator:
            await comm.agree(True)
            return await comm.shrink()

        await asyncio.gather(*map(works, comms))
        comms.kill(1)
        left = [comms[0], comms[2]]
        before = [collected(comm) for comm in left]
        after = await asyncio.gather(*map(shrinks, left))
        _grown(before, [collected(comm) for comm in left])
        await asyncio.gather(*map(works, after))
        now = [collected(comm) for comm in left]
        _grown(before, now)
        for old, new in zip(before, now, strict=True):
            assert (
                named(new, "kfcomm_collectives_total", key="x") == named(old, "kfcomm_collectives_total", key="x") + 10
            )
            assert named(new, "kfcomm_epoch") == 1
        again = await asyncio.gather(*map(shrinks, after))
        assert [comm.epoch for comm in again] == [2, 2]
        _grown(now, [collected(comm) for comm in left])


def _grown(before: list[Samples], now: list[Samples]) -> None:
    for old, new in zip(before, now, strict=True):
        fallen = {
            key: (value, new.get(key)) for key, value in old.items() if _grows(key[0]) and new.get(key, -1) < value
        }
        assert fallen == {}


def _grows(name: str) -> bool:
    return name.endswith(("_total", "_bucket", "_count", "_sum"))


@pytest.mark.asyncio
async def test_internal_calls_share_one_series() -> None:
    async with world(2) as comms:
        for name in ("kfcomm/boundary", "kfcomm/plans", "mine"):
            await asyncio.gather(*(comm.barrier(name) for comm in comms))
        await asyncio.gather(*(comm.set_strategy("ring") for comm in comms))
        found = collected(comms[0])
    keys = {dict(labels)["key"] for name, labels in found if name == "kfcomm_collectives_total"}
    assert keys == {"mine", "(kfcomm itself)"}
    assert named(found, "kfcomm_collectives_total", key="(kfcomm itself)") == 3
