"""The variables of a LeaderWorkerSet: each of its groups is a world, and the leader is rank 0."""

from __future__ import annotations

from kfcomm.rendezvous.worlds import (
    DEFAULT_PORT,
    Environ,
    FoundWorld,
    Incomplete,
    Outcome,
    both,
    lacking,
    quote,
    store_port,
)


def find(environ: Environ) -> Outcome:
    """Find the world."""
    names = ("LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS")
    if why := lacking(environ, names):
        label = "leaderworkerset.sigs.k8s.io/worker-index"
        return Incomplete(why, f"set the index from the pod's label {label}, as LeaderWorkerSet 0.6 does")
    store = environ["LWS_LEADER_ADDRESS"], store_port(environ, DEFAULT_PORT)
    return FoundWorld("leaderworkerset", *both(environ, *names[:2]), (0, 1), store, quote(environ, *names))
