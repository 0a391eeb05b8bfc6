"""Modules that a process imports: only those it uses. Counts, which are equal on any machine, not times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kfcomm

ROOT = Path(__file__).parents[1]

UNUSED = (
    "aiohttp",
    "click",
    "importlib.metadata",
    "kfcomm.adapt",
    "kfcomm.bench",
    "kfcomm.cli",
    "kfcomm.collectives.on_device.backed",
    "kfcomm.collectives.on_device.staged",
    "kfcomm.arrays.devices.cuda",
    "kfcomm.monitor.answers",
    "kfcomm.monitor.dashboard",
    "kfcomm.monitor.doctor",
    "kfcomm.monitor.findings",
    "kfcomm.launch",
    "kfcomm.monitor.metrics",
    "kfcomm.monitor.statistics",
    "kfcomm.monitor.timeline",
    "kfcomm.monitor.screen",
    "kfcomm.monitor.top",
    "kfcomm.probe",
    "kfcomm.simulate",
    "kfcomm.testing",
    "kfcomm.train",
    "tempfile",
    "uvloop",
)
"""What a rank that only communicates has no use for."""


def loaded(code: str, *, beyond: str = "import sys, numpy") -> set[str]:
    """The modules that a fresh interpreter loads for ``code`` when it has done ``beyond``."""
    whole = f"{beyond}\nbefore = set(sys.modules)\n{code}\nprint(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", whole], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def own(modules: set[str]) -> set[str]:
    return {name for name in modules if name.partition(".")[0] == "kfcomm"}


def unused(modules: set[str]) -> list[str]:
    return [room for room in UNUSED if any(name == room or name.startswith(f"{room}.") for name in modules)]


def test_importing_kfcomm_imports_no_room() -> None:
    modules = loaded("import kfcomm")
    assert own(modules) <= {
        "kfcomm",
        "kfcomm.errors",
        "kfcomm.common",
        "kfcomm.common.imports",
        "kfcomm.common.version",
        "kfcomm.types",
    }
    assert len(modules) <= 20


def test_importing_kfcomm_needs_no_numpy() -> None:
    assert "numpy" not in loaded("import kfcomm", beyond="import sys")


@pytest.mark.parametrize(
    "code",
    [
        (
            "import asyncio, kfcomm\n"
            "async def main():\n"
            "    async with kfcomm.init() as comm:\n"
            "        await comm.barrier()\n"
            "asyncio.run(main())"
        ),
        "import kfcomm\nwith kfcomm.sync.init() as comm: comm.barrier()",
    ],
    ids=["async", "sync"],
)
def test_a_rank_imports_what_it_uses(code: str) -> None:
    modules = loaded(code)
    assert unused(modules) == []
    assert not {"kfcomm.strategies.price", "kfcomm.strategies.paths", "kfcomm.simulate.incast"} & modules
    assert len(own(modules)) <= 135
    assert len(modules) <= 235


def test_every_public_name_is_there() -> None:
    names = set(kfcomm.__all__)
    assert names <= set(dir(kfcomm))
    modules = loaded(f"import kfcomm\nfor name in {sorted(names)}: getattr(kfcomm, name)")
    assert {"kfcomm.adapt", "kfcomm.world.communicator", "kfcomm.strategies", "kfcomm.sync"} <= modules


def test_a_name_means_the_same_whatever_was_imported_first() -> None:
    loaded(
        "import kfcomm.monitor.dumps, kfcomm.world.communicator, kfcomm.sync\nassert callable(kfcomm.dump), kfcomm.dump"
    )
    loaded("import kfcomm\nassert callable(kfcomm.dump), kfcomm.dump\nfrom kfcomm import dump, sync\nsync.Adaptation")


def test_other_names_are_not() -> None:
    for package in (kfcomm, kfcomm.sync, kfcomm.monitor):
        with pytest.raises(AttributeError, match=rf"module '{package.__name__}' has no attribute 'Comunicator'"):
            package.Comunicator  # noqa: B018


def test_a_rank_that_serves_no_store_imports_no_library_of_http() -> None:
    program = (
        "import sys, kfcomm\n"
        "with kfcomm.sync.init() as comm:\n"
        "    names = comm.gather_object(sorted(sys.modules))\n"
        "    if comm.rank == 0: print(*set().union(*names))"
    )
    command = (sys.executable, "-m", "kfcomm", "run", "-n", "2", sys.executable, "-c", program)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    modules = set(done.stdout.split())
    assert "kfcomm.rendezvous.client" in modules
    assert "http.client" not in modules
    assert unused(modules) == []


def test_the_launcher_imports_nothing_of_what_its_ranks_do() -> None:
    code = "from kfcomm.cli import main\ntry: main(['run', '-n', '1', 'true'])\nexcept SystemExit as end: print(end)"
    modules = loaded(code, beyond="import sys")
    assert "kfcomm.rendezvous.store" in modules
    assert not modules & {
        "numpy",
        "kfcomm.arrays",
        "kfcomm.world.communicator",
        "kfcomm.engine",
        "kfcomm.engine.session",
    }
    others = ("kfcomm.bench", "kfcomm.simulate", "kfcomm.probe", "kfcomm.monitor.dashboard", "kfcomm.launch.dashboard")
    assert not {name for name in modules if name.startswith(others)}


def test_the_library_of_http_is_imported_after_the_ranks_were_started() -> None:
    assert "aiohttp" not in loaded("import kfcomm.cli, kfcomm.launch.run")
