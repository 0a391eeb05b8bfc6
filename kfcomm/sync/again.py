"""The short way of blocking verbs, for a name whose last use was alike: see ``collectives.compiled``.

The caller takes the engine lock, begins the operation itself and looks until it is over: there is no handle. There is
one function for each list of parameters, since to find them among ``*args`` would cost what is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np

from kfcomm.collectives.compiled import NO_ARRAY, NOT_ALIKE
from kfcomm.errors import KfcommError
from kfcomm.sync.skin import Skin
from kfcomm.types import Op, Verb

P = ParamSpec("P")
T = TypeVar("T")
Form: TypeAlias = Callable[..., Any]


def again(long_form: Callable[P, T], verb: Verb) -> Callable[P, T]:
    """A blocking verb that takes the short way where it can, and else the long one."""
    return wraps(long_form)(FORMS.get(verb, _with_array)(long_form, verb))


def _with_op(long_form: Form, verb: Verb) -> Form:
    def call(
        self: Skin[Any], /, x: Any, name: str | None = None, *, op: str = Op.SUM, out: Any = None, **options: Any
    ) -> Any:
        is_held = self._io.signals.hold()
        try:
            if (
                not options
                and type(x) is np.ndarray
                and (compiled := self._inner._group.compiled.get(name)) is not None
            ):
                outcome = self._driver.call(compiled.start, self._session, x, (verb, op), out, None)
                if outcome is not NOT_ALIKE:
                    return outcome
            return long_form(self, x, name, op=op, out=out, **options)
        except KfcommError as error:
            raise self._driver.shown(error)
        finally:
            if is_held:
                self._io.signals.let_go()

    return call


def _with_op_and_root(long_form: Form, verb: Verb) -> Form:
    def call(
        self: Skin[Any], /, x: Any, root: int = 0, name: str | None = None, *, op: str = Op.SUM, out: Any = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        is_held = self._io.signals.hold()
        try:
            if (
                not options
                and type(x) is np.ndarray
                and (compiled := self._inner._group.compiled.get(name)) is not None
            ):
                outcome = self._driver.call(compiled.start, self._session, x, (verb, op, type(root), root), out, None)
                if outcome is not NOT_ALIKE:
                    return outcome
            return long_form(self, x, root, name, op=op, out=out, **options)
        except KfcommError as error:
            raise self._driver.shown(error)
        finally:
            if is_held:
                self._io.signals.let_go()

    return call


def _with_root(long_form: Form, verb: Verb) -> Form:
    def call(
        self: Skin[Any], /, x: Any, root: int = 0, name: str | None = None, *, out: Any = None, **options: Any
    ) -> Any:
        is_held = self._io.signals.hold()
        try:
            if (
                not options
                and type(x) is np.ndarray
                and (compiled := self._inner._group.compiled.get(name)) is not None
            ):
                outcome = self._driver.call(compiled.start, self._session, x, (verb, type(root), root), out, None)
                if outcome is not NOT_ALIKE:
                    return outcome
            return long_form(self, x, root, name, out=out, **options)
        except KfcommError as error:
            raise self._driver.shown(error)
        finally:
            if is_held:
                self._io.signals.let_go()

    return call


def _with_array(long_form: Form, verb: Verb) -> Form:
    arguments = (verb,)

    def call(self: Skin[Any], /, x: Any, name: str | None = None, *, out: Any = None, **options: Any) -> Any:
        is_held = self._io.signals.hold()
        try:
            if (
                not options
                and type(x) is np.ndarray
                and (compiled := self._inner._group.compiled.get(name)) is not None
            ):
                outcome = self._driver.call(compiled.start, self._session, x, arguments, out, None)
                if outcome is not NOT_ALIKE:
                    return outcome
            return long_form(self, x, name, out=out, **options)
        except KfcommError as error:
            raise self._driver.shown(error)
        finally:
            if is_held:
                self._io.signals.let_go()

    return call


def _without_array(long_form: Form, verb: Verb) -> Form:
    arguments = (verb,)

    def call(self: Skin[Any], /, name: str | None = None, **options: Any) -> Any:
        is_held = self._io.signals.hold()
        try:
            if not options and (compiled := self._inner._group.compiled.get(name)) is not None:
                outcome = self._driver.call(compiled.start, self._session, NO_ARRAY, arguments, None, None)
                if outcome is not NOT_ALIKE:
                    return outcome
            return long_form(self, name, **options)
        except KfcommError as error:
            raise self._driver.shown(error)
        finally:
            if is_held:
                self._io.signals.let_go()

    return call


FORMS: dict[Verb, Callable[[Form, Verb], Form]] = {
    Verb.ALL_REDUCE: _with_op,
    Verb.REDUCE_SCATTER: _with_op,
    Verb.REDUCE: _with_op_and_root,
    Verb.BROADCAST: _with_root,
    Verb.GATHER: _with_root,
    Verb.BARRIER: _without_array,
}
"""How to make the short form of a verb; that of others takes an array, a name and ``out``."""
