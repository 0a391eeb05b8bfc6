"""Libraries over torch.distributed, and Ray's collectives: each by its own configuration, on a tiny model."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import kfcomm
import kfcomm.ray
from tests.torch.test_launching import ROOT, environment, finished

EXAMPLES = ROOT / "examples"
ACCURACY = r"accuracy (\d\.\d{3}) of 2 ranks(?:\n|, )backend kfcomm\b"


def accuracy(said: str) -> float:
    found = re.search(ACCURACY, said)
    assert found is not None, said
    return float(found[1])


def test_accelerate(tmp_path: Path) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = finished(*launch, str(EXAMPLES / "accelerate_train.py"), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert accuracy(done.stdout) > 0.9


def test_trainer_of_transformers(tmp_path: Path) -> None:
    """An unedited program, whose library knows Gloo alone: the same loss over either."""
    program = str(ROOT / "tests" / "torch" / "programs" / "trainer.py")
    losses = []
    for word, backend in (("", "gloo"), ("gloo", "kfcomm")):
        launch = (
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            program,
            str(tmp_path / backend),
        )
        done = finished(*launch, folder=tmp_path, KFCOMM_TORCH_DEFAULT=word)
        assert done.returncode == 0, done.stderr
        found = re.search(rf"backend {backend}, of 2 ranks, loss (\d\.\d+)", done.stdout)
        assert found is not None, done.stdout
        losses.append(found[1])
    assert losses[0] == losses[1]


def test_lightning(tmp_path: Path) -> None:
    """It starts the second process itself, at a port that it chooses."""
    done = finished(str(EXAMPLES / "lightning_train.py"), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert accuracy(done.stdout) > 0.9


def with_ray(example: str, folder: Path) -> str:
    """Output of the example, in a cluster of its own, whose sockets need a short path."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as short:
        env = environment(folder) | {"HOME": str(folder), "RAY_TMPDIR": short, "RAY_USAGE_STATS_ENABLED": "0"}
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / example)], env=env, cwd=folder, capture_output=True, text=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_ray_train(tmp_path: Path) -> None:
    assert accuracy(with_ray("ray_train.py", tmp_path)) > 0.9


def test_ray_collectives(tmp_path: Path) -> None:
    said = with_ray("ray_collective.py", tmp_path)
    assert "rank 0: [3.0, 1.0, 2.0, 1.0]\nrank 1: [3.0, 1.0, 10.0, 1.0]\n" in said


def test_a_group_of_one_and_groups_that_are_not_there() -> None:
    import numpy as np
    from ray.util.collective import is_backend_available

    from kfcomm.ray.group import NAME, RayGroup

    kfcomm.ray.register()
    kfcomm.ray.register()
    assert is_backend_available(NAME)
    with pytest.raises(kfcomm.ConfigError, match="in no group 'default' of backend kfcomm"):
        kfcomm.ray.communicator()
    group = RayGroup(1, 0, "alone")
    x = np.ones(2)
    group.allreduce([x])
    group.barrier()
    assert x.tolist() == [1.0, 1.0]
    group.destroy_group()
