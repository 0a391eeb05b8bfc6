"""Nodes of an allocation: SLURM's compressed lists, PBS's node files and LSF's lists."""

from __future__ import annotations

import re
from pathlib import Path

from kfcomm.errors import ConfigError
from kfcomm.rendezvous.worlds import Environ, port_of, store_port

_MAX_NODES = 1 << 16


def first_host(nodes: str, name: str = "SLURM_STEP_NODELIST") -> str:
    """The first host of SLURM's ``node[03-05,9],other``: ``node03``; ``name`` is the variable, for messages.

    Raises:
        ConfigError: the list is empty or its brackets are not closed.
    """
    match = re.match(r"(?:[^,\[\]]|\[[^\[\]]+\])+(?=,|$)", nodes)
    if match is None:
        raise ConfigError(f"{name}={nodes!r} must look like 'node[01-04,7],other'")
    return re.sub(r"\[([^\]\-,]+)[^\]]*\]", r"\1", match[0])


def pbs_nodes(environ: Environ) -> list[str] | None:
    """Different hosts of the file that ``PBS_NODEFILE`` names, in its order; None if it cannot be read here."""
    try:
        lines = Path(environ["PBS_NODEFILE"]).read_text(errors="replace").split()
    except (KeyError, OSError):
        return None
    return list(dict.fromkeys(lines))[:_MAX_NODES]


def lsf_nodes(environ: Environ) -> list[str] | None:
    """Different hosts of ``LSB_MCPU_HOSTS``, which is ``host1 4 host2 4``; None if it is not set.

    Raises:
        ConfigError: it does not look so.
    """
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    if not words:
        return None
    if len(words) % 2 or not all(re.fullmatch(r"[0-9]{1,6}", word) for word in words[1::2]):
        raise ConfigError(f"LSB_MCPU_HOSTS={environ['LSB_MCPU_HOSTS']!r} must look like 'host1 4 host2 4'")
    return list(dict.fromkeys(words[::2]))[:_MAX_NODES]


def allocated_store(environ: Environ) -> tuple[str, int] | None:
    """The store on the first node of the allocation in which a launcher of MPI runs; None without a list of nodes.

    Launchers fill the nodes in this order by default, so that rank 0 is on the first one.
    """
    if "SLURM_JOB_NODELIST" in environ:
        host: str | None = first_host(environ["SLURM_JOB_NODELIST"], "SLURM_JOB_NODELIST")
    else:
        host = next(iter(pbs_nodes(environ) or lsf_nodes(environ) or ()), None)
    if host is None:
        return None
    jobs = (environ.get(name) for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"))
    return host, store_port(environ, port_of(next(filter(None, jobs), None)))
