"""Errors of handles used in place of their results: a forgotten ``await``, or ``wait()``.

Everything is defined on the class, so that a handle has no extra cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from kfcomm.core.collective import shown

OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "matmul": "@", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "divmod": "divmod()", "and": "&", "or": "|", "xor": "^",
}  # fmt: skip
"""Of two operands; as people write them."""
OTHERS = {
    "neg": "-", "pos": "+", "abs": "abs()", "invert": "~", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "int": "int()", "float": "float()", "complex": "complex()", "index": "an index",
    "round": "round()", "len": "len()", "iter": "iteration", "contains": "in", "getitem": "[]", "setitem": "[]",
    "array": "an array",
}  # fmt: skip
ATTRIBUTES = (
    "shape", "dtype", "ndim", "size", "nbytes", "T", "real", "imag", "device", "item", "tolist", "sum", "mean", "max",
    "min", "std", "any", "all", "norm", "numpy", "cpu", "to", "detach", "astype", "view", "reshape", "ravel", "flatten",
    "copy", "copy_", "add_", "mul_", "div_", "items", "keys", "values", "get", "decode",
)  # fmt: skip


class Unawaited:
    """Results' operators and attributes on a handle: raise TypeError or AttributeError, and name the remedy.

    A handle keeps its truth value, as every future does: programs write ``handle or other``, and pass handles to code
    that asks whether there is one.
    """

    __slots__ = ()

    def __bool__(self) -> bool:
        return True

    def __format__(self, spec: str) -> str:
        return _refused("a format")(self) if spec else str(self)

    def _remedy(self) -> str:
        """Text that says what to write instead."""
        return "await it first, y = await handle"


def _title(handle: Any) -> str:
    """Title of its call, as far as that is known: a finished call has no operation."""
    verb, name = getattr(handle, "verb", ""), ""
    series = getattr(getattr(handle, "operation", None), "series", None)
    if series is not None:
        verb, name = getattr(series.signature, "verb", ""), f" {shown(series.key.name)}"
    return f"the handle of {verb or 'a collective'}{name}"


def _refused(what: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"{what} needs a result, got {_title(self)}: {self._remedy()}")

    return refuse


class _Attribute:
    """An attribute of arrays and other results."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, handle: Any, owner: type) -> Any:
        if handle is None:
            return self
        text = f"{_title(handle)} has no {self._name!r}, but its result may: {handle._remedy()}"
        raise AttributeError(text, name=self._name, obj=handle)


for _name, _sign in OPERATORS.items():
    for _form in (_name, f"r{_name}", f"i{_name}"):
        setattr(Unawaited, f"__{_form}__", _refused(_sign))
for _name, _sign in OTHERS.items():
    setattr(Unawaited, f"__{_name}__", _refused(_sign))
for _name in ATTRIBUTES:
    setattr(Unawaited, _name, _Attribute(_name))
