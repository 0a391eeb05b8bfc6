"""Tracebacks that end at the caller's line, without the frames inside kfcomm.

An error of kfcomm loses the frames of this package and its cause, unless foreign code took part (an array that could
not be read). The frame that raises it again stays in its traceback; `hide_own_frames` leaves it out where an uncaught
error is printed. ``KFCOMM_TRACEBACK=full`` keeps everything.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from kfcomm.errors import InternalError, KfcommError

E = TypeVar("E", bound=KfcommError)

_PACKAGE = os.path.join(Path(__file__).parent.parent, "")
_LIBRARY = str(Path(os.__file__).parent)
_ASYNCIO = os.path.join(_LIBRARY, "asyncio", "")


def terse(error: E) -> E:
    """The same error, to be raised in the function that the caller has called. A defect of kfcomm keeps everything."""
    cause = error.__cause__ or error.__context__
    if cause is None or not _is_foreign(cause.__traceback__):
        return bare(error)
    return error if isinstance(error, InternalError) else error.with_traceback(None)


def bare(error: E) -> E:
    """As ``terse``, for errors that involve libraries of kfcomm and no code of the caller."""
    if isinstance(error, InternalError):
        return error
    error.__cause__ = None
    error.__suppress_context__ = True
    return error.with_traceback(None)


def hide_own_frames() -> None:
    """Print uncaught errors of kfcomm without the frames of this package, unless the program has a hook of its own."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = print_uncaught


def print_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The hook of `hide_own_frames`."""
    drop_own_frames(error)
    sys.__excepthook__(kind, error, error.__traceback__)


def drop_own_frames(error: BaseException | None) -> None:
    """Drop the frames of kfcomm and asyncio from the tracebacks of kfcomm's errors, those of causes and groups too."""
    for one in _linked(error):
        if isinstance(one, KfcommError) and not isinstance(one, InternalError):
            one.__traceback__ = _without_own(one.__traceback__)


def _linked(error: BaseException | None) -> Iterator[BaseException]:
    left, seen = [error], set[int]()
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            left += [one.__cause__, None if one.__suppress_context__ else one.__context__]
            left += one.exceptions if isinstance(one, BaseExceptionGroup) else ()


def _without_own(trace: TracebackType | None) -> TracebackType | None:
    kept, one = [], trace
    while one is not None:
        if not one.tb_frame.f_code.co_filename.startswith((_PACKAGE, _ASYNCIO)):
            kept.append(one)
        one = one.tb_next
    if not kept:  # a program of kfcomm itself
        return trace
    for one, following in zip(kept, [*kept[1:], None], strict=True):
        one.tb_next = following
    return kept[0]


def _is_foreign(trace: TracebackType | None) -> bool:
    while trace is not None:
        if not _is_own(trace.tb_frame.f_code.co_filename):
            return True
        trace = trace.tb_next
    return False


def _is_own(file: str) -> bool:
    """Whether it is of kfcomm, or of Python's library, which both may use."""
    if file.startswith((_PACKAGE, "<frozen")):
        return True
    return file.startswith(_LIBRARY) and "site-packages" not in file
