"""Attached models of an elastic job come to what one process computes that makes the same changes of the ranks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kfcomm.torch
from kfcomm import testing
from kfcomm.elastic import ElasticSampler
from kfcomm.errors import ConfigError
from kfcomm.train import Algorithm
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


def made(width: int = 8) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 4))
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(0.1)
    return model


def trained(comm: Any, model: Any, algorithm: Any, elastic: Any, passes: int, before_step: Any = None) -> Any:
    """Numbers of the steps, and the model."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    attached = kfcomm.torch.attach(model, optimizer, comm, algorithm=algorithm, elastic=elastic)
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    numbers = []
    for step in attached.steps(passes=passes):
        if before_step is not None:
            before_step(comm, step.number)
        optimizer.zero_grad()
        (model(x[step.indices]) - x[step.indices]).square().mean().backward()
        optimizer.step()
        numbers.append(step.number)
    return numbers, torch.nn.utils.parameters_to_vector(model.parameters()).tolist(), str(attached.algorithm)


def test_checkpoint_continues_with_its_algorithm_on_another_number_of_ranks(tmp_path: Path) -> None:
    def part(comm: Any, algorithm: Any, passes: int) -> Any:
        elastic = {"sampler": ElasticSampler(96, 24), "checkpoint": tmp_path / "train.npz", "checkpoint_every": 2}
        return trained(comm, made(), algorithm, elastic, passes)

    diloco = Algorithm("diloco", every=2)
    for size, algorithm, passes in ((2, diloco, 3), (3, diloco, 5), (2, "ssgd", 7)):
        with testing.sync_world(size, elastic=True) as comms:
            found = testing.run_threads(list(comms), lambda comm: part(comm, algorithm, passes))  # noqa: B023
        assert {used for _, _, used in found} == {str(diloco)}, "the checkpoint's algorithm is the one in force"
        numbers = found[0][0]
        assert numbers[-1] == 4 * passes - 1
        assert (numbers[0] == 0) == (passes == 3), "the file may be some steps back, but is not from the beginning"


def test_joining_rank_with_another_model_is_refused_alone() -> None:
    with testing.sync_world(2, elastic=True, timeout=60) as comms:
        refused: list[str] = []
        done = threading.Event()

        def other() -> None:
            with pytest.raises(ConfigError) as caught, comms.join(9) as comm:
                trained(comm, made(9), "ssgd", ElasticSampler(96, 24), 1)
            refused.append(str(caught.value))
            done.set()

        def before_step(comm: Any, number: int) -> None:
            if comm.rank == 0 and number == 3:
                threading.Thread(target=other).start()
            if number == 60:
                done.wait()

        found = testing.run_threads(
            list(comms), lambda comm: trained(comm, made(), "ssgd", ElasticSampler(96, 24), 20, before_step)
        )
    assert found[0] == found[1]
    assert re.search(r"0\.weight is \(9, 4\) here and \(8, 4\) in the state", refused[0]), refused
