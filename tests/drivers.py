"""Drivers of jobs on other engines: functions of a module of programs, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.launch.launched import ROOT


def driven(module: str, name: str, folder: Path, **environ: str) -> tuple[Any, str]:
    """Answer of a program, ``python -m MODULE NAME FOLDER``, and its output. It fails if the program does."""
    marks = folder / "marks"
    marks.mkdir()
    said = output_of(["-m", module, name, str(marks)], folder, **environ)
    return json.loads((folder / "answer.json").read_text()), said


def output_of(program: list[str], folder: Path, **environ: str) -> str:
    """Output of a program of Python, whose home is the folder. It fails if the program does."""
    env = os.environ | {"HOME": str(folder), "PYTHONPATH": str(ROOT), **environ}
    command = [sys.executable, *program]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def drive(programs: dict[str, Any]) -> None:
    """Run the program that the command line names, and write its answer beside its folder."""
    name, marks = sys.argv[1], Path(sys.argv[2])
    marks.with_name("answer.json").write_text(json.dumps(programs[name](marks)))


def raised(run: Callable[[], Any]) -> tuple[str, Any, list[str], float]:
    """Kind, text and notes of an error (``none`` and the result, without one), and how long it took."""
    begun_s = time.monotonic()
    try:
        return "none", run(), [], 0
    except Exception as error:  # noqa: BLE001
        return type(error).__name__, str(error), getattr(error, "__notes__", []), time.monotonic() - begun_s
