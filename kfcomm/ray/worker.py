"""Actor of one rank."""

from __future__ import annotations

import signal
from typing import NamedTuple

import ray

from kfcomm.common.version import versions
from kfcomm.launch.remote import Ended, Task, place_of, run_rank


class JobPlace(NamedTuple):
    """Place of a rank in its job; the bounds of an elastic job are in its store."""

    uid: int
    size: int  # initial number of ranks
    is_elastic: bool


class Worker:
    """Actor that is one rank of a job."""

    def about(self) -> tuple[tuple[str, int], str]:
        """Return the version here, and this node's address; answered once the worker has a place."""
        return versions(), ray.util.get_node_ip_address()

    def run(self, task: Task, place: JobPlace, url: str, token: str) -> Ended:
        """Run the task as a rank, whose store is at ``url``."""
        is_later = place.uid >= place.size
        found = place_of(0 if is_later else place.uid, place.size, url, token)
        found["elastic"] = place.is_elastic
        if is_later:
            found["join"] = place.uid
        # Ray's handler would raise in the function, as if that had left; and blocking calls hold handlers, which cost
        # 40 of 200 µs of a small all_reduce. By default SIGTERM ends this process, and Ray sees that.
        handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            return run_rank(task, place.uid, found)
        finally:
            signal.signal(signal.SIGTERM, handler)
