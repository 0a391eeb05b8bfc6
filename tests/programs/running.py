"""Runs programs in processes, under `kfcomm run`, and gathers what the ranks say."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.launch.launched import environ
from tests.programs.walker import Plan, Report, worst
from tests.programs.worker import PROGRESS, REPORT

LINE = re.compile(r"\[\d+\] (\w+) (.*)")
BUSY = "import os\nwhile os.getppid() == {parent}:\n    sum(range(100_000))\n"
"""It ends with the process that started it, however that ends."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How programs are run.

    Attributes:
        interface: ``blocking`` or ``async``.
        timeout_s: of every call; what hangs ends by it.
        debug: Python's development mode, and with it asyncio's debug mode.
        long: messages go as long ones do; see ``worker.all_are_long``.
        per_host: so many ranks take themselves for one host's, and the others for those of others; 0 for all.
    """

    ranks: int
    transport: str
    interface: str
    timeout_s: float = 60.0
    debug: bool = False
    long: bool = False
    per_host: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a world ended.

    Attributes:
        code: of `kfcomm run`.
        reports: what was wrong, without what followed from it.
        lines: all else that was written.
    """

    code: int
    reports: list[Report]
    lines: list[str]


def run_world(setting: Setting, plan: Plan, tell: Callable[[int], object] = lambda _: None) -> Outcome:
    """All programs of a plan in one world of processes; ``tell`` hears of each that begins."""
    reports, lines = [], []
    with subprocess.Popen(
        _command(setting, plan), env=environ(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            match = LINE.fullmatch(line.rstrip("\n"))
            if match and match[1] == PROGRESS:
                tell(int(match[2]))
            elif match and match[1] == REPORT:
                reports.append(Report(**json.loads(match[2])))
            else:
                lines.append(line.rstrip("\n"))
    return Outcome(process.returncode, worst(reports), lines)


def _command(setting: Setting, plan: Plan) -> list[str]:
    """With ``--keep-going``, so that each rank reports its results; waits for a rank that has left raise."""
    python = [sys.executable, *(["-X", "dev"] if setting.debug else []), "-W", "error"]
    launcher = [sys.executable, "-m", "kfcomm", "run", "-n", str(setting.ranks), "--transport", setting.transport]
    worker = ["-m", "tests.programs.worker", "--interface", setting.interface, "--timeout", str(setting.timeout_s)]
    worker += ["--long"] if setting.long else []
    worker += ["--per-host", str(setting.per_host)] if setting.per_host else []
    amount = ["--first", str(plan.first), "--programs", str(plan.count), "--calls", str(plan.calls)]
    return [*launcher, "--keep-going", *python, *worker, *amount]


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Background processes that use one processor each."""
    code = BUSY.format(parent=os.getpid())
    started = [subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()
