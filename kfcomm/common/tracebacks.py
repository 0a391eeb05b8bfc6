"""Tracebacks that end at the caller's line, without the frames inside kfcomm.

An error of kfcomm loses the frames of this package and its cause, unless foreign code took part (an array that could
not be read). ``KFCOMM_TRACEBACK=full`` keeps everything.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from kfcomm.errors import InternalError, KfcommError

E = TypeVar("E", bound=KfcommError)

_PACKAGE = str(Path(__file__).parent.parent)
_LIBRARY = str(Path(os.__file__).parent)


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
