"""Harness of measurements: jobs of `kfcomm run`, turns, times of the slowest rank, records."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import Callable, Coroutine
from typing import Any


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the maker of uvloop's loops where it is installed; else None, which means asyncio's."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    made: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return made


def run_on_loop(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end, on uvloop where it is installed."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)
