"""Outermost function of a blocking call: holds signals and shortens tracebacks."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

from kfcomm.errors import KfcommError

if TYPE_CHECKING:
    from kfcomm.sync.driver import Driver


class Driven(Protocol):
    """What works by a driver."""

    _driver: Driver


S = TypeVar("S", bound=Driven)
T = TypeVar("T")
P = ParamSpec("P")


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
