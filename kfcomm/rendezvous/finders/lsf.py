"""Jobs of LSF: it starts one command, and leaves the ranks to a launcher such as jsrun or mpirun."""

from __future__ import annotations

from kfcomm.rendezvous.nodes import lsf_nodes
from kfcomm.rendezvous.worlds import Absent, Environ, Incomplete, Outcome, quote


def find(environ: Environ) -> Outcome:
    """Refuse to run alone on one of several hosts; the slots of one host may be for threads."""
    nodes = lsf_nodes(environ)
    if nodes is None or len(nodes) == 1:
        return Absent("a command of a job of one host")
    seen = quote(environ, "LSB_JOBID", "LSB_MCPU_HOSTS")
    why = f"{seen}: a command of a job of {len(nodes)} hosts, not a process of a launcher"
    return Incomplete(why, "start with jsrun or mpirun, or kfcomm run -H on each host")
