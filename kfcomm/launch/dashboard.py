"""Dashboard of ``kfcomm run --dashboard``: the launcher serves it for as long as the job runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kfcomm.monitor.dashboard.watching import JobObserver

Say = Callable[[str], Awaitable[None]]


@contextlib.asynccontextmanager
async def served(mark: str, say: Say) -> AsyncIterator[JobObserver]:
    """Serve the page of a job, and say where it is.

    Raises:
        ConfigError: no port is free.
    """
    # In a thread, since the import takes some tenths of a second: the launcher hears signals and ends meanwhile.
    serving = await asyncio.to_thread(import_module, "kfcomm.monitor.dashboard.serving")
    from kfcomm.monitor.dashboard.watching import JobObserver
    from kfcomm.monitor.live import job_name

    observer = JobObserver(job_name(mark, None), begins=True)
    async with serving.served(observer, serving.Address()) as url:
        await say(f"dashboard: {url}")
        yield observer
