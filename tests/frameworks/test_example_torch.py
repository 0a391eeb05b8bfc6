"""The torch example as its reader starts it: real processes, and what they print."""

import re
import subprocess
import sys
from pathlib import Path

from tests.launch.launched import ROOT, environ, finished

EXAMPLE = str(ROOT / "examples" / "torch_cpu.py")
LAST_LINE = r"accuracy (\d\.\d{3}); bit-identical on (\d) ranks"


def without_litter(folder: Path) -> dict[str, str]:
    """torch's optimizers make a folder for compiled code, even if they compile nothing."""
    return environ(TORCHINDUCTOR_CACHE_DIR=str(folder))


def test_four_replicas_learn_alike(tmp_path: Path) -> None:
    done = finished("run", "-n", "4", sys.executable, EXAMPLE, env=without_litter(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    *steps, last = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in steps] == ["[0] step 20", "[0] step 40", "[0] step 60"]
    found = re.fullmatch(r"\[0\] " + LAST_LINE, last)
    assert found is not None
    assert float(found[1]) > 0.9
    assert found[2] == "4"


def test_alone_it_is_a_world_of_one(tmp_path: Path) -> None:
    env = without_litter(tmp_path)
    done = subprocess.run([sys.executable, EXAMPLE], env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].endswith("bit-identical on 1 ranks")
