"""All_reduce of others across a bed: torch's Gloo in the place of a strategy of the worker, Open MPI on its own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import kfcomm
from bench.compare.launch import OPENMPI_SETTINGS, OVERSUBSCRIBED
from bench.netlab.hosts import PORT
from bench.netlab.lab import Netlab

GLOO, OPEN_MPI = "gloo", "Open MPI"
_PORT = 29400
_LINKS = ("--mca", "pml", "ob1", "--mca", "btl", "tcp,sm,self", "--mca", "btl_tcp_if_include", PORT)
_DAEMONS = ("--prtemca", "prte_if_include", PORT, "--prtemca", "plm_ssh_agent")


class Gloo:
    """Gloo's ranks are those of the job."""

    def __init__(self, comm: kfcomm.Communicator) -> None:
        self._comm = comm

    async def prepare(self) -> None:
        """Let all ranks meet at rank 0's host."""
        import torch.distributed as dist

        own = np.frombuffer(_address().ljust(64).encode(), np.uint8).copy()
        first = bytes(np.asarray(await self._comm.broadcast(own, root=0))).decode().strip()
        os.environ["GLOO_SOCKET_IFNAME"] = PORT
        address = f"tcp://{first}:{_PORT}"
        await asyncio.to_thread(
            dist.init_process_group, "gloo", init_method=address, rank=self._comm.rank, world_size=self._comm.size
        )

    async def all_reduce(self, given: Any, result: Any) -> None:
        """Sum ``given`` of all ranks into ``result``."""
        import torch
        import torch.distributed as dist

        np.copyto(result, given)
        await asyncio.to_thread(dist.all_reduce, torch.from_numpy(result))


def _address() -> str:
    """This host's, in a bed."""
    import fcntl
    import socket
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        packed = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", PORT.encode()))
    return socket.inet_ntoa(packed[20:24])


def open_mpi_spans(lab: Netlab, python: Path, nbytes: int, count: int) -> list[float]:
    """Seconds of each of ``count`` all_reduces by Open MPI.

    Args:
        lab: a bed that stands.
        python: an interpreter with mpi4py, with ``mpiexec`` beside it.
        nbytes: of the array of float32.
        count: how many.
    """
    with tempfile.TemporaryDirectory(prefix="netlab") as folder:
        agent = Path(folder) / "agent"
        agent.write_text(_agent(lab))
        agent.chmod(0o755)
        hosts = ",".join(f"{host.address}:{host.spec.ranks}" for host in lab.hosts)
        world = ("--host", hosts, "-n", str(sum(host.spec.ranks for host in lab.hosts)), *OVERSUBSCRIBED)
        program = (str(python), str(Path(__file__).with_name("mpi_steps.py")), str(nbytes), str(count))
        line = (str(agent), lab.hosts[0].address, str(python.with_name("mpiexec")), *_DAEMONS, str(agent), *world)
        env = os.environ | OPENMPI_SETTINGS
        done = subprocess.run([*line, *_LINKS, *program], env=env, stdout=subprocess.PIPE, text=True, check=True)
    spans: list[float] = json.loads(done.stdout)
    return spans


def _agent(lab: Netlab) -> str:
    """Script in the place of ssh: it runs a command on a host of the bed, under a name of its own."""
    cases = "\n".join(f"{host.address}) name={host.name} net={host.namespace.path} ;;" for host in lab.hosts)
    inside = 'exec nsenter --net="$net" unshare --uts sh -c "hostname $name; $*"'
    return f'#!/bin/sh\n[ "$1" = -x ] && shift\nhost=$1\nshift\ncase $host in\n{cases}\nesac\n{inside}\n'
