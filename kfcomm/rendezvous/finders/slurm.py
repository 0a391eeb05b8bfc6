"""The variables of a task that srun started; the store is on the first node of the step.

The shell of ``sbatch`` or ``salloc`` has SLURM's variables too and is not a task: if the job has several tasks or
nodes, a program that is started there without srun is an error.
"""

from __future__ import annotations

import re

from kfcomm.errors import ConfigError
from kfcomm.rendezvous.nodes import first_host
from kfcomm.rendezvous.worlds import (
    MAX_RANKS,
    Absent,
    Environ,
    FoundWorld,
    Incomplete,
    Outcome,
    both,
    integer,
    lacking,
    port_of,
    quote,
    store_port,
)

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Steps from here on are SLURM's own: the batch script, the interactive shell of salloc, and such."""


def find(environ: Environ) -> Outcome:
    """Find the world."""
    if not _is_task(environ):
        return _shell(environ)
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS")
    rank, size = both(environ, *names)
    store = _store(environ) if size > 1 else None
    return FoundWorld("slurm", rank, size, _local(environ), store, quote(environ, *names, "SLURM_STEP_NODELIST"))


def _step(environ: Environ) -> str:
    """Number of the step; empty outside of steps of srun."""
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID", "")
    is_special = step.isascii() and step.isdigit() and len(step) < 12 and int(step) >= _FIRST_SPECIAL_STEP
    return "" if is_special else step


def _is_task(environ: Environ) -> bool:
    is_shell = "SLURM_STEP_ID" in environ and not _step(environ)
    return "SLURM_PROCID" in environ and not is_shell and bool(_step(environ) or "SLURM_STEP_NUM_TASKS" in environ)


def _shell(environ: Environ) -> Outcome:
    """A process of a job that is not a task of srun."""
    if _step(environ) or environ.get("SLURM_PROCID", "0") != "0":
        needed = ("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS")
        return Incomplete(lacking(environ, needed), "start with srun")
    for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"):
        if name in environ and integer(environ, name, 1, MAX_RANKS) > 1:
            seen = quote(environ, "SLURM_JOB_ID", name)
            return Incomplete(f"{seen}: a shell of a job of several tasks, not a task of srun", "start with srun")
    return Absent("a shell of a job of one task, not a task of srun")


def _local(environ: Environ) -> tuple[int, int] | None:
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


def _store(environ: Environ) -> tuple[str, int] | None:
    for name in ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"):
        if name in environ:
            port = port_of(f"{environ.get('SLURM_JOB_ID', '')}.{_step(environ)}")
            return first_host(environ[name], name), store_port(environ, port)
    return None
