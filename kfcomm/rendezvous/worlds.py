"""Rank and size from the environment of each launcher: one function per launcher.

A function returns the world that it finds, or the reason why the environment is not its launcher's; contradictory
variables raise. Pure: the environment is an argument.

======== ==========================================================================================
source   variables
======== ==========================================================================================
kfcomm   ``KFCOMM_RANK``, ``KFCOMM_SIZE``, ``KFCOMM_LOCAL_RANK``, ``KFCOMM_LOCAL_SIZE``
torchrun ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``
slurm    ``SLURM_PROCID``, ``SLURM_STEP_NUM_TASKS``, ``SLURM_LOCALID``, ``SLURM_STEP_NODELIST``, ...
openmpi  ``OMPI_COMM_WORLD_RANK``, ``_SIZE``, ``_LOCAL_RANK``, ``_LOCAL_SIZE``
pmi      ``PMI_RANK``, ``PMI_SIZE``, ``MPI_LOCALRANKID``, ``MPI_LOCALNRANKS``
======== ==========================================================================================

If the launcher serves no store, rank 0 does, at ``KFCOMM_PORT``, else: with torchrun at ``MASTER_PORT`` + 1 (the port
itself is used by torch's own store); with SLURM and MPI at a port from 20000 to 29999 derived from the job's id.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kfcomm.errors import ConfigError
from kfcomm.rendezvous.host import LOOPBACK

DEFAULT_PORT = 29600
MAX_RANKS = 1 << 16

Environ = Mapping[str, str]


class WorldSource(StrEnum):
    """Source of rank and size."""

    ARGUMENTS = "arguments"
    KFCOMM = "kfcomm"
    TORCHRUN = "torchrun"
    SLURM = "slurm"
    OPENMPI = "openmpi"
    PMI = "pmi"
    ALONE = "alone"


@dataclass(frozen=True, slots=True)
class FoundWorld:
    """Rank and size from one source."""

    source: WorldSource
    rank: int
    size: int
    local: tuple[int, int] | None  # rank and number of processes on this host; None if unknown
    store: tuple[str, int] | None  # host and port at which rank 0 serves the store; None if unknown
    because: str  # variables and their values, for messages

    def __post_init__(self) -> None:
        _check_rank(self.source, "rank", self.rank, self.size)
        if self.local is not None:
            _check_rank(self.source, "local rank", *self.local)

    def check_local(self) -> None:
        """Check the local size of an initial process. Raises `ConfigError`: it exceeds the size."""
        if self.local is not None and self.local[1] > self.size:
            raise ConfigError(f"{self.source}: local size {self.local[1]} exceeds size {self.size} ({self.because})")

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks are known to be on this host."""
        return self.local is not None and self.local[1] == self.size


def _check_rank(source: WorldSource, name: str, rank: int, size: int) -> None:
    if not 1 <= size <= MAX_RANKS:
        raise ConfigError(f"{source}: size {size} must be from 1 to {MAX_RANKS}")
    if not 0 <= rank < size:
        raise ConfigError(f"{source}: {name} {rank} must be from 0 to {size - 1}, below the size {size}")


def from_kfcomm(environ: Environ) -> FoundWorld | str:
    """The variables of ``kfcomm run``, or the same set by hand."""
    names = ("KFCOMM_RANK", "KFCOMM_SIZE")
    if not any(name in environ for name in names):
        return "neither KFCOMM_RANK nor KFCOMM_SIZE is set"
    rank, size = _both(environ, *names)
    local = _pair(environ, "KFCOMM_LOCAL_RANK", "KFCOMM_LOCAL_SIZE")
    return FoundWorld(WorldSource.KFCOMM, rank, size, local, None, _quote(environ, *names))


def from_torchrun(environ: Environ) -> FoundWorld | str:
    """The variables of torchrun, which torch's ``env://`` also reads."""
    names = ("RANK", "WORLD_SIZE")
    if not all(name in environ for name in names):
        return "RANK and WORLD_SIZE are not both set"
    rank, size = _both(environ, *names)
    local = _pair(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    store = None
    if size > 1:
        if not environ.get("MASTER_ADDR"):
            raise ConfigError("torchrun: RANK and WORLD_SIZE are set but MASTER_ADDR is not")
        store = environ["MASTER_ADDR"], _port(environ, _beside_master_port)
    return FoundWorld(WorldSource.TORCHRUN, rank, size, local, store, _quote(environ, *names, "MASTER_ADDR"))


def _beside_master_port(environ: Environ) -> int:
    if "MASTER_PORT" not in environ:
        raise ConfigError("torchrun: MASTER_PORT is not set; set it, or KFCOMM_PORT to the port of kfcomm's own store")
    port = integer(environ, "MASTER_PORT", 1, 65535)
    return port + 1 if port < 65535 else port - 1


def from_slurm(environ: Environ) -> FoundWorld | str:
    """The variables of a task that srun started.

    The shell of a batch script has SLURM_PROCID too, but is not a step; and mpirun and mpiexec start their daemons by
    srun, so that below them SLURM's variables describe the daemon: both are skipped.
    """
    if "SLURM_PROCID" not in environ:
        return "SLURM_PROCID is not set"
    if not any(name in environ for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "SLURM_STEPID")):
        return "SLURM_PROCID is set but SLURM_STEP_ID is not: a batch script's shell, not a task of srun"
    for name in ("OMPI_COMM_WORLD_RANK", "MPI_LOCALNRANKS"):
        if name in environ:
            return f"{name} is set too: MPI's launcher runs below srun and describes the process itself"
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS")
    rank, size = _both(environ, *names)
    local = _slurm_local(environ)
    store = _slurm_store(environ) if size > 1 else None
    return FoundWorld(WorldSource.SLURM, rank, size, local, store, _quote(environ, *names, "SLURM_STEP_NODELIST"))


def _slurm_local(environ: Environ) -> tuple[int, int] | None:
    text = environ.get("SLURM_STEP_TASKS_PER_NODE")
    if text is None or not {"SLURM_LOCALID", "SLURM_NODEID"} <= environ.keys():
        return None
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if match is None:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE={text!r} must look like '2(x3),1'")
        counts += [int(match[1])] * min(int(match[2] or 1), MAX_RANKS)
    node = integer(environ, "SLURM_NODEID", 0, len(counts) - 1)
    return integer(environ, "SLURM_LOCALID", 0, MAX_RANKS), counts[node]


def _slurm_store(environ: Environ) -> tuple[str, int] | None:
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if nodes is None:
        return None
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    return first_host(nodes), _port(environ, lambda _: _port_of(f"{environ.get('SLURM_JOB_ID', '')}.{step}"))


def first_host(nodes: str) -> str:
    """The first host of SLURM's ``node[03-05,9],other``: ``node03``.

    Raises:
        ConfigError: the list is empty or its brackets are not closed.
    """
    match = re.match(r"(?:[^,\[\]]|\[[^\[\]]+\])+(?=,|$)", nodes)
    if match is None:
        raise ConfigError(f"SLURM_STEP_NODELIST={nodes!r} must look like 'node[01-04,7],other'")
    return re.sub(r"\[([^\]\-,]+)[^\]]*\]", r"\1", match[0])


def from_openmpi(environ: Environ) -> FoundWorld | str:
    """The variables of Open MPI's mpirun (versions 4 and 5)."""
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    if not any(name in environ for name in names):
        return "OMPI_COMM_WORLD_RANK is not set"
    rank, size = _both(environ, *names)
    local = _pair(environ, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    store = _local_store(environ, job) if local and local[1] == size else None
    return FoundWorld(WorldSource.OPENMPI, rank, size, local, store, _quote(environ, *names))


def from_pmi(environ: Environ) -> FoundWorld | str:
    """The variables of MPICH's, Intel's and Cray's launchers."""
    names = ("PMI_RANK", "PMI_SIZE")
    if not all(name in environ for name in names):
        return "PMI_RANK and PMI_SIZE are not both set"
    rank, size = _both(environ, *names)
    local = _pair(environ, "MPI_LOCALRANKID", "MPI_LOCALNRANKS") or _pair(environ, "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
    store = _local_store(environ, environ.get("PMI_JOBID")) if local and local[1] == size else None
    return FoundWorld(WorldSource.PMI, rank, size, local, store, _quote(environ, *names))


FINDERS: tuple[Callable[[Environ], FoundWorld | str], ...] = (
    from_kfcomm,
    from_torchrun,
    from_slurm,
    from_openmpi,
    from_pmi,
)
"""In order of precedence."""


def integer(environ: Environ, name: str, low: int, high: int) -> int:
    """The variable ``name`` as an integer from ``low`` to ``high``.

    Raises:
        ConfigError: invalid; names the variable, its value and the allowed range.
    """
    text = environ[name].strip()
    # long numbers are refused unparsed: int() is quadratic in the number of digits
    if re.fullmatch(r"-?[0-9]{1,12}", text) and low <= int(text) <= high:
        return int(text)
    raise ConfigError(f"{name}={environ[name]!r} must be an integer from {low} to {high}")


def _both(environ: Environ, rank: str, size: str) -> tuple[int, int]:
    for name, other in ((rank, size), (size, rank)):
        if name not in environ:
            raise ConfigError(f"{other}={environ[other]!r} is set but {name} is not; set both or neither")
    num_ranks = integer(environ, size, 1, MAX_RANKS)
    return integer(environ, rank, 0, num_ranks - 1), num_ranks


def _pair(environ: Environ, rank: str, size: str) -> tuple[int, int] | None:
    return _both(environ, rank, size) if rank in environ and size in environ else None


def _local_store(environ: Environ, job: str | None) -> tuple[str, int]:
    return LOOPBACK, _port(environ, lambda _: DEFAULT_PORT if job is None else _port_of(job))


def _port(environ: Environ, otherwise: Callable[[Environ], int]) -> int:
    return integer(environ, "KFCOMM_PORT", 1, 65535) if "KFCOMM_PORT" in environ else otherwise(environ)


def _port_of(job: str) -> int:
    # below 32768, where Linux begins to hand out ports to clients
    return 20000 + zlib.crc32(job.encode()) % 10000


def _quote(environ: Environ, *names: str) -> str:
    return ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
