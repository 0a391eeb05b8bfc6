"""The JAX example as its reader starts it: real processes, and what they print."""

import re
import sys

from tests.launch.launched import ROOT, environ, finished

EXAMPLE = str(ROOT / "examples" / "jax_data_parallel.py")


def test_replicas_learn_alike() -> None:
    done = finished("run", "-n", "2", sys.executable, EXAMPLE, env=environ(JAX_PLATFORMS="cpu"))
    assert (done.returncode, done.stderr) == (0, "")
    *steps, last = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in steps] == [f"[0] step {number}" for number in (100, 200, 300)]
    found = re.fullmatch(r"\[0\] accuracy (\d\.\d{3}); bit-identical on 2 ranks", last)
    assert found is not None
    assert float(found[1]) > 0.9
