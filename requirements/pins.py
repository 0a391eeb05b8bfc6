"""Writes requirements/*.txt: what each use of the project needs, at the versions installed here.

Run by ``make pins`` in an environment that holds everything, so that the files agree with each other. They are
constraints (``pip install -c``): versions only, no hashes and no addresses, valid wherever a package comes from.
"""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

USES = {
    "core": (),
    "demo": ("demo",),
    "test": ("test",),
    "check": ("check",),
    "docs": ("docs",),
    "frameworks": ("bfloat16", "jax", "torch"),
}


def closure(name: str, extras: tuple[str, ...], found: dict[str, str]) -> dict[str, str]:
    """Adds to ``found`` the version of ``name`` and of all that it needs on this platform."""
    dist = distribution(name)
    found[canonicalize_name(name)] = Version(dist.version).public
    for line in dist.requires or ():
        need = Requirement(line)
        wanted = any(need.marker is None or need.marker.evaluate({"extra": extra}) for extra in ("", *extras))
        if wanted and (need.extras or canonicalize_name(need.name) not in found):
            closure(need.name, tuple(need.extras), found)
    return found


def main() -> None:
    """Writes one file for each use, the others without what core has already."""
    core: dict[str, str] = {}
    for use, extras in USES.items():
        pins = closure("kfcomm", extras, {})
        del pins["kfcomm"]
        core = core or pins
        own = pins if use == "core" else {name: pins[name] for name in pins.keys() - core.keys()}
        text = "".join(f"{name}=={version}\n" for name, version in sorted(own.items()))
        Path(__file__).with_name(f"{use}.txt").write_text("# Written by `make pins`.\n" + text)


if __name__ == "__main__":
    main()
