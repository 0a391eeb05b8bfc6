"""Writer of ``verbs.pyi`` and ``members.pyi`` of ``kfcomm/sync``, the types of what is derived there.

``python -m tests.sync.stub`` writes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kfcomm.adapt.adaptation import Adaptation
from kfcomm.collectives.messages import Queue as AsyncQueue
from kfcomm.elastic.loop import Elastic
from kfcomm.sync import adaptation, elastic, members, verbs  # noqa: F401  the first two fill the members
from kfcomm.world.communicator import Communicator as Async

WIDTH = 120
MADE = "# Written by `python -m tests.sync.stub` from the signatures of the asyncio verbs: change those, and run it.\n"
VERBS = """\
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kfcomm.arrays.devices.routes import Choice
from kfcomm.collectives.messages import Queue as AsyncQueue
from kfcomm.collectives.messages import Tag
from kfcomm.monitor import Statistics
from kfcomm.probe import Probe
from kfcomm.strategies import AnyStrategy, StrategySpec
from kfcomm.sync.adapter import Adapter
from kfcomm.sync.handle import Handle, PersistentCollective
from kfcomm.transports.shm.heap import Array
from kfcomm.types import Layout, Op, Seconds
from kfcomm.world.communicator import Communicator as Async
"""
MEMBERS = """\
from typing import Any

from kfcomm.adapt import Decision, Hyperparameters, Policy, StepMetrics
from kfcomm.adapt.adaptation import Adaptation
from kfcomm.adapt.guarded import StepGuard
from kfcomm.elastic.loop import Elastic
from kfcomm.sync.adapter import Adapter
from kfcomm.sync.driver import Driver
"""


def texts() -> dict[Path, str]:
    """The files, and the content that each should have."""
    of_verbs = [
        *_of(verbs.BlockingVerbs, Async, "(Adapter[Async])"), *_of(verbs.Queue, AsyncQueue, "(Adapter[AsyncQueue])")
    ]  # fmt: skip
    of_members = [
        *_of(members.AdaptationMembers, Adaptation, "(Adapter[Adaptation])"),
        *_of(members.ElasticMembers, Elastic, "", "\n    _inner: Elastic\n    _driver: Driver\n"),
    ]
    return {
        Path(verbs.__file__).with_suffix(".pyi"): MADE + VERBS + "".join(of_verbs),
        Path(members.__file__).with_suffix(".pyi"): MADE + MEMBERS + "".join(of_members),
    }


def _of(cls: type, inner: type, base: str, attributes: str = "") -> Iterator[str]:
    yield f"\nclass {cls.__name__}{base}:\n"
    yield f'    """{cls.__doc__}"""\n{attributes}'
    for name in vars(cls):
        member = inspect.getattr_static(cls, name)
        if isinstance(member, property):
            getter: Any = inspect.getattr_static(inner, name).fget
            yield f"\n    @property\n    def {name}(self) -> {getter.__annotations__['return']}:\n"
            yield f'        """{(inspect.getdoc(getter) or "").partition(chr(10))[0]}"""\n'
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
    if kinds[0] is inspect.Parameter.POSITIONAL_ONLY:
        parameters.insert(1, "/")
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
        stars = "**" if one.kind is one.VAR_KEYWORD else ""
        yield f"{stars}{one.name}: {one.annotation}{default}"


def _value(default: Any) -> str:
    if isinstance(default, type):
        return f"np.{default.__name__}"
    return "Op.SUM" if str(default) == "sum" else repr(default)


if __name__ == "__main__":
    for file, content in texts().items():
        file.write_text(content)
