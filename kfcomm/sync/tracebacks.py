"""Outermost function of a blocking call: holds signals and shortens tracebacks."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

from kfcomm.errors import KfcommError
from kfcomm.sync.signals import NUMBERS, getsignal

if TYPE_CHECKING:
    from kfcomm.sync.driver import Driver


class Driven(Protocol):
    """Object with a driver."""

    _driver: Driver


S = TypeVar("S", bound=Driven)
T = TypeVar("T")
P = ParamSpec("P")


def outermost(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Return a method that users call as one that holds signals, and raises errors as `Driver.shown` gives them.

    Hot paths have the same lines written out.
    """

    @wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        is_held = [*map(getsignal, NUMBERS)] != (signals := self._driver.signals).harmless and signals.hold()
        try:
            return method(self, *args, **kwargs)
        except KfcommError as error:
            raise self._driver.shown(error)
        finally:
            if is_held:
                signals.let_go()

    return call
