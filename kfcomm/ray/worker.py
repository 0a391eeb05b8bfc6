"""Actor of one rank."""

from __future__ import annotations

from typing import NamedTuple

import ray

from kfcomm.launch.remote import Ended, Task, run_rank
from kfcomm.rendezvous.identity import versions
from kfcomm.rendezvous.settings import Arguments


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
        # Ray shows each worker only its own devices, counted from 0.
        found = Arguments(
            rank=place.uid, size=place.size, local_rank=0, local_size=1, store=url, serve=False, token=token,
            elastic=place.is_elastic,
        )  # fmt: skip
        if place.uid >= place.size:
            found |= Arguments(rank=0, join=place.uid)
        return run_rank(task, place.uid, found)
