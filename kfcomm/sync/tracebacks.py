"""Tracebacks that end at the caller's line: what a blocking verb does inside is no news to who called it wrongly.

An error of kfcomm loses the frames of this package, and what it was made of, unless code of somebody else took part in
that (an array that could not be read). ``KFCOMM_TRACEBACK=full`` keeps all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

import kfcomm
from kfcomm.errors import InternalError, KfcommError

if TYPE_CHECKING:
    from kfcomm.sync.driver import Driver


class Driven(Protocol):
    """What works by a driver."""

    _driver: Driver


E = TypeVar("E", bound=KfcommError)
S = TypeVar("S", bound=Driven)
T = TypeVar("T")
P = ParamSpec("P")

_PACKAGE = str(Path(kfcomm.__file__).parent)


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


def outermost(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """A method that callers call, of something with a driver: it holds signals, and shows errors as `Driver.shown`.

    What is called often has the same in its own lines.
    """

    @wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        is_held = self._driver.signals.hold()
        try:
            return method(self, *args, **kwargs)
        except KfcommError as error:
            raise self._driver.shown(error)
        finally:
            if is_held:
                self._driver.signals.let_go()

    return call


def _is_foreign(trace: TracebackType | None) -> bool:
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            return True
        trace = trace.tb_next
    return False
