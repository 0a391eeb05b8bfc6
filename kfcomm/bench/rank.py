"""One rank of a benchmark as a program: an event loop around `measure`, and an exit code."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from kfcomm.bench.events import Emit
from kfcomm.bench.measure import WrongResult, run
from kfcomm.bench.suite import Suite
from kfcomm.errors import ConfigError, KfcommError


def run_rank(suite: Suite, emit: Emit) -> int:
    """Run this process's part of the benchmark.

    Returns:
        Its exit code: 2 for wrong settings, 1 for another failure, 130 if it was interrupted.
    """
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(run(suite, emit))
    except WrongResult:
        return 1  # rank 0 has told it
    except KeyboardInterrupt:
        return 130
    except KfcommError as error:
        sys.stderr.write(f"kfcomm: error: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Loops of uvloop where it exists."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
