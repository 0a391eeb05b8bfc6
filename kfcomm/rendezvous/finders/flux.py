"""The variables of a task of Flux (``flux run``, ``flux submit``)."""

from __future__ import annotations

from kfcomm.rendezvous.worlds import (
    Environ,
    FoundWorld,
    Incomplete,
    Outcome,
    both,
    integer,
    lacking,
    local_store,
    quote,
)


def find(environ: Environ) -> Outcome:
    """Find the world. A shell of ``flux alloc`` or ``flux batch`` has ``FLUX_URI`` and is not a task."""
    names = ("FLUX_TASK_RANK", "FLUX_JOB_SIZE")
    if why := lacking(environ, names, "FLUX_JOB_ID", "FLUX_URI"):
        return Incomplete(f"{why}: a shell of an instance, not a task", "start with flux run -n N")
    rank, size = both(environ, *names)
    local, store = None, None
    # The list of nodes is not among the variables: only a job of one node tells where rank 0 is.
    if "FLUX_JOB_NNODES" in environ and integer(environ, "FLUX_JOB_NNODES", 1, size) == 1:
        local, store = (rank, size), local_store(environ, environ.get("FLUX_JOB_ID"))
    return FoundWorld("flux", rank, size, local, store, quote(environ, *names, "FLUX_JOB_NNODES"))
