"""The variables of Kubeflow Trainer, meant for torchrun (``PET_*``), in a pod that runs the program itself."""

from __future__ import annotations

from kfcomm.rendezvous.worlds import (
    Environ,
    FoundWorld,
    Incomplete,
    Outcome,
    both,
    lacking,
    port_beside,
    quote,
    store_port,
)


def find(environ: Environ) -> Outcome:
    """Find the world: one process in each pod."""
    names = ("PET_NODE_RANK", "PET_NNODES")
    per_pod = environ.get("PET_NPROC_PER_NODE", "1")
    if per_pod != "1":
        why = f"PET_NPROC_PER_NODE={per_pod}: each pod is to start several processes, and this is not torchrun"
        return Incomplete(why, "start with torchrun, or set numProcPerNode to 1")
    if why := lacking(environ, names, "PET_MASTER_ADDR"):
        return Incomplete(why, "start with torchrun, or set KFCOMM_RANK and KFCOMM_SIZE")
    if ":" in environ["PET_NNODES"]:
        return Incomplete(f"PET_NNODES={environ['PET_NNODES']} is a range", "start with torchrun, or set one number")
    rank, size = both(environ, *names)
    store = None
    if {"PET_MASTER_ADDR", "PET_MASTER_PORT"} <= environ.keys():
        store = environ["PET_MASTER_ADDR"], store_port(environ, port_beside(environ, "PET_MASTER_PORT"))
    return FoundWorld("trainer", rank, size, (0, 1), store, quote(environ, *names, "PET_MASTER_ADDR"))
