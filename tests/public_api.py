"""The public API as text: a line for each name with its parameters and defaults, each setting, each command's option.

``python -m tests.public_api`` records it in `tests/public_api_records`: a file for the package and one for each
framework that is installed. Tests compare the records with the code. Annotations are left out.
"""

from __future__ import annotations

import enum
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from kfcomm.cli import main
from kfcomm.rendezvous.settings import OTHER_VARIABLES, Arguments, Settings

FOLDER = Path(__file__).with_name("public_api_records")
MODULES = (
    "kfcomm", "kfcomm.adapt", "kfcomm.compression", "kfcomm.elastic", "kfcomm.errors", "kfcomm.monitor",
    "kfcomm.monitor.live", "kfcomm.probe", "kfcomm.simulate", "kfcomm.strategies",
    "kfcomm.strategies.base", "kfcomm.sync", "kfcomm.testing", "kfcomm.testing.pytest_plugin", "kfcomm.train",
    "kfcomm.train.policies", "kfcomm.types",
)  # fmt: skip
GIVEN = {
    "Attached", "AwaitedProcesses", "BlockingProcesses", "Communicator", "Context", "ElasticCommunicator", "FakeArray",
    "FakeMark", "FakeStream", "Handle", "Pending", "PersistentCollective", "Prober", "Queue", "SyncWorld", "TaskWorld",
    "ThreadWorld", "VirtualRun",
}  # fmt: skip
"""Classes whose instances users get, and do not make: their constructors are not public."""
PLAIN = (type(None), bool, int, float, str, bytes, tuple, enum.Enum)


FRAMEWORKS = {
    "torch": ("kfcomm.torch", "kfcomm.torch.optimizers", "kfcomm.horovod.torch", "kfcomm.horovod.elastic"),
    "jax": ("kfcomm.jax", "kfcomm.jax.optimizers"),
    "distributed": ("kfcomm.dask",),
    "ray": ("kfcomm.ray",),
}


def changes(name: str) -> dict[str, list[str]]:
    """Differences between the code and a record: ``package``, or one of `FRAMEWORKS`."""
    recorded, present = set(_file(name).read_text("utf-8").splitlines()), set(_lines(name))
    return {"gone": sorted(recorded - present), "new": sorted(present - recorded)}


def _file(name: str) -> Path:
    return FOLDER / f"{name}.txt"


def _lines(name: str) -> list[str]:
    found = {line for module in FRAMEWORKS.get(name, MODULES) for line in of_module(module)}
    if name == "package":
        found.update(of_settings(), of_command(main, "kfcomm"))
    return sorted(found)


def of_module(name: str) -> Iterator[str]:
    """Public names of a module: those in ``__all__``, or those that it defines."""
    module = importlib.import_module(name)
    public = getattr(module, "__all__", None)
    if public is None:
        defined = vars(module).items()
        public = [key for key, value in defined if key[0] != "_" and getattr(value, "__module__", name) == name]
        public = [key for key in public if not inspect.ismodule(vars(module)[key])]
    for key in public:
        value = getattr(module, key)
        title = f"{name}.{key}"
        if inspect.isclass(value):
            yield from of_class(title, value)
        elif callable(value) and hasattr(value, "__name__"):
            yield title + signature(value)
        else:
            yield title


def of_class(title: str, cls: type) -> Iterator[str]:
    """A class, its constructor, and what it has from classes of this package."""
    own = [one for one in cls.__mro__ if one.__module__.partition(".")[0] == "kfcomm"]
    bases = [one.__name__ for one in cls.__mro__[1:] if one.__module__ == "builtins" and one is not object]
    kind = "enum" if issubclass(cls, enum.Enum) else f"class {', '.join(bases)}".rstrip()
    is_made = cls.__name__ not in GIVEN and not issubclass(cls, enum.Enum | BaseException)
    is_made = is_made and any({"__init__", "__new__"} & vars(one).keys() for one in own)
    makes = signature(cls) if is_made else ""
    yield f"{title}: {kind}{makes}"
    names = {name for one in own for name in (*vars(one), *getattr(one, "__annotations__", ())) if name[0] != "_"}
    for name in names:
        value = inspect.getattr_static(cls, name, None)
        value = getattr(value, "__func__", value)  # of a classmethod or staticmethod
        yield f"{title}.{name}{signature(value) if inspect.isroutine(value) else ''}"


def signature(made: Any) -> str:
    """Parameters and defaults."""
    try:
        found = inspect.signature(made)
    except (TypeError, ValueError):
        return "(...)"
    empty = inspect.Parameter.empty
    shown = []
    for parameter in found.parameters.values():
        default = parameter.default if parameter.default is empty or isinstance(parameter.default, PLAIN) else ...
        shown.append(parameter.replace(annotation=empty, default=default))
    return str(found.replace(parameters=shown, return_annotation=inspect.Signature.empty)).replace("Ellipsis", "...")


def of_settings() -> Iterator[str]:
    """Arguments of ``init`` with the defaults that they have, and the other variables of the environment."""
    defaults = Settings._field_defaults
    for name in Arguments.__annotations__:
        default = defaults.get(name, defaults.get(f"{name}_s"))
        yield f"setting KFCOMM_{name.upper()} = {default!r}"
    for name in OTHER_VARIABLES:
        yield f"setting {name}"


def of_command(command: click.Command, title: str) -> Iterator[str]:
    """Commands with their options and arguments."""
    yield f"command {title}"
    for parameter in command.params:
        is_option = isinstance(parameter, click.Option)
        words = "/".join([*parameter.opts, *parameter.secondary_opts]) if is_option else parameter.human_readable_name
        yield f"command {title} {words}"
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from of_command(inner, f"{title} {name}")


if __name__ == "__main__":
    for each in ("package", *filter(importlib.util.find_spec, FRAMEWORKS)):
        _file(each).write_text("".join(f"{line}\n" for line in _lines(each)), "utf-8")
