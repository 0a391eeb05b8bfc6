"""Attached models of an elastic job come to what one process computes that makes the same changes of the ranks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launch.launched import environ

torch = pytest.importorskip("torch")

from tests.frameworks import elastic_attached  # noqa: E402  after the check for torch

PROGRAM = Path(elastic_attached.__file__)


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    """Numbers of the simulation, as the job's programs have them."""
    before = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(before[0])
    torch.set_num_threads(before[1])


def run(folder: Path, plan: dict[str, Any], *options: str) -> dict[int, Any]:
    """Reports of the ranks of a job, by uid."""
    program = [sys.executable, str(PROGRAM), str(folder), json.dumps(plan)]
    command = [sys.executable, "-m", "kfcomm", "run", *options, *program]
    done = subprocess.run(command, cwd=folder, env=environ(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {int(one.stem): json.loads(one.read_text()) for one in folder.glob("*.json")}
    assert found, done.stdout + done.stderr
    return found


@pytest.mark.slow
def test_all_algorithms_over_joins_and_a_kill_equal_one_process(tmp_path: Path) -> None:
    plan = {"size": 4, "waits": True, "kills": [[2, 32]]}
    found = run(tmp_path, plan, "-n", "2", "--elastic", "2:4", "--restart-limit", "0")
    assert sorted(found) == [0, 1, 3]
    log = found[0]["log"]
    sizes = [len(births) for _, births, _ in log]
    assert (sizes[0], max(sizes), sizes[-1]) == (2, 4, 3)
    samples = np.concatenate([batch for _, _, batch in log])
    assert len(samples) > elastic_attached.LENGTH * elastic_attached.PASSES  # those of the killed rank, again
    last = found[0]["births"]
    switches = elastic_attached.SWITCHED
    cases: list[tuple[str, str, str, dict[int, str]]] = [
        (f"{kind} {optimizer}", kind, optimizer, {}) for kind, optimizer in elastic_attached.CASES
    ]
    cases += [
        (elastic_attached.WRAPPED, "sma", "adam", {}),
        (elastic_attached.SWITCHING, switches[0], "adam", switches),
    ]
    for name, kind, optimizer, switched in cases:
        wanted = elastic_attached.simulated(kind, optimizer, log, last, switches=switched)
        for uid in last:
            np.testing.assert_allclose(found[uid]["found"][name], wanted[uid], rtol=1e-12, atol=1e-12, err_msg=name)


LOSS = """
import json, os, signal, sys, time
from pathlib import Path
import numpy as np
import torch
import kfcomm, kfcomm.torch
from kfcomm.elastic import ElasticSampler

folder, told = Path(sys.argv[1]), json.loads(sys.argv[2])
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)  # imports that take long
with kfcomm.sync.init(elastic=True) as comm:
    me = comm.births[comm.rank]
    torch.manual_seed(me)
    # The gradients of the last layers have left when that of the first comes.
    width = 9 if me in told.get("others", ()) else 8
    model = torch.nn.Sequential(
        torch.nn.BatchNorm1d(4), torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 4)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options = {"sampler": ElasticSampler(96, batch=24), **told.get("elastic", {})}
    attached = kfcomm.torch.attach(
        model, optimizer, comm, bucket_nbytes=100, elastic=options, algorithm=told["algorithm"],
        compression=told.get("compression"),
    )
    (folder / f"attached-{me}").touch()
    number = 0
    def look(_):
        if [me, number] == told["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
    model[1].weight.register_hook(look)
    used = []
    for step in attached.steps(passes=told["passes"]):
        number = step.number
        if told.get("others") and number == 2 and comm.rank == 0:
            comm.propose_size(3)
        if told.get("others") and number > 2 and len(list(folder.glob("attached-*"))) < 3:
            time.sleep(0.2)  # a rank joins between two steps
        restarts = options.get("on_loss") == "restart_step"
        with step if restarts else torch.enable_grad():
            optimizer.zero_grad()
            (model(x[step.indices]) - x[step.indices]).square().mean().backward()
            optimizer.step()
        used.append([number, comm.size, step.batch.tolist(), bool(step.is_void)])
        if told.get("stops") == number:
            os._exit(0)
    values = [*model.parameters(), model[0].running_mean]
    out = {"used": used, "values": [float(n) for one in values for n in one.detach().reshape(-1)]}
    (folder / f"{me}.json").write_text(json.dumps(out))
"""


def trained(
    folder: Path, told: dict[str, Any], *options: str
) -> tuple[dict[int, Any], subprocess.CompletedProcess[str]]:
    (folder / "train.py").write_text(LOSS)
    program = [sys.executable, "train.py", str(folder), json.dumps(told)]
    command = [sys.executable, "-m", "kfcomm", "run", *options, *program]
    done = subprocess.run(command, cwd=folder, env=environ(), capture_output=True, text=True, timeout=300)
    return {int(one.stem): json.loads(one.read_text()) for one in folder.glob("*.json")}, done


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    "told",
    [
        {"algorithm": "ssgd"},
        {"algorithm": "adasum"},
        {"algorithm": "ssgd", "compression": "powersgd"},
        {"algorithm": "ssgd", "elastic": {"on_loss": "restart_step"}},
    ],
    ids=["ssgd", "adasum", "powersgd", "restart"],
)
def test_kill_amid_a_backward_pass_leaves_equal_models(tmp_path: Path, told: dict[str, Any], victim: int) -> None:
    found, done = trained(
        tmp_path, {**told, "kill": [victim, 6], "passes": 4}, "-n", "3", "--elastic", "2:3", "--restart-limit", "0"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(found) == sorted({0, 1, 2} - {victim})
    first, second = found.values()
    assert first == second  # bits too
    assert np.isfinite(first["values"]).all()
    counts = np.bincount(np.concatenate([batch for _, _, batch, is_void in first["used"] if not is_void]), minlength=96)
    # What the lost rank would have trained on is given again, at most once.
    assert set(counts) <= {4, 5}
    if "elastic" in told:
        assert set(counts) == {4}


@pytest.mark.slow
def test_checkpoint_continues_with_algorithm_and_optimizer_on_another_number_of_ranks(tmp_path: Path) -> None:
    elastic = {"checkpoint": str(tmp_path / "train.npz"), "checkpoint_every": 2}
    told = {"algorithm": "diloco", "kill": [], "passes": 6, "elastic": elastic}
    _, done = trained(tmp_path, {**told, "stops": 13}, "-n", "2")
    assert (tmp_path / "train.npz").exists(), done.stdout + done.stderr
    found, done = trained(tmp_path, told, "-n", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    first = found[0]["used"]
    assert 0 < first[0][0] <= 14
    assert first[-1][0] == 23
    # A rank that would begin with a state of another form says so.
    (tmp_path / "0.json").unlink()
    _, done = trained(tmp_path, {**told, "algorithm": "ssgd", "passes": 7}, "-n", "2")
    assert done.returncode == 0, done.stdout + done.stderr  # the checkpoint's algorithm is the one in force


@pytest.mark.slow
def test_joining_rank_with_another_model_is_refused_alone(tmp_path: Path) -> None:
    told = {"algorithm": "ssgd", "kill": [], "passes": 80, "others": [2]}
    found, done = trained(tmp_path, told, "-n", "2", "--elastic", "2:3", "--restart-limit", "0")
    text = done.stdout + done.stderr
    assert re.search(r"1\.weight is \(9, 4\) here and \(8, 4\) in the state", text), text
    assert sorted(found) == [0, 1], text
    assert found[0] == found[1]
