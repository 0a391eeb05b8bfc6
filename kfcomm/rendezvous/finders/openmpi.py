"""The variables of Open MPI's mpirun (versions 4 and 5), which LSF's jsrun sets too."""

from __future__ import annotations

from kfcomm.rendezvous.nodes import allocated_store
from kfcomm.rendezvous.worlds import Environ, FoundWorld, Outcome, both, local_store, pair, quote


def find(environ: Environ) -> Outcome:
    """Find the world."""
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    rank, size = both(environ, *names)
    local = pair(environ, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    is_one_host = local is not None and local[1] == size
    store = local_store(environ, job) if is_one_host else allocated_store(environ)
    return FoundWorld("openmpi", rank, size, local, store, quote(environ, *names))
