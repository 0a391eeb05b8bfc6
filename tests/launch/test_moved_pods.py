"""Elastic jobs over etcd whose hosts have names: a host that is lost comes back under its name, at another address."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.netlab import HostSpec, Netlab
from tests import etcds
from tests.launch.launched import TOKEN, command, environ

pytestmark = [pytest.mark.netns, pytest.mark.slow]

PROGRAM = """
import sys, time
from pathlib import Path
import numpy as np
import kfcomm
from kfcomm.elastic import Elastic, ElasticSampler, State

with kfcomm.sync.init(elastic=True) as comm, Elastic(comm, State(steps=0)) as elastic:
    sys.stdout.write(f"{comm.births[comm.rank]} trains\\n")
    sys.stdout.flush()
    for step in elastic.steps(ElasticSampler(1 << 20, batch=4)):
        if comm.all_reduce(np.array([float(Path("enough").exists())]), name="enough")[0]:
            break
        time.sleep(0.01)
"""
INSIDE = 'mount --bind "$1" /etc/hosts; shift; exec "$@"'
WITHIN_S = 120.0


class Pods:
    """Pods with names of their own, and an etcd beside them."""

    def __init__(self, lab: Netlab, folder: Path) -> None:
        self._hosts = {host.name: host for host in lab.hosts}
        self._folder = folder
        self._started: list[subprocess.Popen[bytes]] = []
        (folder / "program.py").write_text(PROGRAM)
        self.name({"pod-0": "a", "pod-1": "b"})
        etcd = (etcds.program(), "--data-dir", str(folder / "data"), "--listen-client-urls", "http://0.0.0.0:2379")
        self.start("etcd", "etcd", *etcd, "--advertise-client-urls", "http://etcd:2379")

    def name(self, places: dict[str, str]) -> None:
        """Give pods the addresses of these hosts."""
        rows = {"localhost": "127.0.0.1", "etcd": self._hosts["etcd"].address}
        rows |= {pod: self._hosts[host].address for pod, host in places.items()}
        # In place: the file is mounted where hosts look for names.
        (self._folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in rows.items()))

    def start(self, host: str, said: str, *line: str) -> subprocess.Popen[bytes]:
        """Start a command on a host; its output goes to the file ``said``."""
        script = self._hosts[host].inside("unshare", "-m", "sh", "-ec", INSIDE, "sh", str(self._folder / "hosts"))
        env = environ(KFCOMM_TOKEN=TOKEN, KFCOMM_LOST_AFTER="5")
        with (self._folder / said).open("wb") as file:
            self._started.append(
                subprocess.Popen([*script, *line], env=env, cwd=self._folder, stdin=-3, stdout=file, stderr=file)
            )
        return self._started[-1]

    def launch(self, host: str, said: str) -> subprocess.Popen[bytes]:
        """Start the launcher of a pod."""
        hosts = ("-H", "pod-0:1,pod-1:1", "--elastic", "1:2", "--store", "etcd://etcd/job")
        return self.start(host, said, *command("run", *hosts, sys.executable, "program.py"))

    def until_trains(self, said: str) -> None:
        """Wait until the rank of a pod trains."""
        deadline_s = time.monotonic() + WITHIN_S
        while " trains" not in (text := (self._folder / said).read_text()):
            assert time.monotonic() < deadline_s, text
            time.sleep(0.05)

    def close(self) -> None:
        """End everything."""
        for process in self._started:
            process.kill()
            process.wait()


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    etcds.program()
    with ExitStack() as stack:
        lab = stack.enter_context(Netlab([HostSpec(name) for name in ("etcd", "a", "b", "c")]))
        made = Pods(lab, tmp_path)
        stack.callback(made.close)
        yield made


@pytest.mark.parametrize("lost", ["pod-0", "pod-1"])
def test_pod_that_is_moved_joins_again_under_its_name(lost: str, pods: Pods, tmp_path: Path) -> None:
    places = {"pod-0": "a", "pod-1": "b"}
    launchers = {pod: pods.launch(host, pod) for pod, host in places.items()}
    for pod in places:
        pods.until_trains(pod)
    launchers[lost].kill()
    launchers[lost].wait()
    pods.name(places | {lost: "c"})
    launchers[lost] = pods.launch("c", "moved")
    pods.until_trains("moved")
    (tmp_path / "enough").touch()
    assert [launcher.wait() for launcher in launchers.values()] == [0, 0], (tmp_path / "moved").read_text()
