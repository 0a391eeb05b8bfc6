"""Elastic jobs on several hosts: the launcher of any host may end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launch.launched import TOKEN, environ
from tests.launch.test_elastic import TRAIN
from tests.support import free_port

pytestmark = pytest.mark.slow

HOSTS = ("127.0.0.1", "127.0.0.2")
HOW_LONG_S = 120


class Job:
    """A job of two hosts, which are two addresses of this one.

    Args:
        folder: for its program, and what its launchers print.
        ranks: of each host.
        options: of both launchers.
        program: after ``python train.py``.
    """

    def __init__(self, folder: Path, ranks: tuple[int, int], options: list[str], program: list[str]) -> None:
        (folder / "train.py").write_text(TRAIN)
        self._folder = folder
        hosts = ",".join(f"{host}:{count}" for host, count in zip(HOSTS, ranks, strict=True))
        port = str(free_port())
        self.launchers = []
        for host in HOSTS:
            command = [
                sys.executable, "-m", "kfcomm", "run", "--port", port, "-H", hosts, "--self", host, *options,
                sys.executable, "train.py", *program,
            ]  # fmt: skip
            with (folder / host).open("wb") as out:
                self.launchers.append(
                    subprocess.Popen(
                        command, cwd=folder, env=environ(KFCOMM_TOKEN=TOKEN, KFCOMM_LOST_AFTER="2"), stdout=out,
                        stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                    )
                )  # fmt: skip

    def said(self, host: int) -> str:
        """Output of a launcher."""
        return (self._folder / HOSTS[host]).read_text()

    def until(self, host: int, condition: Callable[[str], bool]) -> None:
        """Wait until a launcher has printed something."""
        while not condition(self.said(host)):
            assert self.launchers[host].poll() is None, self.said(0) + self.said(1)

    def ends(self) -> list[int]:
        """The exit codes of the launchers."""
        return [launcher.wait(HOW_LONG_S) for launcher in self.launchers]

    def result(self) -> list[Any]:
        """Result that the first rank printed at the end, on any host."""
        found = [line for host in range(2) for line in self.said(host).splitlines() if "] [[" in line]
        assert len(found) == 1, self.said(0) + self.said(1)
        told: list[Any] = json.loads(found[0].partition(" ")[2])
        return told

    def close(self) -> None:
        """Nothing is left of it."""
        for launcher in self.launchers:
            if launcher.poll() is None:
                launcher.kill()
            launcher.wait(HOW_LONG_S)


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Job]:
    def make(ranks: tuple[int, int], options: list[str], steps: int, victims: list[list[int]], pause_s: float) -> Job:
        program = [str(10 * steps), json.dumps(victims), str(pause_s)]
        made = Job(tmp_path, ranks, options, program)
        request.addfinalizer(made.close)
        return made

    return make


def children_of(job: Job, host: int) -> list[psutil.Process]:
    """The ranks of a host."""
    found = psutil.Process(job.launchers[host].pid).children(recursive=True)
    return [one for one in found if "train.py" in one.cmdline()]


def test_dead_rank_of_any_host_is_replaced(job: Callable[..., Job]) -> None:
    made = job((2, 2), ["--elastic", "2:4"], 100, [[3, 10], [0, 25], [1, 40]], 0.03)
    assert made.ends() == [0, 0], made.said(0) + made.said(1)
    used, births, _ = made.result()
    assert used == [1.0]
    assert made.said(0).count("started in its place") == 3
    assert not {0, 1, 3} & set(births)


def test_a_host_goes_and_another_takes_its_ranks(job: Callable[..., Job]) -> None:
    made = job((2, 1), ["--elastic", "1:4"], 150, [], 0.04)
    made.until(0, lambda said: "job" in said)
    doomed = children_of(made, 1)
    made.launchers[1].kill()
    assert made.launchers[0].wait(HOW_LONG_S) == 0, made.said(0)
    used, births, _ = made.result()
    assert used == [1.0]
    assert births == [0, 1, 3]
    assert "rank 2 ended" in made.said(0)
    for one in doomed:
        one.wait(HOW_LONG_S)


def test_a_host_that_is_not_heard_of_is_given_up(job: Callable[..., Job]) -> None:
    made = job((2, 1), ["--elastic", "1:4"], 200, [], 0.04)
    made.until(0, lambda said: "job" in said)
    stopped = [*children_of(made, 1), psutil.Process(made.launchers[1].pid)]
    for one in stopped:
        one.suspend()
    assert made.launchers[0].wait(HOW_LONG_S) == 0, made.said(0)
    used, births, _ = made.result()
    assert (used, births) == ([1.0], [0, 1, 3])
    assert "rank 2 ended (its host is not heard of any more)" in made.said(0)
    for one in stopped:
        one.resume()
    made.launchers[1].wait(HOW_LONG_S)  # with the job's exit code, if it has heard of that before it was given up


def test_a_launcher_that_was_given_up_ends_while_the_job_goes_on(job: Callable[..., Job]) -> None:
    made = job((2, 1), ["--elastic", "1:4"], 100_000, [], 0.04)
    made.until(0, lambda said: "job" in said)
    stopped = [*children_of(made, 1), psutil.Process(made.launchers[1].pid)]
    for one in stopped:
        one.suspend()
    made.until(0, lambda said: "rank 2 ended (its host is not heard of any more)" in said)
    for one in stopped:
        one.resume()
    assert made.launchers[1].wait(HOW_LONG_S) == 1
    assert "was unreachable for too long: the job continues without its ranks" in made.said(1)
    assert made.launchers[0].poll() is None, made.said(0)


def test_the_ranks_that_are_left_are_stopped_on_another_host(job: Callable[..., Job]) -> None:
    made = job((1, 2), ["--elastic", "2:4", "--grace", "1"], 400, [], 0.04)
    made.until(0, lambda said: "job" in said)
    for one in children_of(made, 1):
        one.suspend()
    assert made.ends() == [1, 1], made.said(0) + made.said(1)
    assert "sign of life for 2 s: ranks 1-2 are stopped or stuck" in made.said(0)
    assert "Partitioned" in made.said(0)


def test_a_launcher_that_is_asked_to_end_gives_its_ranks_away(job: Callable[..., Job]) -> None:
    made = job((2, 2), ["--elastic", "2:4"], 150, [], 0.04)
    made.until(0, lambda said: "job" in said)
    made.launchers[1].send_signal(signal.SIGTERM)
    assert made.ends() == [0, 128 + signal.SIGTERM], made.said(0) + made.said(1)
    used, births, _ = made.result()
    assert used == [1.0]
    assert births[:2] == [0, 1]
    assert len(births) == 4


def test_the_first_host_goes_and_the_others_come_to_the_end(job: Callable[..., Job]) -> None:
    made = job((1, 2), ["--elastic", "1:3"], 60, [], 0.04)
    made.until(0, lambda said: "job" in said)
    made.launchers[0].kill()
    assert made.launchers[1].wait(HOW_LONG_S) == 0, made.said(1)
    assert made.result()[:2] == [[1.0], [1, 2]]
    assert "automatic replacement is disabled" in made.said(1)


def test_too_few_are_left_on_all_hosts(job: Callable[..., Job]) -> None:
    made = job((2, 2), ["--elastic", "3"], 400, [[1, 5], [3, 9]], 0.04)
    assert made.ends() == [128 + signal.SIGKILL] * 2, made.said(0) + made.said(1)
    for host in range(2):
        assert "failed first: SIGKILL" in made.said(host)


def test_another_size_and_spares(job: Callable[..., Job], tmp_path: Path) -> None:
    made = job((1, 1), ["--elastic", "1:4", "--spares", "1"], 200, [[0, 30]], 0.04)
    made.until(0, lambda said: "job" in said)
    name = made.said(0).split("job ")[1].split()[0]

    def kfcomm(*arguments: str) -> str:
        command = [sys.executable, "-m", "kfcomm", *arguments, name]
        return subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=60, check=True).stdout

    kfcomm("resize", "3")
    while True:
        told = json.loads(kfcomm("status", "--json"))
        if len(told["running"]) == 4 and 0 not in told["running"]:
            break
    assert [address for address, _ in told["hosts"]] == list(HOSTS)
    assert abs(len(told["hosts"][0][1]) - len(told["hosts"][1][1])) <= 1
    assert made.ends() == [0, 0], made.said(0) + made.said(1)
    used, births, most = made.result()
    assert (used, len(births), most) == ([1.0], 3, 3)
