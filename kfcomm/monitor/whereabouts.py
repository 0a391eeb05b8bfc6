"""Positions of the program: stacks of its threads, and points at which its tasks are suspended."""

from __future__ import annotations

import asyncio
import os
import site
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

MAX_FRAMES = 40
MAX_TASKS = 100
HERE = str(Path(__file__).parent)
PACKAGE = str(Path(__file__).parent.parent)
OTHERS = (PACKAGE, str(Path(os.__file__).parent), *site.getsitepackages(), "<frozen")
"""Where code is that the user has not written: this package, the standard library, what was installed."""


def threads() -> list[dict[str, Any]]:
    """Every thread: its ``name``, the user's own line ``at`` which it is, and its ``stack``, outermost first.

    The frames that make a dump are left out.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [
        {"name": names.get(ident, f"thread {ident}"), **_described(list(_stack(frame)))}
        for ident, frame in sys._current_frames().items()
    ]


def program_line() -> str:
    """The user's own line at which the main thread is; empty if it is at none. On any thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(OTHERS):
            return _words(frame.f_code, frame.f_lineno or 0)
        frame = frame.f_back
    return ""


def tasks(loop: asyncio.AbstractEventLoop) -> list[dict[str, Any]]:
    """The tasks of a loop that run the user's own code; see ``threads``."""
    found = []
    for task in asyncio.all_tasks(loop):
        points = list(_suspended(task.get_coro()))
        if points and not points[0][0].co_filename.startswith(PACKAGE):
            found.append({"name": task.get_name(), **_described(points)})
    return found[:MAX_TASKS]


def _stack(frame: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    """The frames of a thread, outermost first, down to where a dump was asked for."""
    frames = []
    while frame is not None:
        frames.append((frame.f_code, frame.f_lineno or 0))
        frame = frame.f_back
    while frames and frames[0][0].co_filename.startswith(HERE):
        frames.pop(0)
    yield from reversed(frames[:MAX_FRAMES])


def _suspended(coroutine: Any) -> Iterator[tuple[CodeType, int]]:
    """The points at which a coroutine and those that it awaits are, outermost first."""
    for _ in range(MAX_FRAMES):
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            return
        yield frame.f_code, frame.f_lineno or 0
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)


def _described(points: list[tuple[CodeType, int]]) -> dict[str, Any]:
    own = [point for point in points if not point[0].co_filename.startswith(OTHERS)]
    return {"at": _words(*own[-1]) if own else "", "stack": [_words(*point) for point in points]}


def _words(code: CodeType, line: int) -> str:
    return f"{code.co_filename}:{line} in {code.co_qualname}"
