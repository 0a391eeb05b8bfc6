"""Names of a package that are imported when they are first used (PEP 562).

A process pays for what it uses: the launcher not for the runtime, a rank not for policies that it does not have. A
package says its names twice, to type checkers by imports, to the interpreter by a table::

    if TYPE_CHECKING:
        from kfcomm.monitor.records import Statistics
    else:  # type checkers would take any name for one that is there
        __getattr__ = imported_when_used(__name__, {"Statistics": "kfcomm.monitor.records"})
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


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
