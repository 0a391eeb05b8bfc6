"""Pods of several jobs of a JobSet; the variables are those that docs/howto/kubernetes.md adds by the downward API."""

from __future__ import annotations

from kfcomm.errors import ConfigError
from kfcomm.rendezvous.worlds import MAX_RANKS, Environ, FoundWorld, Incomplete, Outcome, integer, lacking, quote


def find(environ: Environ) -> Outcome:
    """Find the world: the pods of the first job come first, then those of the next one."""
    names = ("JOBSET_JOB_GLOBAL_INDEX", "JOBSET_GLOBAL_REPLICAS", "JOB_COMPLETION_INDEX", "KFCOMM_SIZE")
    if why := lacking(environ, names):
        return Incomplete(why, "set KFCOMM_SIZE to the number of all pods, and the others by the downward API")
    size = integer(environ, "KFCOMM_SIZE", 1, MAX_RANKS)
    jobs = integer(environ, "JOBSET_GLOBAL_REPLICAS", 1, MAX_RANKS)
    pods, rest = divmod(size, jobs)
    if rest:
        raise ConfigError(f"KFCOMM_SIZE={size} must be a multiple of JOBSET_GLOBAL_REPLICAS={jobs}, the number of jobs")
    job = integer(environ, "JOBSET_JOB_GLOBAL_INDEX", 0, jobs - 1)
    rank = job * pods + integer(environ, "JOB_COMPLETION_INDEX", 0, pods - 1)
    return FoundWorld("jobset", rank, size, (0, 1), None, quote(environ, *names))
