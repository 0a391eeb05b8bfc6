"""`kfcomm probe` as its users have it: ranks that it starts, those of a job, and wrong input."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kfcomm.cli import main
from kfcomm.probe import Probe
from kfcomm.rendezvous.saved_costs import path_of_costs, saved_costs
from kfcomm.testing import world
from kfcomm.types import UNMEASURED
from tests.launch.launched import finished

probing: Any = import_module("kfcomm.cli.commands.probe")
INSIDE = (sys.executable, "-m", "kfcomm", "probe")
QUICK = ("--nbytes", "64KiB", "--rounds", "1")


@pytest.mark.slow
def test_ranks_are_started_and_everything_is_written(tmp_path: Path) -> None:
    data, page = tmp_path / "x.json", tmp_path / "x.html"
    done = finished("probe", "-n", "3", *QUICK, "--transport", "tcp", "--json", str(data), "--html", str(page))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("3 ranks on 1 host\n\nlatency one way")
    assert "\nThe slowest link is " in done.stdout
    assert Probe.load(data).size == 3
    assert page.read_text("utf-8").count('<div class="heat">') == 2


def test_the_ranks_of_a_job_are_used(tmp_path: Path) -> None:
    data = tmp_path / "x.json"
    done = finished("run", "-n", "2", *INSIDE, *QUICK, "--json", str(data))
    assert done.returncode == 0, done.stderr
    assert "[0] 2 ranks on 1 host" in done.stdout
    assert "[1]" not in done.stdout
    assert Probe.load(data).size == 2


SHOW_COSTS = (
    "import logging, kfcomm.sync\nlogging.basicConfig(level=logging.INFO)\n"
    "with kfcomm.sync.init() as comm: print(*comm.layout.costs)"
)


@pytest.mark.slow
def test_kept_costs_count_in_the_next_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = finished("probe", "-n", "2", *QUICK, "--keep", "--force")
    assert done.returncode == 0, done.stderr
    costs = saved_costs()
    assert None not in (costs.local_alpha_s, costs.local_beta_s_per_byte, costs.overhead_s, costs.gamma_s_per_byte)
    assert f"kept in {path_of_costs()}" in done.stdout
    assert "'auto' of all your later jobs on this host uses it" in done.stdout
    assert "'kfcomm probe --forget' removes it" in done.stdout
    kept = json.loads(path_of_costs().read_text())
    assert 0.0 <= kept["busy"] <= 1.0
    assert kept["load"] >= 0.0
    done = finished("run", "-n", "2", sys.executable, "-c", SHOW_COSTS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" ".join(map(str, costs))) == 2
    said = f"rank 0: 'auto' counts with costs that kfcomm probe --keep measured ({path_of_costs()}, measured "
    assert done.stderr.count(said) == 1
    assert f"costs        measured on this host ({path_of_costs()}, measured " in finished("env").stdout
    forgot = finished("probe", "--forget")
    assert (forgot.returncode, saved_costs()) == (0, UNMEASURED)
    assert f"removed {path_of_costs()}" in forgot.stdout
    assert "nothing was kept" in finished("probe", "--forget").stdout
    done = finished("run", "-n", "2", sys.executable, "-c", SHOW_COSTS)
    assert "kfcomm probe" not in done.stderr


@pytest.mark.slow
def test_probe_keep_is_refused_on_a_busy_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with contextlib.ExitStack() as others:
        for _ in range(os.cpu_count() or 1):
            other = others.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            others.callback(other.kill)
        done = finished("probe", "-n", "2", *QUICK, "--keep")
    assert done.returncode == 2, done
    assert done.stderr.count("is busy (") == 2  # rank 0's line, and the launcher's
    assert "or use --force" in done.stderr
    assert "latency" not in done.stdout
    assert saved_costs() == UNMEASURED


@pytest.mark.parametrize(
    ("shares", "host", "own"),
    [({0: 0.1, 2: 0.5}, "of rank 2", [0.1, 0.0, 0.5, 0.0]), ({0: 0.7, 2: 0.5}, "of rank 0", [0.7, 0.0, 0.5, 0.0])],
)
@pytest.mark.asyncio
async def test_the_busiest_host_counts(
    shares: dict[int, float], host: str, own: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(4, hosts=2) as comms:

        async def busiest(comm: Any) -> tuple[str, float, float]:
            async def share() -> float:
                return shares[comm.rank]

            monkeypatch.setattr(probing, "busy_share", share)
            monkeypatch.setattr(probing, "hostname", lambda: f"of rank {comm.rank}")
            return await probing._busiest(comm)  # up to its first wait: what it asks is answered for this rank

        said = await asyncio.gather(*map(busiest, comms))
    assert [one[0] for one in said] == [host] * 4
    assert [one[1] for one in said] == [max(shares.values())] * 4
    assert [one[2] for one in said] == own


def test_a_job_starts_no_further_ranks() -> None:
    done = finished("run", "-n", "2", *INSIDE, "-n", "2")
    assert done.returncode == 2
    assert "-n 2 starts ranks, but this process is rank" in done.stderr


def test_rounds_out_of_range_are_refused_by_ranks() -> None:
    done = finished("probe", "-n", "2", "--rounds", "0")
    assert done.returncode == 2
    assert "a probe has 1 to 32 rounds, not 0" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "say how many ranks to start, such as -n 4"),
        (("-n", "2", "--nbytes", "1MiB:2MiB"), "--nbytes '1MiB:2MiB': one size, such as 1MiB"),
        (("-n", "2", "--nbytes", "much"), "expected a size, got 'much'"),
        (("-n", "2", "--json", "/nonexistent/x"), "'/nonexistent/x' cannot be written"),
        (("-n", "1"), "1 is not in the range x>=2"),
        (("-n", "2", "--transport", "pigeon"), "'pigeon' is not one of"),
        (("-n", "2", "--transport", "tcp", "--keep"), "leave --transport out"),
        (("-n", "2", "--force"), "--force needs --keep"),
        (("--forget", "--keep"), "--forget measures nothing"),
        (("--forget", "-n", "2"), "--forget measures nothing"),
    ],
)
def test_impossible_options_are_refused_before_ranks_start(options: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(main, ["probe", *options])
    assert result.exit_code == 2
    assert message in result.output
