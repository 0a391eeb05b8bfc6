"""Tracebacks that end at the caller's line: what kfcomm does inside is no news to who called it wrongly.

An error of kfcomm loses the frames of this package, and what it was made of, unless code of somebody else took part in
that (an array that could not be read). ``KFCOMM_TRACEBACK=full`` keeps all of it.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from kfcomm.errors import InternalError, KfcommError

E = TypeVar("E", bound=KfcommError)

_PACKAGE = str(Path(__file__).parent)
_LIBRARY = str(Path(os.__file__).parent)


def terse(error: E) -> E:
    """The same error, to be raised in the function that the caller has called. A defect of kfcomm keeps everything."""
    cause = error.__cause__ or error.__context__
    if cause is None or not _is_foreign(cause.__traceback__):
        return bare(error)
    return error if isinstance(error, InternalError) else error.with_traceback(None)


def bare(error: E) -> E:
    """As ``terse``, where no code of the caller's can have taken part, but libraries of ours."""
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
