"""The variables of HPE's PALS (mpiexec and aprun on Cray systems), with PMI's; PBS names the nodes."""

from __future__ import annotations

from kfcomm.rendezvous.nodes import allocated_store
from kfcomm.rendezvous.worlds import Environ, FoundWorld, Incomplete, Outcome, lacking, local_store, pair, quote, within


def find(environ: Environ) -> Outcome:
    """Find the world: the size is PMI's, or ``KFCOMM_SIZE`` where PALS speaks PMIx."""
    if why := lacking(environ, ["PALS_RANKID"], "PALS_APID"):
        return Incomplete(why, "start with mpiexec")
    place = pair(environ, "PALS_RANKID", "PMI_SIZE") or within(environ, "PALS_RANKID")
    if place is None:
        return Incomplete(lacking(environ, ["PALS_RANKID", "PMI_SIZE"]), "set KFCOMM_SIZE to the number of processes")
    local = pair(environ, "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
    is_one_host = local is not None and local[1] == place[1]
    store = local_store(environ, environ.get("PALS_APID")) if is_one_host else allocated_store(environ)
    names = ("PALS_RANKID", "PMI_SIZE" if "PMI_SIZE" in environ else "KFCOMM_SIZE")
    return FoundWorld("pals", *place, local, store, quote(environ, *names))
