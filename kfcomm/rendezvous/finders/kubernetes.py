"""Pods of an Indexed Job of Kubernetes: the index is the rank, and the manifest gives the size as ``KFCOMM_SIZE``."""

from __future__ import annotations

from kfcomm.rendezvous.worlds import Absent, Environ, FoundWorld, Incomplete, Outcome, quote, within


def find(environ: Environ) -> Outcome:
    """Find the world. Other pods have no variable that tells them from a pod that is alone."""
    if "JOB_COMPLETION_INDEX" not in environ:
        return Absent("a pod without JOB_COMPLETION_INDEX: nothing says that it is one of several")
    if "JOBSET_JOB_GLOBAL_INDEX" in environ:
        return Absent("a pod of a JobSet with several jobs")
    place = within(environ, "JOB_COMPLETION_INDEX")
    if place is None:
        why = f"{quote(environ, 'JOB_COMPLETION_INDEX')}: an index has no size"
        return Incomplete(
            why, "set KFCOMM_SIZE to the job's completions, and KFCOMM_STORE to http://JOB-0.SERVICE:29600"
        )
    return FoundWorld("kubernetes", *place, (0, 1), None, quote(environ, "JOB_COMPLETION_INDEX", "KFCOMM_SIZE"))
