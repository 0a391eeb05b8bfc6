"""The variables of ``kfcomm run``, or the same set by hand. ``KFCOMM_SIZE=1`` alone asks for a world of one."""

from __future__ import annotations

from kfcomm.rendezvous.worlds import (
    KFCOMM,
    MAX_RANKS,
    Environ,
    FoundWorld,
    Incomplete,
    Outcome,
    both,
    integer,
    lacking,
    pair,
    quote,
)


def find(environ: Environ) -> Outcome:
    """Find the world; a size without a rank may complete the variables of another launcher."""
    names = ("KFCOMM_RANK", "KFCOMM_SIZE")
    if "KFCOMM_RANK" not in environ:
        if integer(environ, "KFCOMM_SIZE", 1, MAX_RANKS) == 1:
            return FoundWorld(KFCOMM, 0, 1, (0, 1), None, quote(environ, *names))
        return Incomplete(lacking(environ, names), "set both or neither")
    rank, size = both(environ, *names)
    local = pair(environ, "KFCOMM_LOCAL_RANK", "KFCOMM_LOCAL_SIZE")
    return FoundWorld(KFCOMM, rank, size, local, None, quote(environ, *names))
