"""Elastic jobs whose store is kept, for tests; and one of them as a program:

    python -m tests.launch.stores --seconds 20

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import psutil

from tests import etcds
from tests.launch.launched import TOKEN, environ
from tests.launch.test_elastic import TRAIN
from tests.support import free_port

HOSTS = ("127.0.0.1", "127.0.0.2")
HOW_LONG_S = 120
LONG = 4_000


class Job:
    """A job of two hosts, which are two addresses of this one; either launcher can be started again.

    Args:
        folder: folder of its program and the output of its launchers.
        store: value of ``--store``.
        ranks: number on each host.
        options: of the launchers.
        program: arguments of ``train.py``.
        text: contents of that file.
    """

    def __init__(
        self, folder: Path, store: str, ranks: tuple[int, ...], options: list[str], program: list[str],
        text: str = TRAIN,
    ) -> None:  # fmt: skip
        (folder / "train.py").write_text(text)
        self._folder = folder
        hosts = ",".join(f"{host}:{count}" for host, count in zip(HOSTS, ranks, strict=False))
        self.port = free_port()
        where = ["-H", hosts, "--port", str(self.port)] if len(ranks) > 1 else ["-n", str(ranks[0])]
        self._command = [*where, "--store", store, *options, sys.executable, "train.py", *program]
        self.launchers: list[subprocess.Popen[bytes]] = []
        for host in range(len(ranks)):
            self.launchers.append(self.start(host, len(ranks) > 1))

    def start(self, host: int, is_of_several: bool = True) -> subprocess.Popen[bytes]:
        """Start a launcher."""
        own = ["--self", HOSTS[host]] if is_of_several else []
        command = [sys.executable, "-m", "kfcomm", "run", *own, *self._command]
        env = environ(KFCOMM_LOST_AFTER="2", **({"KFCOMM_TOKEN": TOKEN} if is_of_several else {}))
        with (self._folder / HOSTS[host]).open("ab") as out:
            return subprocess.Popen(
                command, cwd=self._folder, env=env, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )

    def again(self, host: int) -> None:
        """Start a launcher again that was killed."""
        self.launchers[host].wait(HOW_LONG_S)
        self.launchers[host] = self.start(host, len(self.launchers) > 1)

    def said(self, host: int) -> str:
        """Output of the launchers of a host."""
        return (self._folder / HOSTS[host]).read_text()

    def until(self, host: int, condition: Callable[[str], bool]) -> None:
        """Wait until a launcher has printed something."""
        while not condition(self.said(host)):
            assert self.launchers[host].poll() is None, "".join(map(self.said, range(len(self.launchers))))

    def until_members(self, count: int, after: int) -> None:
        """Wait until so many ranks have trained together.

        Args:
            count: number of ranks.
            after: length of what the first host's launchers had printed before.
        """
        while True:
            printed = self.said(0)[after:] + "".join(map(self.said, range(1, len(self.launchers))))
            if any(len(line.partition("] now ")[2].split()) == count for line in printed.splitlines()):
                return
            assert any(launcher.poll() is None for launcher in self.launchers), printed
            time.sleep(0.05)

    def ends(self) -> list[int]:
        """The exit codes of the launchers."""
        return [launcher.wait(HOW_LONG_S) for launcher in self.launchers]

    def result(self) -> list[Any]:
        """Result that the first rank printed at the end, on any host."""
        said = "".join(map(self.said, range(len(self.launchers))))
        found = [line for line in said.splitlines() if "] [[" in line]
        assert len(found) == 1, said
        told: list[Any] = json.loads(found[0].partition(" ")[2])
        return told

    def ranks(self, host: int) -> list[psutil.Process]:
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
        (self._folder / "hurry").touch()

    def close(self) -> None:
        """Kill all processes."""
        for launcher in self.launchers:
            with contextlib.suppress(psutil.NoSuchProcess):
                left = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]
                for one in left:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
            launcher.wait(HOW_LONG_S)


def kfcomm(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kfcomm", *arguments]
    return subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=60)


def outage(job: Job, three: etcds.Etcd, seconds: float) -> dict[str, Any]:
    """Run a job of two hosts, one rank on each, while its etcd loses its leader, then its quorum; return the result."""
    job.until(0, lambda said: "job" in said)
    assert kfcomm("resize", "3", job.name()).returncode == 0
    first = three.leader()
    three.kill(first)
    job.until(0, lambda said: "3 ranks are wanted; 1 started" in said)
    second = three.leader()
    three.kill(second)  # nobody has more than half any more
    begun_s = time.monotonic()
    asked = kfcomm("resize", job.name(), "4")
    assert "the store does not answer now: that waits until it does" in asked.stdout, asked.stdout + asked.stderr
    job.until(0, lambda said: "does not answer: training goes on, and changes wait" in said)
    (rank,) = (
        one for one in job.ranks(1) if one.environ()["KFCOMM_RANK"] == "1" and "KFCOMM_JOIN" not in one.environ()
    )
    rank.kill()
    job.until(0, lambda said: "rank 1 ended (SIGKILL)" in said)  # it is heard of, and not replaced
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
        job = Job(folder, three.store(), (1, 1), ["--elastic", "1:4"], ["6000", "[]", "0.2"])
        stack.enter_context(contextlib.closing(job))
        click.echo(json.dumps(outage(job, three, seconds), indent=1))


if __name__ == "__main__":
    main()
