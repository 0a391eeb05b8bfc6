"""Errors for missing optional packages name the command to install them."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kfcomm.common.imports import EXTRAS, is_installed, lacking, require
from tests.hiding import hiding
from tests.launch.launched import ROOT, environ

GROUPS = {"check", "demo", "dev", "docs", "mutants", "release", "search", "test"}
"""Extras for several packages, of the examples and of work on kfcomm."""
DEVICES = {"cuda12", "cuda13"}
"""Extras that errors about CuPy name."""

LACKING: dict[str, tuple[str, str]] = {
    "bfloat16": ("import kfcomm.arrays as a; a.dtype_of('bfloat16')", "bfloat16"),
    "wire_dtype": (
        "import kfcomm\nwith kfcomm.sync.init() as comm: comm.all_reduce([1.0], wire_dtype='bfloat16')",
        "bfloat16",
    ),
    "checksum": ("import kfcomm; kfcomm.sync.init(checksum=True)", "checksum"),
    "metrics": ("import kfcomm; kfcomm.sync.init(metrics_port=9400)", "metrics"),
    "fit": ("from kfcomm.train import Observation, Shape, fit; fit([Observation(Shape(1, 1, 1), 1.0)])", "train"),
    "Pollux": ("from kfcomm.train.policies import PolluxGoodput; PolluxGoodput(4)", "train"),
    "torch": ("import kfcomm.torch", "torch"),
    "torch, a name": ("from kfcomm.torch import attach", "torch"),
    "torch, a module": ("import kfcomm.torch.optimizers", "torch"),
    "jax": ("import kfcomm.jax", "jax"),
    "dask": ("import kfcomm.dask", "dask"),
    "ray": ("from kfcomm.ray import run", "ray"),
}
COMMANDS: dict[str, tuple[str, str]] = {
    "tls": ("tls make there", "tls"),
    "bench": ("bench -n 2 --sizes 4B --html x.html", "bench"),
    "timeline": ("timeline merge traces --otlp http://127.0.0.1:1", "otel"),
    "topologies": ("bench topologies -n 2 --sizes 4B --html x.html", "bench"),
    "simulate": ("simulate --strategy ring --hosts 2x1 --size 4B --html x.html", "bench"),
    "run with checksums": ("run -n 2 --checksum PYTHON -c 'import kfcomm; kfcomm.sync.init()'", "checksum"),
    "run with metrics": ("run -n 2 --metrics-port 9400 PYTHON -c 'import kfcomm; kfcomm.sync.init()'", "metrics"),
}
EXAMPLES: dict[str, str] = {
    "digits": "demo", "elastic": "demo", "adaptive_training": "demo", "torch_cpu": "torch", "torch_attach": "torch",
    "torch_ddp": "torch", "lightning_train": "torch", "accelerate_train": "torch", "ray_train": "torch",
    "jax_data_parallel": "jax",
}  # fmt: skip


def ended(program: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A program that finds no optional package, at its end."""
    env = environ(PYTHONPATH=f"{hiding(folder)}:{ROOT}")
    return subprocess.run(
        [sys.executable, *program], cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


@pytest.mark.parametrize("case", LACKING)
def test_an_error_names_the_extra(case: str, tmp_path: Path) -> None:
    program, extra = LACKING[case]
    done = ended(["-c", program], tmp_path)
    assert done.returncode == 1
    assert f'pip install "kfcomm[{extra}]"' in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("case", COMMANDS)
def test_a_command_names_the_extra(case: str, tmp_path: Path) -> None:
    command, extra = COMMANDS[case]
    command = command.replace("PYTHON", sys.executable)
    done = ended(["-c", f"import shlex; from kfcomm.cli import main; main(shlex.split({command!r}))"], tmp_path)
    assert done.returncode != 0
    assert f'pip install "kfcomm[{extra}]"' in done.stderr
    assert "Traceback" not in done.stderr or command.startswith("run")


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_names_the_extra(example: str, tmp_path: Path) -> None:
    done = ended([str(ROOT / "examples" / f"{example}.py")], tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f'pip install "kfcomm[{EXAMPLES[example]}]"' in line


def test_each_optional_package_has_its_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras: dict[str, Any] = project["optional-dependencies"]
    assert set(EXTRAS.values()) == extras.keys() - GROUPS - DEVICES
    for package, extra in EXTRAS.items():
        assert any(one.startswith(package.replace("_", "-")) for one in extras[extra]), package


def test_a_package_without_an_extra_is_installed_by_its_name() -> None:
    assert not is_installed("no_such_package")
    assert lacking("x", "no_such_package").endswith(": pip install no_such_package")
    with pytest.raises(ModuleNotFoundError, match="x needs the package no_such_package") as caught:
        require("x", "no_such_package")
    assert caught.value.name == "no_such_package"
