"""Jobs of PBS (OpenPBS, PBS Professional, Torque): PBS starts one shell, and leaves the ranks to a launcher."""

from __future__ import annotations

from kfcomm.rendezvous.nodes import pbs_nodes
from kfcomm.rendezvous.worlds import Absent, Environ, Incomplete, Outcome, quote


def find(environ: Environ) -> Outcome:
    """Refuse to run alone on one of several nodes; the slots of one node may be for threads."""
    nodes = pbs_nodes(environ)
    seen = quote(environ, "PBS_JOBID", "PBS_NODEFILE")
    if nodes is None and "PBS_NODEFILE" in environ:
        return Incomplete(f"{seen}: the file cannot be read here", "start with mpiexec, or kfcomm run -H")
    if nodes is None or len(nodes) <= 1:
        return Absent("a shell of a job of one node")
    why = f"{seen}: a shell of a job of {len(nodes)} nodes, not a process of a launcher"
    return Incomplete(why, "start with mpiexec, or kfcomm run -H on each node")
