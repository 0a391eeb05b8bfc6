"""Roles of actors in the tests of this package: see `tests.processes.actor`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tests.programs.walker import Plan, all_awaiting, all_blocking

if TYPE_CHECKING:
    from tests.processes.actor import Actor


async def awaited(me: Actor, *, first: int, count: int, calls: int) -> dict[str, Any] | None:
    """Run programs on the asynchronous communicator; what was wrong."""
    report = await all_awaiting(me.comm, Plan(first, count, calls))
    return None if report is None else report.as_dict()


async def blocked(me: Actor, *, first: int, count: int, calls: int) -> dict[str, Any] | None:
    """As `awaited`, on the blocking communicator."""
    report = await asyncio.to_thread(all_blocking, me.blocking, Plan(first, count, calls))
    return None if report is None else report.as_dict()
