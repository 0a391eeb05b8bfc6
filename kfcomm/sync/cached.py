"""Fast path of blocking verbs, for a name whose last call was alike: see ``collectives.compiled``.

The caller takes the engine lock, begins the operation itself and polls it to its end, without a handle.
"""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from kfcomm.collectives.compiled import NO_ARRAY, NOT_ALIKE
from kfcomm.collectives.specs import VerbSpec
from kfcomm.errors import KfcommError
from kfcomm.sync.signals import NUMBERS, getsignal

P = ParamSpec("P")
T = TypeVar("T")

# Parameters are written out for each verb: to find them among *args would cost each call what the fast path saves.
# Whatever is rarer is in **options, and takes the long form.
CALL = """\
def {verb}(self, /, {parameters}, **options):
    is_held = [*map(getsignal, NUMBERS)] != (signals := self._driver.signals).harmless and signals.hold()
    try:
        if {is_plain} and (compiled := self._inner._group.compiled.get(name)) is not None:
            outcome = self._driver.call(compiled.start, self._session, {x}, {arguments}, {out}, None)
            if outcome is not NOT_ALIKE:
                return outcome
        return long_form(self, {given}, **options)
    except KfcommError as error:
        raise self._driver.shown(error)
    finally:
        if is_held:
            signals.let_go()
"""
PARAMETERS = ("x", "root", "name", "op", "out")
"""Those that cached calls may give, in the order of the verbs' signatures."""


def cached(long_form: Callable[P, T], spec: VerbSpec) -> Callable[P, T]:
    """Return a blocking verb that takes the fast path where it can, and ``long_form`` otherwise."""
    found = inspect.signature(long_form).parameters
    takes = {name: found[name] for name in PARAMETERS if name in found}
    parameters = [f"{name}=defaults[{name!r}]" if name != "x" else name for name in takes]
    by_keyword = [name for name, one in takes.items() if one.kind is one.KEYWORD_ONLY]
    if by_keyword:
        parameters.insert(len(takes) - len(by_keyword), "*")
    arguments = [*(["op"] if spec.folds else ()), *(["type(root)", "root"] if spec.is_rooted else ())]
    source = CALL.format(
        verb=spec.verb,
        parameters=", ".join(parameters),
        is_plain="not options and type(x) is ndarray" if "x" in takes else "not options",
        x="x" if "x" in takes else "NO_ARRAY",
        arguments=f"(verb, {', '.join(arguments)})" if arguments else "only_verb",
        out="out" if "out" in takes else None,
        given=", ".join(f"{name}={name}" if name in by_keyword else name for name in takes),
    )
    names: dict[str, Any] = {
        "KfcommError": KfcommError, "NOT_ALIKE": NOT_ALIKE, "NO_ARRAY": NO_ARRAY, "long_form": long_form,
        "ndarray": np.ndarray, "defaults": {name: one.default for name, one in takes.items()}, "verb": spec.verb,
        "only_verb": (spec.verb,), "getsignal": getsignal, "NUMBERS": NUMBERS,
    }  # fmt: skip
    file = f"{__file__} {spec.verb}"  # begins as the files of this package do: tracebacks and dumps go by that
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # for tracebacks
    exec(compile(source, file, "exec"), names)
    return wraps(long_form)(names[spec.verb])
