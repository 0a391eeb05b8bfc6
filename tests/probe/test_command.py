"""`kfcomm probe` as its users have it: ranks that it starts, those of a job, and wrong input."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kfcomm.cli import main
from kfcomm.probe import Probe
from kfcomm.rendezvous.kept import kept_costs, path_of_costs
from tests.launch.launched import finished

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
    assert page.read_text("utf-8").count("<svg") == 2


def test_the_ranks_of_a_job_are_used(tmp_path: Path) -> None:
    data = tmp_path / "x.json"
    done = finished("run", "-n", "2", *INSIDE, *QUICK, "--json", str(data))
    assert done.returncode == 0, done.stderr
    assert "[0] 2 ranks on 1 host" in done.stdout
    assert "[1]" not in done.stdout
    assert Probe.load(data).size == 2


SHOW_COSTS = "import kfcomm.sync\nwith kfcomm.sync.init() as comm: print(*comm.layout.costs)"


@pytest.mark.slow
def test_what_is_kept_counts_in_the_next_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = finished("probe", "-n", "2", *QUICK, "--keep")
    assert done.returncode == 0, done.stderr
    costs = kept_costs()
    assert None not in (costs.local_alpha_s, costs.local_beta_s_per_byte, costs.overhead_s, costs.gamma_s_per_byte)
    assert f"kept in {path_of_costs()}" in done.stdout
    done = finished("run", "-n", "2", sys.executable, "-c", SHOW_COSTS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" ".join(map(str, costs))) == 2


def test_a_job_starts_no_further_ranks() -> None:
    done = finished("run", "-n", "2", *INSIDE, "-n", "2")
    assert done.returncode == 2
    assert "-n 2 starts ranks, but this process is rank" in done.stderr


def test_what_no_rank_can_do() -> None:
    done = finished("probe", "-n", "2", "--rounds", "0")
    assert done.returncode == 2
    assert "a probe has 1 to 32 rounds, not 0" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "say how many ranks to start, such as -n 4"),
        (("-n", "2", "--nbytes", "1MiB:2MiB"), "--nbytes '1MiB:2MiB': one size, such as 1MiB"),
        (("-n", "2", "--nbytes", "much"), "'much' is no size"),
        (("-n", "2", "--json", "/nonexistent/x"), "'/nonexistent/x' cannot be written"),
        (("-n", "1"), "1 is not in the range x>=2"),
        (("-n", "2", "--transport", "pigeon"), "'pigeon' is not one of"),
        (("-n", "2", "--transport", "tcp", "--keep"), "leave --transport out"),
    ],
)
def test_what_cannot_work_is_said_before_ranks_are_started(options: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(main, ["probe", *options])
    assert result.exit_code == 2
    assert message in result.output
