"""Imports on first use: names of a package that are imported when they are used (PEP 562), and optional packages.

A process pays for what it uses: the launcher not for the engine, a rank not for policies that it does not have. A
package says its names twice, to type checkers by imports, to the interpreter by a table::

    if TYPE_CHECKING:
        from kfcomm.monitor.statistics import Statistics
    else:  # type checkers would take any name for one that is there
        __getattr__ = imported_when_used(__name__, {"Statistics": "kfcomm.monitor.statistics"})
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Final


def imported_when_used(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """The ``__getattr__`` of a package.

    Args:
        package: its name.
        homes: the module that each name comes from; one that is called like the name is meant itself.
    """

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = import_module(homes[name])
        found = home if homes[name] == f"{package}.{name}" else getattr(home, name)
        setattr(sys.modules[package], name, found)
        return found

    return get


EXTRAS: Final = {
    "cryptography": "tls",
    "distributed": "dask",
    "jax": "jax",
    "matplotlib": "bench",
    "ml_dtypes": "bfloat16",
    "opentelemetry": "otel",
    "prometheus_client": "metrics",
    "ray": "ray",
    "scipy": "train",
    "torch": "torch",
    "xxhash": "checksum",
}
"""The extra of each package, by the name under which the package is imported."""


def lacking(what: str, package: str) -> str:
    """The text of an error: ``what`` was asked for, and ``package`` is not installed."""
    extra = EXTRAS.get(package)
    install = f'"kfcomm[{extra}]"' if extra else package
    return f"{what} needs the package {package}, which is not installed: pip install {install}"


def is_installed(package: str) -> bool:
    """Whether a package can be imported. Imports nothing."""
    return importlib.util.find_spec(package) is not None


def require(what: str, package: str) -> None:
    """Check that a package is installed. Imports nothing.

    Raises:
        ModuleNotFoundError: it is not installed; says how to install it.
    """
    if not is_installed(package):
        raise ModuleNotFoundError(lacking(what, package), name=package)
