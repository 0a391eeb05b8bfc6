"""Signals while a bed stands: those that would end the process on the spot end it in order, and none cuts that short.

Only the main thread of a Python program can say what a signal does; elsewhere nothing is changed.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

Handler = Callable[[int, FrameType | None], None]


@contextlib.contextmanager
def ending(*numbers: signal.Signals) -> Iterator[None]:
    """Have these raise `SystemExit`, unless somebody has said already what they do."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handled({number: end for number in numbers if signal.getsignal(number) is signal.SIG_DFL}):
        yield


@contextlib.contextmanager
def held_back(*numbers: signal.Signals) -> Iterator[None]:
    """Let these wait until the end."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    with _handled(dict.fromkeys(numbers, note)):
        yield
    for number in came:
        signal.raise_signal(number)


@contextlib.contextmanager
def _handled(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
