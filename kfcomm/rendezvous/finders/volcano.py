"""The variables of a job of Volcano with the plugins ``env`` and ``svc``, if it has one kind of task."""

from __future__ import annotations

from kfcomm.rendezvous.worlds import (
    DEFAULT_PORT,
    Absent,
    Environ,
    FoundWorld,
    Incomplete,
    Outcome,
    both,
    lacking,
    quote,
    store_port,
)

_HOSTS, _NUM = "_HOSTS", "_NUM"


def find(environ: Environ) -> Outcome:
    """Find the world: all pods of the one kind of task."""
    lists = sorted(name for name in environ if name.startswith("VC_") and name.endswith(_HOSTS))
    if "VC_TASK_INDEX" not in environ:
        if not lists:
            return Absent("neither VC_TASK_INDEX nor VC_..._HOSTS is set")
        return Incomplete(lacking(environ, ["VC_TASK_INDEX"], *lists), "add Volcano's plugin env")
    index = quote(environ, "VC_TASK_INDEX")
    match lists:
        case []:
            return Incomplete(f"{index} is set but VC_..._HOSTS is not", "add Volcano's plugin svc")
        case [hosts]:
            size = hosts.removesuffix(_HOSTS) + _NUM
            if why := lacking(environ, ["VC_TASK_INDEX", size]):
                return Incomplete(why, "set KFCOMM_RANK and KFCOMM_SIZE")
            store = environ[hosts].split(",")[0].strip(), store_port(environ, DEFAULT_PORT)
            place = both(environ, "VC_TASK_INDEX", size)
            return FoundWorld("volcano", *place, (0, 1), store, quote(environ, "VC_TASK_INDEX", size))
        case several:
            why = f"{index} is set, and the job has several kinds of tasks ({', '.join(several)})"
            return Incomplete(why, "set KFCOMM_RANK, KFCOMM_SIZE and KFCOMM_STORE")
