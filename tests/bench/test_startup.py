"""The bench of starting and ending: what it tells, not how long anything takes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench import startup


def test_a_job_tells_of_every_phase() -> None:
    figures = startup.job(2)
    phases = {"first rank's program", "NumPy imported", "joined", "first barrier", "closed", "ended"}
    assert set(figures) == {*phases, "whole", "processor time"}
    assert 0 < figures["first rank's program"] < figures["NumPy imported"] < figures["joined"] < figures["whole"]
    assert min(figures.values()) > 0


def test_another_command_is_run_and_its_failure_told() -> None:
    assert startup.run((sys.executable, "-c", "print('done')")).output == "done\n"
    with pytest.raises(subprocess.CalledProcessError):
        startup.run((sys.executable, "-c", "raise SystemExit(3)"))
