"""Defaults for callbacks and clocks."""

from __future__ import annotations

import asyncio


def do_nothing(*_: object) -> None:
    """Default of a callback that is called without asking whether it was set."""


def loop_now_s() -> float:
    """Return the time of the running event loop, in seconds."""
    return asyncio.get_running_loop().time()
