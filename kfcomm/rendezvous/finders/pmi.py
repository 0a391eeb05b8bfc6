"""The variables of launchers that speak PMI-1 or PMI-2."""

from __future__ import annotations

from kfcomm.rendezvous.nodes import allocated_store
from kfcomm.rendezvous.worlds import Environ, FoundWorld, Incomplete, Outcome, both, lacking, local_store, pair, quote

NAMES = ("PMI_RANK", "PMI_SIZE")


def find(environ: Environ) -> Outcome:
    """Find the world."""
    return find_by(environ, "pmi", ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"))


def find_by(environ: Environ, source: str, locals_: tuple[str, str]) -> Outcome:
    """Find the world by PMI's variables, and the place on the host by these (``locals_``)."""
    if why := lacking(environ, NAMES, *locals_):
        return Incomplete(why, "start with mpiexec")
    rank, size = both(environ, *NAMES)
    local = pair(environ, *locals_)
    is_one_host = local is not None and local[1] == size
    store = local_store(environ, environ.get("PMI_JOBID")) if is_one_host else allocated_store(environ)
    return FoundWorld(source, rank, size, local, store, quote(environ, *NAMES))
