"""The variables of launchers that speak PMIx alone: the size is not among them."""

from __future__ import annotations

from kfcomm.rendezvous.nodes import allocated_store
from kfcomm.rendezvous.worlds import Environ, FoundWorld, Incomplete, Outcome, lacking, quote, within


def find(environ: Environ) -> Outcome:
    """Find the world by the rank and ``KFCOMM_SIZE``."""
    if why := lacking(environ, ["PMIX_RANK"], "PMIX_NAMESPACE"):
        return Incomplete(why, "start with prterun, mpirun or srun")
    place = within(environ, "PMIX_RANK")
    if place is None:
        seen = quote(environ, "PMIX_RANK", "PMIX_NAMESPACE")
        return Incomplete(f"{seen}: PMIx's variables have no size", "set KFCOMM_SIZE to the number of processes")
    return FoundWorld("pmix", *place, None, allocated_store(environ), quote(environ, "PMIX_RANK", "KFCOMM_SIZE"))
