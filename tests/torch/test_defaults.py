"""``KFCOMM_TORCH_DEFAULT``: programs that do not name kfcomm run over it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
import torch, torch.distributed as dist

named = [] if sys.argv[1] == "nameless" else [sys.argv[1]]
dist.init_process_group(*named)
groups = {"world": dist.group.WORLD, "part": dist.new_group([0, 1]), "gloo": dist.new_group([0, 1], backend="gloo")}
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.ones(1, 2)).sum().backward()
for name, group in groups.items():
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2.0, 2.0]
    sys.stdout.write(f"{name} {dist.get_backend(group)}\\n")
# A group of Gloo that outlives its destruction, held by a model, may end its process by SIGABRT at exit.
del model, group
groups.clear()
dist.destroy_process_group()
"""


def backends(folder: Path, asked: str, **variables: str) -> dict[str, str]:
    """Backends of the groups that the program makes, on two ranks."""
    (folder / "program.py").write_text(PROGRAM)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)} | variables
    done = subprocess.run(
        [sys.executable, "-m", "kfcomm", "run", "-n", "2", sys.executable, "program.py", asked],
        env=env, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.partition("] ")[2].split(" ", 1) for line in done.stdout.splitlines()]
    assert len(lines) == 6
    return dict(lines)


def test_programs_that_look_for_gloo_find_it() -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "KFCOMM_TORCH_DEFAULT": "gloo"}
    program = "import torch.distributed as dist; print(dist.Backend.default_device_backend_map['cpu'])"
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "gloo\n"


@pytest.mark.parametrize(
    ("value", "asked", "expected"),
    [
        ("0", "kfcomm", ("kfcomm", "gloo")),
        ("1", "nameless", ("kfcomm", "gloo")),
        ("1", "gloo", ("gloo", "gloo")),
        ("gloo", "nameless", ("kfcomm", "kfcomm")),
        ("gloo", "gloo", ("kfcomm", "kfcomm")),
    ],
)
def test_backend_of_a_program_that_is_not_edited(
    value: str, asked: str, expected: tuple[str, str], tmp_path: Path
) -> None:
    found = backends(tmp_path, asked, KFCOMM_TORCH_DEFAULT=value)
    whole = found["world"].replace("undefined", expected[0])  # torch's word for groups without a name
    assert (whole, found["gloo"]) == expected


def test_unknown_value_is_refused_when_torch_is_imported() -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "KFCOMM_TORCH_DEFAULT": "yes"}
    done = subprocess.run([sys.executable, "-c", "import torch"], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "KFCOMM_TORCH_DEFAULT='yes' must be 1" in done.stderr
