"""Elastic jobs that are resized at any moment, while ranks are killed and stopped, and end slowly when released.

python -m tests.search.resizes --seconds 300 --seed 1

In the end a size is asked for, and must come about; then the job must end with 0, and nothing of it be left.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import psutil

from kfcomm.errors import ConfigError
from kfcomm.launch.requests import ask
from tests.launch.launched import TOKEN, environ
from tests.search import driver
from tests.support import free_port

LEAST, MOST, LOST_AFTER_S, COMES_WITHIN_S = 1, 5, 20.0, 300.0
"""A busy machine lets a rank that joins wait for long: less would make it lost again and again."""
HOSTS = ("127.0.0.1", "127.0.0.2")

PROGRAM = """
import json, os, random, signal, sys, time
import numpy as np
import kfcomm
from kfcomm.elastic import Elastic, ElasticSampler, State

state = State(n=0)
with kfcomm.sync.init(elastic=True, timeout=60) as comm:
    me = comm.births[comm.rank]
    chance = random.Random(f"{sys.argv[1]} {me}")
    with Elastic(comm, state) as elastic:
        for step in elastic.steps(ElasticSampler(10**6, batch=10)):
            state.n += 1
            if comm.rank == 0:
                with open(f"now.{me}", "w") as file:
                    json.dump([comm.epoch, list(comm.births), os.environ["KFCOMM_JOB"]], file)
                os.replace(f"now.{me}", "now")
            if comm.all_reduce(np.array([os.path.exists("stop")], np.int64), name="stop")[0]:
                break
            time.sleep(0.02)
    is_released = elastic.is_released
    if is_released and chance.random() < 0.3:
        time.sleep(chance.choice([0.2, 1.0]))
if is_released:
    end = chance.choice(["at once", "at once", "slow", "slower", "fails", "stops", "killed"])
    print(f"{me} is released: {end}", flush=True)
    time.sleep({"slow": 1.0, "slower": 4.0}.get(end, 0.0))
    if end == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(7 if end == "fails" else 0)
"""


class Found(Exception):
    """Something is wrong."""


class Job:
    """One job, on one host or two."""

    def __init__(self, folder: Path, seed: int, num_hosts: int) -> None:
        self._folder = folder
        (folder / "program.py").write_text(PROGRAM)
        size = ["-n", "3"] if num_hosts == 1 else ["-H", "127.0.0.1:2,127.0.0.2:1", "--port", str(free_port())]
        options = ["--elastic", f"{LEAST}:{MOST}", "--lost-after", f"{LOST_AFTER_S:g}", "--grace", "1"]
        with (folder / "said").open("ab") as said:
            self.launchers = [
                subprocess.Popen(
                    [sys.executable, "-m", "kfcomm", "run", *size, *options,
                     *(["--self", HOSTS[host]] if num_hosts > 1 else []), sys.executable, "program.py", str(seed)],
                    cwd=folder, env=environ(KFCOMM_TOKEN=TOKEN), stdin=subprocess.DEVNULL, stdout=said,
                    stderr=subprocess.STDOUT,
                )
                for host in range(num_hosts)
            ]  # fmt: skip

    def said(self) -> str:
        """Output of its launchers."""
        return (self._folder / "said").read_text()

    def births(self) -> list[int]:
        """Current ranks, as last reported by the first rank."""
        with contextlib.suppress(OSError, ValueError):
            told: list[int] = json.loads((self._folder / "now").read_text())[1]
            return told
        return []

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes of all ranks, by uid."""
        found: dict[int, psutil.Process] = {}
        for launcher in self.launchers:
            with contextlib.suppress(psutil.Error):
                for one in psutil.Process(launcher.pid).children():
                    with contextlib.suppress(psutil.Error):
                        env = one.environ()
                        if "program.py" in one.cmdline() and "KFCOMM_RANK" in env:
                            found[int(env.get("KFCOMM_JOIN") or env["KFCOMM_RANK"])] = one
        return found

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for it, for so long."""
        deadline_s = time.monotonic() + COMES_WITHIN_S
        while not condition():
            if time.monotonic() > deadline_s:
                raise Found(f"{what} has not come about; now {self.births()}")
            if self.launchers[0].poll() is not None:
                raise Found(f"the job has ended with {self.launchers[0].returncode} before {what}")
            time.sleep(0.05)

    def resize(self, size: int) -> None:
        """Ask for another size."""
        mark = json.loads((self._folder / "now").read_text())[2]
        with contextlib.suppress(ConfigError):
            ask(mark, f"size {size}")

    def close(self) -> list[str]:
        """End and report the remaining processes."""
        left = [f"{birth}: pid {one.pid}" for birth, one in self.ranks().items()]
        for launcher in self.launchers:
            if launcher.poll() is None:
                launcher.kill()
                launcher.wait()
        return left


def once(folder: Path, seed: int) -> tuple[int, int]:
    """One job; how often it was resized, and how many of its ranks were killed or stopped."""
    random = Random(seed)
    job = Job(folder, seed, random.choice([1, 1, 2]))
    num_resized = num_harmed = 0
    try:
        job.until(lambda: len(job.births()) == 3, "the beginning")
        for _ in range(random.randrange(2, 7)):
            if random.random() < 0.65:
                num_resized += 1
                job.resize(random.randint(LEAST + 1, MOST))
            elif len(births := job.births()) > 2:
                victim = random.choice(births)
                number = random.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
                if (process := job.ranks().get(victim)) is not None:
                    num_harmed += 1
                    with contextlib.suppress(psutil.Error):
                        os.kill(process.pid, number)
                    job.until(lambda: victim not in job.births(), f"the loss of {victim} ({number.name})")  # noqa: B023
            time.sleep(random.choice([0.0, 0.05, 0.3, 1.0]) * random.random())
        size = random.randint(LEAST + 1, MOST)
        job.resize(size)
        job.until(lambda: len(job.births()) == size, f"size {size}")
        (folder / "stop").touch()
        codes = [launcher.wait(COMES_WITHIN_S) for launcher in job.launchers]
        if any(codes):
            raise Found(f"the launchers have ended with {codes}")
    except (Found, subprocess.TimeoutExpired) as error:
        raise AssertionError(f"seed {seed}: {error}\n{job.said()}") from error
    finally:
        left = job.close()
    assert not left, f"seed {seed}: {left} left\n{job.said()}"
    return num_resized, num_harmed


def case(seed: int) -> dict[str, int]:
    """Run the job of a seed."""
    with tempfile.TemporaryDirectory() as name:
        return dict(zip(("resizes", "killed or stopped"), once(Path(name), seed), strict=True))


if __name__ == "__main__":
    sys.exit(driver.run("resizes", case))
