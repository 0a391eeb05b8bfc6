"""Smoke test of a wheel, in a clean environment for each Python that is here.

    python tests/smoke.py dist/kfcomm-0.2.0-py3-none-any.whl
    python tests/smoke.py WHEEL 3.12 /opt/python3.14/bin/python3

Run by ``make smoke``. Needs a package index. Versions that are not found are named, and are no failure.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
README = Path(__file__).parent.parent / "README.md"
TYPED = "import importlib.resources as r, kfcomm; assert r.files(kfcomm).joinpath('py.typed').is_file(); print('typed')"
HELLO = "[0] [2. 2. 2.] [3. 3. 3.]\n[1] [2. 2. 2.] [3. 3. 3.]\n"


def found(version: str) -> str | None:
    """The interpreter of a version such as 3.12: on the path, or one of pyenv's."""
    pyenv = os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")
    candidates = [shutil.which(f"python{version}"), *glob.glob(f"{pyenv}/versions/{version}*/bin/python3")]
    return next((one for one in candidates if one and is_version(one, version)), None)


def is_version(interpreter: str, version: str) -> bool:
    """Whether an interpreter starts, and has this version."""
    told = subprocess.run([interpreter, "--version"], capture_output=True, text=True)
    return told.returncode == 0 and told.stdout.startswith(f"Python {version}.")


def outputs(inside: Path, version: str) -> Iterator[tuple[Sequence[str], str]]:
    """Commands, and what their output contains."""
    python, kfcomm = str(inside / "python"), str(inside / "kfcomm")
    yield (kfcomm, "--version"), version
    yield (python, "-c", TYPED), "typed"
    yield (kfcomm, "run", "-n", "2", "python", "hello.py"), HELLO
    yield (kfcomm, "topology", "show", "ring", "-n", "4"), "ring"
    yield (kfcomm, "simulate", "--strategy", "ring", "--hosts", "4x1", "--size", "1MiB"), "GB/s"


def smoke(interpreter: str, wheel: Path, folder: Path) -> None:
    """Install the wheel in a new environment, and use it there.

    Raises:
        SystemExit: a command failed, or printed something else.
    """
    environ = {"HOME": str(folder), "PATH": f"{folder}/env/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
    environ |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    run([interpreter, "-m", "venv", "env"], folder, environ)
    run(["env/bin/python", "-m", "pip", "install", "-q", str(wheel)], folder, environ)
    block = re.search(r"<!-- file: hello.py -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    (folder / "hello.py").write_text(block[1] if block else "")
    for command, wanted in outputs(folder / "env" / "bin", wheel.name.split("-")[1]):
        # The ranks' lines come in any order.
        told = "".join(sorted(run(command, folder, environ).splitlines(keepends=True)))
        if wanted not in told:
            raise SystemExit(f"{' '.join(command)}: expected {wanted!r}, got:\n{told}")


def run(command: Sequence[str], folder: Path, environ: dict[str, str]) -> str:
    """Standard output of a command that succeeds."""
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def main(wheel: str, *wanted: str) -> None:
    """Run the command line."""
    for one in wanted or VERSIONS:
        interpreter = one if "/" in one else found(one)
        if interpreter is None:
            print(f"Python {one}: not on this machine", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            smoke(interpreter, Path(wheel).resolve(), Path(folder))
        print(f"Python {one}: passed ({interpreter})", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
