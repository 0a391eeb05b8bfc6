"""Elastic jobs on several hosts, for tests; and one whose store is kept as a program:

    python -m tests.launch.jobs --seconds 20

An etcd of three members loses its leader, and then its quorum for that long, during resizes and the death of a rank.
The result is printed as JSON.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import psutil

from tests import etcds
from tests.launch.launched import TOKEN, environ
from tests.support import free_port

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
HOW_LONG_S = 120
LOOK_S = 0.02
"""Between two looks, in which a busy machine can run what they are for."""
LONG = 4_000
SLOW = 6_000, [], 0.5
"""Program of 300 s unless hurried, so that ranks join on a busy machine; of few steps, so that the rest is short."""

TRAIN = """
import json, os, signal, sys, time
import numpy as np
import kfcomm
from kfcomm.elastic import Elastic, ElasticSampler, State

LENGTH, KILLED, PAUSE_S = int(sys.argv[1]), json.loads(sys.argv[2]), float(sys.argv[3])
state = State(used=np.zeros(LENGTH), births=[])
with kfcomm.sync.init(elastic=True) as comm:
    if comm.epoch == 0 and comm.rank == 0:
        print("job", os.environ["KFCOMM_JOB"], flush=True)
    me = comm.births[comm.rank]
    with Elastic(comm, state) as elastic:
        for step in elastic.steps(ElasticSampler(LENGTH, 10), used_in="used"):
            if sys.argv[4:] == [str(step.number)] and comm.rank == 0:
                comm.propose_replacement(1)
            for birth, number, *size in KILLED:  # from a step on; where a size is said, once there are so many
                if me == birth and step.number >= number and (not size or comm.size == size[0]):
                    os.kill(os.getpid(), signal.SIGKILL)
            mask = np.zeros(LENGTH)
            mask[step.indices] = 1
            state.used += comm.all_reduce(mask, name="used")
            state.births = [*state.births, list(comm.births)]
            if comm.rank == 0 and state.births[-2:-1] != state.births[-1:]:
                print("now", *sorted(comm.births), flush=True)
            # nothing is left to wait for: the test has said so, or those of a size are gone, and others in their place
            is_over = KILLED and KILLED[0][2:] == [comm.size] and not {one[0] for one in KILLED} & set(comm.births)
            time.sleep(0 if is_over or os.path.exists("hurry") else PAUSE_S)
    if not elastic.is_released and comm.rank == 0:
        print(json.dumps([sorted(set(state.used.tolist())), state.births[-1], max(map(len, state.births))]))
"""


@dataclass
class Job:
    """A job of several hosts, which are addresses of this one; any launcher can be started, and started again.

    Attributes:
        folder: of its program and the output of its launchers.
        ranks: initial number on each host.
        options: of the launchers.
        program: arguments of ``train.py``.
        text: contents of that file.
        lost_after_s: of all.
        names_hosts: whether hosts are named: more of them may come.
    """

    folder: Path
    ranks: tuple[int, ...]
    options: Sequence[str]
    program: Sequence[str]
    text: str = TRAIN
    lost_after_s: float = 2.0
    names_hosts: bool = False
    launchers: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        self.names_hosts = self.names_hosts or len(self.ranks) > 1
        (self.folder / "train.py").write_text(self.text)

    def start(self, *hosts: int) -> None:
        """Start launchers; those that were killed have ended then."""
        first = ",".join(f"{host}:{count}" for host, count in zip(HOSTS, self.ranks, strict=False))
        for host in hosts:
            if host in self.launchers:
                self.launchers[host].wait(HOW_LONG_S)
            where = ["-H", first, "--port", str(self.port), "--self", HOSTS[host]]
            where = where if self.names_hosts else ["-n", str(self.ranks[0])]
            program = [sys.executable, "train.py", *self.program]
            token = {"KFCOMM_TOKEN": TOKEN} if self.names_hosts else {}
            with (self.folder / HOSTS[host]).open("ab") as out:
                self.launchers[host] = subprocess.Popen(
                    [sys.executable, "-m", "kfcomm", "run", *where, *self.options, *program], cwd=self.folder,
                    env=environ(KFCOMM_LOST_AFTER=str(self.lost_after_s), **token), stdin=subprocess.DEVNULL,
                    stdout=out, stderr=subprocess.STDOUT,
                )  # fmt: skip

    def said(self, host: int) -> str:
        """Output of the launchers of a host."""
        return (self.folder / HOSTS[host]).read_text()

    def everything(self) -> str:
        """Output of all launchers."""
        return "".join(f"--- {host}\n{self.said(host)}" for host in self.launchers)

    def until(self, host: int, *needed: str | Callable[[str], bool]) -> None:
        """Wait until the launchers of a host have printed something."""
        while not all(one(self.said(host)) if callable(one) else one in self.said(host) for one in needed):
            assert self.launchers[host].poll() is None, self.everything()
            time.sleep(LOOK_S)

    def until_members(self, count: int, after: int) -> None:
        """Wait until so many ranks have trained together.

        Args:
            count: number of ranks.
            after: length of what the first host's launchers had printed before.
        """
        while True:
            printed = self.said(0)[after:] + "".join(self.said(host) for host in self.launchers if host)
            if any(len(line.partition("] now ")[2].split()) == count for line in printed.splitlines()):
                return
            assert any(launcher.poll() is None for launcher in self.launchers.values()), printed
            time.sleep(LOOK_S)

    def ends(self) -> list[int]:
        """The exit codes of the launchers."""
        return [self.launchers[host].wait(HOW_LONG_S) for host in sorted(self.launchers)]

    def result(self) -> list[Any]:
        """Result that the first rank printed at the end, on any host."""
        found = [line for line in self.everything().splitlines() if "] [[" in line]
        assert len(found) == 1, self.everything()
        told: list[Any] = json.loads(found[0].partition(" ")[2])
        return told

    def ranks_of(self, host: int) -> list[psutil.Process]:
        """The ranks of a host."""
        found = psutil.Process(self.launchers[host].pid).children(recursive=True)
        return [one for one in found if "train.py" in one.cmdline()]

    def status(self) -> dict[str, Any]:
        """As ``kfcomm status`` has it."""
        while not (said := kfcomm("status", self.name(), "--json").stdout):
            assert self.launchers[0].poll() is None, self.said(0)
        told: dict[str, Any] = json.loads(said)
        return told

    def name(self) -> str:
        """Name of the job on its first host."""
        while True:
            for one in psutil.Process(self.launchers[0].pid).children():
                command = one.cmdline()
                if "guardian.py" in " ".join(command):
                    return command[-1]
            assert self.launchers[0].poll() is None, self.said(0)

    def hurry(self) -> None:
        """Train the remaining steps without pauses."""
        (self.folder / "hurry").touch()

    def close(self) -> None:
        """Kill all processes."""
        for launcher in self.launchers.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                left = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]
                for one in left:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
            launcher.wait(HOW_LONG_S)


def kfcomm(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kfcomm", *arguments]
    return subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=600)


def outage(job: Job, three: etcds.Etcd, seconds: float) -> dict[str, Any]:
    """Run a job of two hosts, one rank on each, while its etcd loses its leader, then its quorum; return the result."""
    job.until(0, "job")
    assert kfcomm("resize", "3", job.name()).returncode == 0
    first = three.leader()
    three.kill(first)
    job.until(0, "3 ranks are wanted; 1 started")
    second = three.leader()
    three.kill(second)  # nobody has more than half any more
    begun_s = time.monotonic()
    asked = kfcomm("resize", job.name(), "4")
    assert "the store does not answer now: that waits until it does" in asked.stdout, asked.stdout + asked.stderr
    job.until(0, "does not answer: training goes on, and changes wait")
    (rank,) = (
        one for one in job.ranks_of(1) if one.environ()["KFCOMM_RANK"] == "1" and "KFCOMM_JOIN" not in one.environ()
    )
    rank.kill()
    job.until(0, "rank 1 ended (SIGKILL)")  # it is heard of, and not replaced
    said = len(job.said(0))
    time.sleep(max(0.0, begun_s + seconds - time.monotonic()))
    assert "4 ranks are wanted" not in job.said(0)[said:]
    three.start(first)
    back_s = time.monotonic()
    job.until(0, lambda told: "4 ranks are wanted" in told[said:])
    heard_s = time.monotonic()
    while len(job.status()["running"]) < 4:
        pass
    assert 1 not in job.status()["running"]
    job.hurry()
    assert job.ends() == [0, 0], job.said(0) + job.said(1)
    used, births, most = job.result()
    return {
        "without_quorum_s": back_s - begun_s, "resized_after_s": heard_s - back_s, "each_sample_used": used,
        "births": births, "most": most, "keys_left": three.held(),
    }  # fmt: skip


@click.command()
@click.option("--seconds", type=float, default=20.0, show_default=True, help="Duration without a quorum.")
def main(seconds: float) -> None:
    """Lose an etcd's leader and quorum while a job trains."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        three = stack.enter_context(etcds.running(folder / "etcd", 3))
        job = Job(folder, (1, 1), ["--elastic", "1:4", "--store", three.store()], ["6000", "[]", "0.2"])
        stack.enter_context(contextlib.closing(job))
        job.start(0, 1)
        click.echo(json.dumps(outage(job, three, seconds), indent=1))


if __name__ == "__main__":
    main()
