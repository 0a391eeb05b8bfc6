"""Writer of ``kfcomm/sync/verbs.pyi``, the types of the derived blocking verbs: ``python -m tests.sync.stub``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kfcomm.collectives.messages import Queue as AsyncQueue
from kfcomm.sync import verbs
from kfcomm.world.communicator import Communicator as Async

FILE = Path(verbs.__file__).with_suffix(".pyi")
WIDTH = 120
HEAD = """\
# Written by `python -m tests.sync.stub` from the signatures of the asyncio verbs: change those, and run it.
from collections.abc import Mapping, Sequence
from typing import Any

from kfcomm.arrays.devices.routes import Choice
from kfcomm.collectives.messages import Queue as AsyncQueue
from kfcomm.collectives.messages import Tag
from kfcomm.probe import Probe
from kfcomm.strategies import AnyStrategy, StrategySpec
from kfcomm.sync.adapter import Adapter
from kfcomm.sync.handle import Handle, PersistentCollective
from kfcomm.types import Layout, Op, Seconds
from kfcomm.world.communicator import Communicator as Async
"""


def text() -> str:
    """Return the content that the file should have."""
    return HEAD + "".join([*_of(verbs.BlockingVerbs, Async), *_of(verbs.Queue, AsyncQueue)])


def _of(cls: type, inner: type) -> Iterator[str]:
    yield f"\nclass {cls.__name__}(Adapter[{'Async' if inner is Async else 'AsyncQueue'}]):\n"
    yield f'    """{cls.__doc__}"""\n'
    for name in vars(cls):
        member = inspect.getattr_static(cls, name)
        if isinstance(member, property):
            getter: Any = inspect.getattr_static(inner, name).fget
            yield f"\n    @property\n    def {name}(self) -> {getter.__annotations__['return']}:\n"
            yield f'        """{member.__doc__}"""\n'
        elif not name.startswith("_"):
            yield from _method(name, getattr(cls, name), inner)


def _method(name: str, form: Any, inner: type) -> Iterator[str]:
    verb = name.removesuffix("_async").removesuffix("_init")
    result = _result(getattr(inner, verb).__annotations__["return"])
    first = (inspect.getdoc(getattr(inner, verb)) or "").partition("\n")[0]
    if name.endswith("_init"):
        result, said = f"PersistentCollective[{result}]", f"Prepare {_a(verb)} ``{verb}``, to be started repeatedly."
    elif name.endswith("_async"):
        result, said = f"Handle[{result}]", f"Begin {_a(verb)} ``{verb}``."
    else:
        said = first
    parameters = ["self", *(str(one) for one in _plain(form))]
    kinds = [one.kind for one in inspect.signature(form).parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    line = f"    def {name}({', '.join(parameters)}) -> {result}:"
    if len(line) > WIDTH:
        line = "\n".join([f"    def {name}(", *(f"        {one}," for one in parameters), f"    ) -> {result}:"])
    yield f'\n{line}\n        """{said}"""\n'


def _a(verb: str) -> str:
    return "an" if verb[0] in "aeiou" else "a"


def _result(annotation: str) -> str:
    if annotation == "Steps":
        return "Any"
    return annotation.removeprefix("Handle[").removesuffix("]") if annotation.startswith("Handle[") else annotation


def _plain(form: Any) -> Iterator[str]:
    for one in list(inspect.signature(form).parameters.values())[1:]:
        default = "" if one.default is one.empty else f" = {_value(one.default)}"
        yield f"{one.name}: {one.annotation}{default}"


def _value(default: Any) -> str:
    return "Op.SUM" if str(default) == "sum" else repr(default)


if __name__ == "__main__":
    FILE.write_text(text())
