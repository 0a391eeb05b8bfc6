"""Fast path of blocking verbs, for a name whose last call was alike: see ``collectives.compiled``.

The caller takes the engine lock, begins the operation itself and polls it to its end, without a handle.
"""

from __future__ import annotations

import asyncio
import inspect
import linecache
from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from kfcomm.collectives.compiled import NO_ARRAY, NOT_ALIKE
from kfcomm.collectives.handle import Handle as Inner
from kfcomm.collectives.handle import named
from kfcomm.collectives.specs import VerbSpec
from kfcomm.errors import KfcommError
from kfcomm.sync.handle import Handle
from kfcomm.sync.signals import NUMBERS, getsignal

if TYPE_CHECKING:
    from kfcomm.collectives.compiled import Compiled
    from kfcomm.collectives.specs import Arguments

P = ParamSpec("P")
T = TypeVar("T")

# Parameters are written out for each verb: to find them among *args would cost each call what the fast path saves.
# Whatever is rarer is in **options, and takes the long form.
HEAD = """\
def {verb}(self, /, {parameters}, **options):
    is_held = [*map(getsignal, NUMBERS)] != (signals := self._driver.signals).harmless and signals.hold()
    try:
        if {is_plain} and (compiled := self._inner._group.compiled.get(name)) is not None:
"""
WAITS = """\
            outcome = self._driver.call(compiled.start, self._session, {x}, {arguments}, {out}, None)
            if outcome is not NOT_ALIKE:
                return outcome
"""
BEGINS = """\
            handle = Handle(self._driver, self._session)
            handle.verb = verb
            begin = partial(again, self._io.loop, compiled, {x}, {arguments}, {out})
            if self._driver.run(partial(handle.begin, begin), self._session):
                return handle
"""
TAIL = """\
        return long_form(self, {given}, **options)
    except KfcommError as error:
        raise self._driver.shown(error)
    finally:
        if is_held:
            signals.let_go()
"""
PARAMETERS = ("x", "root", "name", "op", "out")
"""Those that cached calls may give, in the order of the verbs' signatures."""


def again(loop: asyncio.AbstractEventLoop, compiled: Compiled, *call: *tuple[Any, Arguments, Any]) -> Inner[Any] | None:
    """Begin a call like the one before; None, and nothing begun, if it is not."""
    inner: Inner[Any] = Inner(loop=loop)
    operation = compiled.start(*call, inner)
    return None if operation is None else named(inner, operation)


def cached(long_form: Callable[P, T], spec: VerbSpec, *, is_awaited: bool) -> Callable[P, T]:
    """Return a form of a verb that takes the fast path where it can, and ``long_form`` otherwise.

    It waits for the result if that ``is_awaited``, else it returns a handle.
    """
    found = inspect.signature(long_form).parameters
    takes = {name: found[name] for name in PARAMETERS if name in found}
    parameters = [f"{name}=defaults[{name!r}]" if name != "x" else name for name in takes]
    by_keyword = [name for name, one in takes.items() if one.kind is one.KEYWORD_ONLY]
    if by_keyword:
        parameters.insert(len(takes) - len(by_keyword), "*")
    arguments = [*(["op"] if spec.folds else ()), *(["type(root)", "root"] if spec.is_rooted else ())]
    # a handle has the error of a name that cannot be one
    tests = [
        "not options",
        *(["type(x) is ndarray"] if "x" in takes else ()),
        *(() if is_awaited else ["type(name) is str"]),
    ]
    source = (HEAD + (WAITS if is_awaited else BEGINS) + TAIL).format(
        verb=long_form.__name__,
        parameters=", ".join(parameters),
        is_plain=" and ".join(tests),
        x="x" if "x" in takes else "NO_ARRAY",
        arguments=f"(verb, {', '.join(arguments)})" if arguments else "only_verb",
        out="out" if "out" in takes else None,
        given=", ".join(f"{name}={name}" if name in by_keyword else name for name in takes),
    )
    names: dict[str, Any] = {
        "Handle": Handle, "KfcommError": KfcommError, "NOT_ALIKE": NOT_ALIKE, "NO_ARRAY": NO_ARRAY,
        "NUMBERS": NUMBERS, "again": again, "defaults": {name: one.default for name, one in takes.items()},
        "getsignal": getsignal, "long_form": long_form, "ndarray": np.ndarray, "only_verb": (spec.verb,),
        "partial": partial, "verb": spec.verb,
    }  # fmt: skip
    file = f"{__file__} {long_form.__name__}"  # begins as those of this package do: tracebacks and dumps go by that
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # for tracebacks
    exec(compile(source, file, "exec"), names)
    return wraps(long_form)(names[long_form.__name__])
