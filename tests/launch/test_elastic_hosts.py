"""Elastic jobs on several hosts: the launcher of any host may end."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from tests.launch.jobs import HOSTS, HOW_LONG_S, LOOK_S, SLOW, Job, kfcomm

pytestmark = pytest.mark.slow
CALM_S = 15.0
"""Silence after which a rank is lost, where none is stopped: on a busy machine one that works may be silent for 2 s."""


def test_dead_rank_of_any_host_is_replaced(job: Callable[..., Job]) -> None:
    made = job((2, 2), ["--elastic", "2:4"], 9000, [[3, 10, 4], [0, 25, 4], [1, 40, 4]], 0.03, lost_after_s=CALM_S)
    assert made.ends() == [0, 0], made.everything()
    used, births, _ = made.result()
    assert used == [1.0]
    assert made.said(0).count("started in its place") == 3
    assert not {0, 1, 3} & set(births)


def test_a_host_goes_and_another_takes_its_ranks(job: Callable[..., Job]) -> None:
    made = job((2, 1), ["--elastic", "1:4"], *SLOW, lost_after_s=CALM_S)
    made.until(0, "job")
    doomed = made.ranks_of(1)
    made.launchers[1].kill()
    made.until(0, "now 0 1 3\n")
    made.hurry()
    assert made.launchers[0].wait(HOW_LONG_S) == 0, made.said(0)
    used, births, _ = made.result()
    assert used == [1.0]
    assert births == [0, 1, 3]
    assert "rank 2 ended" in made.said(0)
    for one in doomed:
        one.wait(HOW_LONG_S)


def test_a_host_that_is_not_heard_of_is_given_up(job: Callable[..., Job]) -> None:
    made = job((2, 1), ["--elastic", "1:4"], *SLOW)
    made.until(0, "job")
    stopped = [*made.ranks_of(1), psutil.Process(made.launchers[1].pid)]
    for one in stopped:
        one.suspend()
    made.until(0, "now 0 1 3\n")
    made.hurry()
    assert made.launchers[0].wait(HOW_LONG_S) == 0, made.said(0)
    used, births, _ = made.result()
    assert (used, births) == ([1.0], [0, 1, 3])
    assert "rank 2 ended (its host is not heard of any more)" in made.said(0)
    for one in stopped:
        one.resume()
    made.launchers[1].wait(HOW_LONG_S)  # with the job's exit code, if it has heard of that before it was given up


def test_a_launcher_that_was_given_up_ends_while_the_job_goes_on(job: Callable[..., Job]) -> None:
    made = job((2, 1), ["--elastic", "1:4"], 1000000, [], 0.04)
    made.until(0, "job")
    stopped = [*made.ranks_of(1), psutil.Process(made.launchers[1].pid)]
    for one in stopped:
        one.suspend()
    made.until(0, "rank 2 ended (its host is not heard of any more)")
    for one in stopped:
        one.resume()
    assert made.launchers[1].wait(HOW_LONG_S) == 1
    assert "was unreachable for too long: the job continues without its ranks" in made.said(1)
    assert made.launchers[0].poll() is None, made.said(0)


def test_the_ranks_that_are_left_are_stopped_on_another_host(job: Callable[..., Job]) -> None:
    made = job((1, 2), ["--elastic", "2:4", "--grace", "1"], 4000, [], 0.04)
    made.until(0, "job")
    for one in made.ranks_of(1):
        one.suspend()
    assert made.ends() == [1, 1], made.everything()
    assert "sign of life for 2 s: ranks 1-2 are stopped or stuck" in made.said(0)
    assert "Partitioned" in made.said(0)


def test_a_launcher_that_is_asked_to_end_gives_its_ranks_away(job: Callable[..., Job]) -> None:
    made = job((2, 2), ["--elastic", "2:4"], *SLOW, lost_after_s=CALM_S)
    made.until(0, "now 0 1 2 3\n")
    made.launchers[1].send_signal(signal.SIGTERM)
    made.until(0, lambda said: re.search(r"now 0 1 [4-9] [4-9]\n", said) is not None)
    made.hurry()
    assert made.ends() == [0, 128 + signal.SIGTERM], made.everything()
    used, births, _ = made.result()
    assert used == [1.0]
    assert births[:2] == [0, 1]
    assert len(births) == 4


def test_the_first_host_goes_and_the_others_come_to_the_end(job: Callable[..., Job]) -> None:
    made = job((1, 2), ["--elastic", "1:3"], *SLOW, lost_after_s=CALM_S)
    made.until(0, "job")
    made.launchers[0].kill()
    made.until(1, "automatic replacement is disabled", "now 1 2\n")
    made.hurry()
    assert made.launchers[1].wait(HOW_LONG_S) == 0, made.said(1)
    assert made.result()[:2] == [[1.0], [1, 2]]


def test_too_few_are_left_on_all_hosts(job: Callable[..., Job]) -> None:
    made = job((2, 2), ["--elastic", "3"], 4000, [[1, 5], [3, 9]], 0.04)
    assert made.ends() == [128 + signal.SIGKILL] * 2, made.everything()
    for host in range(2):
        assert "failed first: SIGKILL" in made.said(host)


def test_another_size_and_spares(job: Callable[..., Job]) -> None:
    made = job((1, 1), ["--elastic", "1:4", "--spares", "1"], SLOW[0], [[0, 3]], SLOW[2], lost_after_s=CALM_S)
    made.until(0, "job")
    assert kfcomm("resize", made.name(), "3").returncode == 0
    while True:
        told = made.status()
        if len(told["running"]) == 4 and 0 not in told["running"]:
            break
    assert [address for address, _ in told["hosts"]] == list(HOSTS[:2])
    assert abs(len(told["hosts"][0][1]) - len(told["hosts"][1][1])) <= 1
    while re.search(r"\] now [1-9] \d \d\n", made.everything()) is None:  # what runs need not have joined
        assert any(launcher.poll() is None for launcher in made.launchers.values()), made.everything()
        time.sleep(LOOK_S)
    made.hurry()
    assert made.ends() == [0, 0], made.everything()
    used, births, most = made.result()
    assert (used, len(births), most) == ([1.0], 3, 3)
