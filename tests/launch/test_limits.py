"""Time limits of jobs, and ranges of ports for their ranks."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator

import pytest

from kfcomm.common.sizes import parse_duration
from kfcomm.errors import ConfigError
from kfcomm.rendezvous.settings import detect
from kfcomm.transports.sockets import Listener
from tests.launch.launched import finished


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("0.5", 0.5), ("30s", 30), ("2m", 120), ("2h", 7200), ("1h30m", 5400), (" 2D12H ", 216_000)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "-1", "h", "1h 30m", "30m1h", "1x", "1e3", "inf", "1:30"])
def test_malformed_durations(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a duration above 0"):
        parse_duration(text)


@pytest.mark.parametrize("options", [(), ("--elastic", "1:2"), ("--keep-going",)])
def test_job_is_ended_at_its_time_limit(options: tuple[str, ...]) -> None:
    done = finished("run", "-n", "2", *options, "--time-limit", "0.5s", "bash", "-c", "echo here; exec sleep 600")
    assert done.returncode == 124
    assert "kfcomm: the time limit of 0.5 s is up: the ranks were ended" in done.stderr


def test_rank_that_refuses_to_end_is_killed_after_the_grace() -> None:
    stubborn = "trap '' TERM; while :; do sleep 600 & wait; done"
    done = finished("run", "-n", "1", "--time-limit", "0.3", "--grace", "0.2", "bash", "-c", stubborn)
    assert done.returncode == 124


def test_job_that_ends_before_its_limit_has_its_own_exit_code() -> None:
    assert finished("run", "-n", "2", "--time-limit", "1h", "true").returncode == 0
    assert finished("run", "-n", "2", "--time-limit", "1h", "false").returncode == 1
    fails = 'test "$KFCOMM_RANK" = 0 && exit 3; exec sleep 600'
    done = finished("run", "-n", "2", "--keep-going", "--time-limit", "1s", "bash", "-c", fails)
    assert done.returncode == 3
    done = finished("run", "-n", "1", "--time-limit", "soon", "true")
    assert done.returncode == 2
    assert "expected a duration above 0" in done.stderr


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def test_listener_takes_a_free_port_of_its_range(taken: socket.socket) -> None:
    port = taken.getsockname()[1]
    listener = Listener("127.0.0.1", ports=(port, min(port + 50, 65535)))
    assert port < listener.port <= port + 50
    listener.close()
    with pytest.raises(ConfigError, match=f"no port from {port} to {port} of 127.0.0.1 is free"):
        Listener("127.0.0.1", ports=(port, port))


def test_setting_of_a_range() -> None:
    assert detect({}).ports is None
    assert detect({"KFCOMM_PORT_RANGE": "9000:9100"}).ports == (9000, 9100)
    assert detect({}, port_range="9000").ports == (9000, 9000)
    for bad in ("0:5", "9100:9000", "1:65536", "a:b", "1:2:3", ":"):
        with pytest.raises(ConfigError, match=r"KFCOMM_PORT_RANGE=.* must be FIRST:LAST"):
            detect({"KFCOMM_PORT_RANGE": bad})


PROGRAM = """
import kfcomm, psutil
with kfcomm.sync.init() as comm:
    found = {one.laddr.port for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"}
    print(*sorted(found), int(comm.all_reduce(1)), flush=True)
"""


def test_ranks_listen_within_their_range(taken: socket.socket) -> None:
    port = min(taken.getsockname()[1], 65000)
    done = finished("run", "-n", "3", "--port-range", f"{port}:{port + 200}", sys.executable, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        _, *ports, total = line.split()
        assert total == "3"
        assert len(ports) == 1
        assert port <= int(ports[0]) <= port + 200
    done = finished(
        "run", "-n", "2", "--port-range", f"{port}:{port}", "--timeout", "20", sys.executable, "-c", PROGRAM
    )
    assert done.returncode != 0
    assert f"no port from {port} to {port}" in done.stderr
