"""A cluster of SLURM for tests: a controller and daemons in network namespaces of their own, ended with the tests.

Each node has its own address, name and kernel's idea of its host, so that kfcomm sees several hosts. All daemons run
as the present user, with a munge key of their own; what they write is in one folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from bench.netlab import HostSpec, Netlab

REQUIRE = "KFCOMM_REQUIRE_SLURM"
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "squeue")
HEAD, NODES = "head", ("node1", "node2")
WITHIN_S = 180.0
LOOK_S = 0.1
CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={head}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
KillWait=5
ReturnToService=2
MailProg=/bin/true
NodeName={nodes} CPUs=4 State=UNKNOWN
PartitionName=all Nodes={nodes} Default=YES State=UP
"""
INSIDE = 'mount --bind "$1" /etc/hosts; hostname "$2"; shift 2; exec "$@"'


def why_unavailable() -> str:
    """Missing programs, in words; empty if all are there."""
    places = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
    missing = [name for name in PROGRAMS if shutil.which(name, path=places) is None]
    return f"needs SLURM and munge (Debian: slurm-wlm, munge): {', '.join(missing)} missing" if missing else ""


def needed() -> None:
    """Skip the test without SLURM; fail it if SLURM is required."""
    if reason := why_unavailable():
        if os.environ.get(REQUIRE, "0") not in ("", "0"):
            pytest.fail(f"{reason}, and {REQUIRE} is set")
        pytest.skip(reason)


class Slurm:
    """A running cluster; `running` makes it."""

    def __init__(self, folder: Path, lab: Netlab) -> None:
        self.folder = folder
        self._hosts = {host.name: host for host in lab.hosts}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._env = {
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "SLURM_CONF": str(folder / "slurm.conf"),
            "HOME": str(folder),
            "TMPDIR": str(folder / "tmp"),
            "LANG": "C.UTF-8",
        }
        (folder / "tmp").mkdir()
        (folder / "state").mkdir()
        (folder / "hosts").write_text(
            "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in lab.hosts)
        )
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(folder=folder, head=HEAD, nodes="node[1-2]", user=os.environ.get("USER", "root"))
        )
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o600)

    def start(self) -> None:
        """Start all daemons, and wait until both nodes are idle."""
        munge = self.folder / "munge"
        self._daemon(
            HEAD, "munged", "--foreground", "--force", f"--socket={munge}", f"--key-file={self.folder}/munge.key",
            f"--pid-file={munge}.pid", f"--log-file={munge}.log", f"--seed-file={munge}.seed",
        )  # fmt: skip
        self.until(munge.exists)
        self._daemon(HEAD, "slurmctld", "-D", "-i")
        for node in NODES:
            (self.folder / node).mkdir()
            self._daemon(node, "slurmd", "-D")
        self.until(lambda: self.output("sinfo", "-h", "-o", "%D %t").strip() == f"{len(NODES)} idle")

    def command(self, *line: str, on: str = HEAD, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a command on a host, by default on the head."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self._inside(on, *line), env={**self._env, **(env or {})}, stdin=subprocess.DEVNULL, stdout=pipe,
            stderr=pipe, text=True, cwd=self.folder,
        )  # fmt: skip

    def output(self, *line: str, env: Mapping[str, str] | None = None) -> str:
        """Output of a command that has ended well; else nothing."""
        with self.command(*line, env=env) as process:
            return process.communicate()[0] if process.wait() == 0 else ""

    def until(self, is_so: Callable[[], object]) -> None:
        """Wait for a condition."""
        deadline_s = time.monotonic() + WITHIN_S
        while not is_so():
            assert time.monotonic() < deadline_s, self.said()
            time.sleep(LOOK_S)

    def said(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in self.folder.glob("*.log"))

    def close(self) -> None:
        """End all daemons, the controller first."""
        for process in reversed(self._daemons):
            process.terminate()
        for process in self._daemons:
            process.wait()

    def _daemon(self, host: str, *line: str) -> None:
        command = self._inside(host, *line)
        with (self.folder / f"{line[0]}-{host}.out.log").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(command, env=self._env, stdin=-3, stdout=log, stderr=log, cwd=self.folder)
            )

    def _inside(self, host: str, *line: str) -> list[str]:
        script = ["unshare", "-mu", "sh", "-ec", INSIDE, "sh", str(self.folder / "hosts"), host]
        return self._hosts[host].inside(*script, *line)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Slurm]:
    """A cluster of a head and two nodes, for as long as the block."""
    needed()
    with Netlab([HostSpec(name) for name in (HEAD, *NODES)]) as lab:
        slurm = Slurm(folder, lab)
        try:
            slurm.start()
            yield slurm
        finally:
            slurm.close()
