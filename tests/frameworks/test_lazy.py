"""Frameworks that are installed are still not imported before they are needed."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_importing_kfcomm_imports_no_framework(framework: str) -> None:
    assert find_spec(framework), f"{framework} has to be installed here"
    root = Path(__file__).parents[2]
    code = f"import sys, kfcomm; print({framework!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
