"""The record of one session: what it waits for, what it did last, and where its program is.

The engine may be at work on another thread, or have been interrupted on this one: everything that it may change is
copied in one step of the interpreter, and looked at again if that failed. All values are JSON-able.

Fields of a record (ranks are those of the world):

- ``format``, ``rank``, ``size``, ``host``, ``pid``, ``time_s``: which process, and when (seconds of the wall clock).
- ``activity``: what it did last, in words. ``loop_blocked_s``: for how long its event loop has not had a turn.
- ``lost``: ranks that are gone, and why. ``links``: open links, in words.
- ``groups``: name and members of each group, by id.
- ``device``: what the others know of its device. ``routes``: the way of device memory in each group, and why, by id of
  the group; empty in a world without devices.
- ``waiting``: collectives in flight. ``receiving``: receives whose message has not shown up yet.
- ``uses``: how often each name was used, by group id; the newest ``MAX_USES`` names.
- ``events``: the last things that happened, oldest first. ``threads``, ``tasks``: where the program is.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any

from kfcomm.engine.meter import steady
from kfcomm.monitor.whereabouts import tasks, threads
from kfcomm.rendezvous.host import hostname

if TYPE_CHECKING:
    from kfcomm.engine.operation import Operation
    from kfcomm.engine.session import Session

FORMAT = 1
MAX_USES = 10_000


def record_of(session: Session) -> dict[str, Any]:
    """Everything that this process knows of a session, as JSON-able values."""
    engine = session.engine
    lost = steady(lambda: dict(engine.router.lost))
    return {
        "format": FORMAT,
        "rank": session.rank,
        "size": session.layout.size,
        "host": hostname(),
        "pid": os.getpid(),
        "time_s": time.time(),
        "activity": session.activity(),
        "loop_blocked_s": round(session.lag.blocked_s(), 3),
        "lost": {str(rank): cause.message for rank, cause in lost.items()},
        "links": [f"to rank {rank}: {session.network.describe(rank)}" for rank in steady(engine.links.peers_in_use)],
        "groups": {
            group_id.hex(): {"name": name, "members": list(members)}
            for group_id, (name, members) in steady(lambda: dict(session.groups.known)).items()
        },
        "device": asdict(session.devices.reports[session.rank]),
        "routes": _routes(session),
        "waiting": [_waiting(operation) for operation in steady(engine.in_flight)],
        "receiving": [one for waits in steady(lambda: list(engine.receivers)) for one in steady(waits)],
        "uses": _uses(steady(engine.router.uses)),
        "events": steady(engine.recorder.as_list),
        "threads": steady(threads),
        "tasks": steady(lambda: tasks(engine.loop)),
    }


def _routes(session: Session) -> dict[str, str]:
    groups = steady(lambda: dict(session.groups.known))
    found = {group_id.hex(): session.route_of(members) for group_id, (_, members) in groups.items()}
    return {group_id: str(choice) for group_id, choice in found.items() if choice is not None}


def _waiting(operation: Operation) -> dict[str, Any]:
    collective = operation.collective
    members = collective.group.members
    return {
        "group": collective.key.group_id.hex(),
        "members": list(members),
        "name": collective.name,
        "seq": collective.seq,
        "verb": collective.signature[0],
        "waited_s": round(operation.waited_s(), 3),
        "arrived": [members[rank] for rank in collective.arrived_ranks()],
        "not_heard_from": [members[rank] for rank in collective.missing_ranks()],
        "chunks_missing": collective.remaining,
        "sends_pending": collective.sends,
    }


def _uses(keys: list[tuple[bytes, str, int]]) -> dict[str, dict[str, int]]:
    uses: dict[str, dict[str, int]] = {}
    for group_id, name, count in islice(reversed(keys), MAX_USES):
        uses.setdefault(group_id.hex(), {})[name] = count
    return uses
