"""How the processes of each contender are started, with the settings that suit it best here, and why those.

All of them are started with more ranks than cores, without binding to cores: which rank runs where is the kernel's
affair for everybody.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

WORKER = ("-m", "bench.compare.worker")


@dataclass(frozen=True, slots=True)
class Pythons:
    """Interpreters, each with NumPy: own has kfcomm, MPI's have mpi4py and one MPI library each, torch's has torch.

    The last may have DeepSpeed. Without it, Gloo and DeepSpeed are looked for beside kfcomm.
    """

    own: str = sys.executable
    torch: str | None = None
    openmpi: str | None = None
    mpich: str | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start one contender.

    Attributes:
        title: for tables.
        worker: its key in `worker.CONTENDERS`.
        start: builds the command line from the interpreters and the number of ranks; None if it starts each rank
            by itself (``RANK`` and ``WORLD_SIZE`` tell them apart).
        python: the interpreter its workers need; None where it is not installed.
        settings: environment of the workers beside the inherited one; recorded with the results.
    """

    title: str
    worker: str
    start: Callable[[str, int], list[str]] | None
    python: Callable[[Pythons], str | None]
    settings: Mapping[str, str] = field(default_factory=dict)

    def commands(self, pythons: Pythons, ranks: int) -> list[tuple[list[str], dict[str, str]]]:
        """Command lines to start, each with its environment beside the inherited one.

        Raises:
            LookupError: its interpreter is not installed.
        """
        python = self.python(pythons)
        if python is None:
            raise LookupError(f"{self.title} is not installed")
        worker = [python, *WORKER, self.worker]
        settings = dict(self.settings)
        if self.start is not None:
            return [([*self.start(python, ranks), *worker], settings)]
        return [(worker, settings | {"RANK": str(rank), "WORLD_SIZE": str(ranks)}) for rank in range(ranks)]


def own(pythons: Pythons) -> str | None:
    """Workers in this environment."""
    return pythons.own


def newest_torch(pythons: Pythons) -> str | None:
    """Workers in the environment of the newest torch."""
    return pythons.torch or pythons.own


def openmpi(pythons: Pythons) -> str | None:
    """Workers in Open MPI's environment."""
    return pythons.openmpi


def mpich(pythons: Pythons) -> str | None:
    """Workers in MPICH's environment."""
    return pythons.mpich


def kfcomm_run(transport: str) -> Callable[[str, int], list[str]]:
    """``kfcomm run``, with the strategy left to the cost model."""
    return lambda python, ranks: [python, "-m", "kfcomm", "run", "-n", str(ranks), "--transport", transport]


def mpiexec(*options: str) -> Callable[[str, int], list[str]]:
    """The ``mpiexec`` that lies beside the interpreter."""
    return lambda python, ranks: [os.path.join(os.path.dirname(python), "mpiexec"), "-n", str(ranks), *options]


# Open MPI's FAQ and `man mpirun`: an oversubscribed node is to be declared, and ranks then yield when idle. That is
# said here as well: over TCP, ranks that do not yield were three times slower.
OVERSUBSCRIBED = ("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1")
OPENMPI_SETTINGS = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# Named, so that it is certain which links are used: the `sm` of Open MPI 5 is what `vader` was in version 4.
OPENMPI_SHARED = ("--mca", "pml", "ob1", "--mca", "btl", "sm,self")
# By default the loopback interface is left out. The buffers are those of Linux' own tuning unless they are set.
OPENMPI_TCP = ("--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo")
# MPICH's device ch4: ranks of one node use its shared memory unless NOLOCAL sends all through the network module. Idle
# ranks yield as it sees fit: asking them to yield at once (MPIR_CVAR_POLLS_BEFORE_YIELD=0) made it slower.
MPICH_TCP = {
    "MPIR_CVAR_NOLOCAL": "1",
    "MPIR_CVAR_CH4_NETMOD": "ofi",
    "FI_PROVIDER": "tcp",
    "FI_TCP_IFACE": "lo",
}
# One thread in DeepSpeed's loops, as in torch's. The accelerator is named, so that it looks for no other.
DEEPSPEED_SETTINGS = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}

LAUNCHES = {
    "kfcomm": Launch("kfcomm", "kfcomm-async", kfcomm_run("auto"), own),
    "kfcomm-blocking": Launch("kfcomm, blocking", "kfcomm-blocking", kfcomm_run("auto"), own),
    "kfcomm-symmetric": Launch("kfcomm, comm.empty", "kfcomm-symmetric", kfcomm_run("auto"), own),
    "kfcomm-tcp": Launch("kfcomm TCP", "kfcomm-async", kfcomm_run("tcp"), own),
    "kfcomm-tcp-blocking": Launch("kfcomm TCP, blocking", "kfcomm-blocking", kfcomm_run("tcp"), own),
    "gloo": Launch("Gloo", "gloo", None, newest_torch, {"GLOO_SOCKET_IFNAME": "lo"}),
    "deepspeed": Launch("DeepSpeed shared memory", "deepspeed", None, newest_torch, DEEPSPEED_SETTINGS),
    "openmpi": Launch(
        "Open MPI shared memory", "mpi", mpiexec(*OVERSUBSCRIBED, *OPENMPI_SHARED), openmpi, OPENMPI_SETTINGS
    ),
    "openmpi-tcp": Launch("Open MPI TCP", "mpi", mpiexec(*OVERSUBSCRIBED, *OPENMPI_TCP), openmpi, OPENMPI_SETTINGS),
    "mpich": Launch("MPICH shared memory", "mpi", mpiexec("-bind-to", "none"), mpich),
    "mpich-tcp": Launch("MPICH TCP", "mpi", mpiexec("-bind-to", "none"), mpich, MPICH_TCP),
    "copy": Launch("copy floor", "copy", None, own),
    "sockets": Launch("socket floor", "sockets", None, own),
}
