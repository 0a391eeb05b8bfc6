"""Environments as after ``pip install kfcomm[...]``: other installed packages cannot be imported there.

``hiding`` makes a folder for the front of ``PYTHONPATH``. Hidden packages have neither modules nor metadata, as if they
had never been installed: in the process and in its child processes.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Collection, Iterable
from functools import cache
from importlib.metadata import Distribution, distributions, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
_TOOLS = {"pip", "setuptools", "wheel"}
"""Of every virtual environment."""

_SITE = '''"""Hides what is installed here and would not be there."""

import sys
from importlib.machinery import PathFinder

MODULES = frozenset({modules!r})
DISTRIBUTIONS = frozenset({distributions!r})


class Finder:
    """Finds on ``sys.path`` what is not hidden."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in MODULES else PathFinder.find_spec(name, path, target)

    @staticmethod
    def find_distributions(*args, **kwargs):
        for one in PathFinder.find_distributions(*args, **kwargs):
            if (one.name or "").lower().replace("_", "-").replace(".", "-") not in DISTRIBUTIONS:
                yield one

    invalidate_caches = PathFinder.invalidate_caches


sys.meta_path[:] = [Finder if one is PathFinder else one for one in sys.meta_path]
'''


def hiding(folder: Path, *wanted: str) -> Path:
    """A folder for ``PYTHONPATH``, below ``folder``, that hides all but kfcomm, and what these requirements bring."""
    modules, hidden = _hidden(frozenset(wanted))
    place = folder / "-".join([".site", *(re.sub(r"\W", "_", one) for one in sorted(wanted))])
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(
        _SITE.format(modules=sorted(modules), distributions=sorted(hidden)), "utf-8"
    )
    return place


@cache
def _hidden(wanted: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Modules and distributions."""
    shown = {*_TOOLS, *brought_by(["kfcomm", *wanted])}
    modules = {
        module for module, owners in packages_distributions().items() if not shown & {_plain(one) for one in owners}
    }
    hidden = {_plain(one.name) for one in distributions() if one.name} - shown
    return frozenset(modules - {"kfcomm"} - set(sys.stdlib_module_names)), frozenset(hidden)


def brought_by(requirements: Iterable[str]) -> set[str]:
    """Names of all distributions that are installed for the sake of these."""
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    left = [Requirement(one) for one in requirements]
    while left:
        requirement = left.pop()
        name = _plain(requirement.name)
        found.add(name)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            left += _needs(name, extra)
    return found


def _needs(name: str, extra: str) -> list[Requirement]:
    if name == "kfcomm":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        texts: Collection[str] = project["optional-dependencies"][extra] if extra else project["dependencies"]
        return [one for one in map(Requirement, texts) if one.marker is None or one.marker.evaluate()]
    distribution = _installed().get(name)
    every = [] if distribution is None else [Requirement(text) for text in distribution.requires or ()]
    return [one for one in every if one.marker is None or one.marker.evaluate({"extra": extra})]


@cache
def _installed() -> dict[str, Distribution]:
    return {_plain(one.name): one for one in distributions() if one.name}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
