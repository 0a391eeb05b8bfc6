"""The torch examples as their reader starts them: real processes, and what they print."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.launched import ROOT, environ, finished

EXAMPLES = ROOT / "examples"
BOTH = pytest.mark.parametrize("name", ["torch_attach.py", "torch_cpu.py"])
LAST_LINE = r"accuracy (\d\.\d{3}); bit-identical on (\d) ranks"


def without_litter(folder: Path) -> dict[str, str]:
    """torch's optimizers make a folder for compiled code, even if they compile nothing."""
    return environ(TORCHINDUCTOR_CACHE_DIR=str(folder))


@BOTH
def test_replicas_learn_alike(name: str, tmp_path: Path) -> None:
    done = finished("run", "-n", "2", sys.executable, str(EXAMPLES / name), env=without_litter(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    *steps, last = [line for line in done.stdout.splitlines() if "bytes of gradients" not in line]
    assert [line.partition(":")[0] for line in steps] == ["[0] step 20", "[0] step 40", "[0] step 60"]
    found = re.fullmatch(r"\[0\] " + LAST_LINE, last)
    assert found is not None
    assert float(found[1]) > 0.9
    assert found[2] == "2"


@BOTH
def test_alone_it_is_a_world_of_one(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / name)]
    env = without_litter(tmp_path)
    done = subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].endswith("bit-identical on 1 ranks")
