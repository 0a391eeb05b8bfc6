"""An elastic job by Horovod's calls, and one process that does the same sums.

    python -m tests.frameworks.horovod_elastic --seeds 20 --first 100

runs jobs in which ranks are killed at random moments, also while others begin again, and others join and leave.

Each rank writes its model, and a log of all steps that led to it, to a file: epoch, learning rate and samples of each.
A step that is undone by a return to the last commit must not leave anything behind, so that one process that makes the
steps of the log comes to the same model.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch  # noqa: TID253  run where there is torch, by nothing else

import kfcomm.horovod.torch as hvd
from tests.launch.launched import environ

NONE_LEFT = "no rank is left to let others in"
LENGTH, BATCH, EPOCHS, RATE = 90, 4, 5, 0.02
INPUTS = torch.randn(LENGTH, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
OUTPUTS = torch.tanh(INPUTS @ torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))


def made() -> tuple[Any, Any, Any]:
    """A model, an optimizer and a scheduler."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.9)


def loss_of(model: Any, samples: Any) -> Any:
    return (model(INPUTS[samples])[:, 0] - OUTPUTS[samples]).square().mean()


def flat(model: Any) -> list[float]:
    return [x for one in model.parameters() for x in one.detach().reshape(-1).tolist()]


# ---------------------------------------------------------------- a rank


class Trainer:
    """Training of one rank, with the kills and sizes of a plan."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.sizes = {int(step): size for step, size in plan.get("sizes", {}).items()}
        self.comm: Any = hvd.communicator()
        self.uid = self.comm.births[self.comm.rank]
        torch.manual_seed(self.uid)
        self.model, optimizer, self.scheduler = made()
        self.optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=self.model.named_parameters())
        self.sampler = hvd.elastic.ElasticSampler(range(LENGTH), seed=plan["seed"])
        self.loader = torch.utils.data.DataLoader(torch.arange(LENGTH), batch_size=BATCH, sampler=self.sampler)
        self.state = hvd.elastic.TorchState(
            self.model, self.optimizer, scheduler=self.scheduler, sampler=self.sampler, epoch=0, step=0, size=2, log=[],
            first=[],
        )  # fmt: skip
        self.state.register_reset_callbacks([self.rescale])
        self.begun: list[list[Any]] = []

    def rescale(self) -> None:
        """Keep the learning rate in proportion to the number of ranks."""
        for group in self.optimizer.param_groups:
            group["lr"] *= hvd.size() / self.state.size
        self.state.size = hvd.size()

    def train(self, state: Any) -> str:
        """Train from where the state is."""
        self.begun.append([state.epoch, state.step, list(self.comm.births)])
        if not state.first:
            state.first = flat(self.model)
        for state.epoch in range(state.epoch, EPOCHS):  # noqa: B020  as Horovod's examples have it
            for number, mine in enumerate(self.loader):
                self.follow_plan()
                self.step(mine)
                self.sampler.record_batch(number, len(mine))
                state.step += 1
                time.sleep(self.plan.get("step_s", 0.0))
                if state.step % 3 == 0:
                    state.commit()
                elif state.step % 3 == 1:
                    state.check_host_updates()
            self.sampler.set_epoch(state.epoch + 1)
            if state.epoch + 1 < EPOCHS:
                state.epoch += 1
                state.commit()
        return "done"

    def follow_plan(self) -> None:
        """Die, or ask for another size, in this step."""
        state, sizes = self.state, self.sizes
        if self.plan.get("kills", {}).get(str(self.uid)) == state.step:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.comm.rank == 0 and state.step in sizes:
            self.comm.propose_size(sizes[state.step])
        while self.plan.get("waits") and hvd.size() != sizes.get(state.step, hvd.size()):
            state.check_host_updates()

    def step(self, mine: Any) -> None:
        """Make a step, and log it."""
        self.optimizer.zero_grad()
        loss_of(self.model, mine).backward()
        self.optimizer.step()
        rate = self.optimizer.param_groups[0]["lr"]
        self.scheduler.step()
        samples = hvd.allgather(mine, name="samples").reshape(hvd.size(), -1).tolist()
        self.state.log.append([self.state.epoch, rate, samples])


def main(folder: Path, plan: dict[str, Any]) -> None:
    """Train, be killed as ``plan`` says, and report."""
    torch.set_num_threads(1)
    hvd.init()
    trainer = Trainer(plan)
    after_s = plan.get("kill_after_s", {}).get(str(trainer.uid))
    if after_s is not None:
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    assert hvd.elastic.run(trainer.train)(trainer.state) == "done"
    state, births = trainer.state, list(trainer.comm.births)
    report = {"births": births, "model": flat(trainer.model), "log": state.log, "begun": trainer.begun}
    (folder / f"{trainer.uid}.json").write_text(json.dumps(report | {"first": state.first}))
    hvd.shutdown()


# ---------------------------------------------------------------- the job


def run(folder: Path, plan: dict[str, Any], *options: str) -> tuple[dict[int, Any], str]:
    """Reports of the ranks of a job, by uid, and its output."""
    program = [sys.executable, "-W", "error", "-m", __name__ if __name__ != "__main__" else __spec__.name]
    command = [sys.executable, "-m", "kfcomm", "run", *options, *program, "--folder", str(folder), json.dumps(plan)]
    done = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=300)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return {int(one.stem): json.loads(one.read_text()) for one in folder.glob("*.json")}, output


def check(reports: dict[int, Any]) -> None:
    """All ranks have one model, that of one process which makes the steps of the log; each sample is used once."""
    first, *others = reports.values()
    for one in others:
        assert one["model"] == first["model"]
        assert one["log"] == first["log"]
    model, optimizer, _ = made()
    torch.nn.utils.vector_to_parameters(torch.tensor(first["first"], dtype=torch.float64), model.parameters())
    used: list[collections.Counter[int]] = [collections.Counter() for _ in range(EPOCHS)]
    for epoch, rate, samples in first["log"]:
        used[epoch].update(index for row in samples for index in row)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        torch.stack([loss_of(model, row) for row in samples]).mean().backward()
        optimizer.step()
    np.testing.assert_allclose(first["model"], flat(model), rtol=1e-9, atol=1e-11)
    for counts in used:
        assert set(counts) == set(range(LENGTH)), f"not used: {set(range(LENGTH)) - set(counts)}"
        assert sum(counts.values()) - LENGTH <= 3, counts  # so many make the shares of four ranks equal
    assert [epoch for epoch, *_ in first["log"]] == sorted(epoch for epoch, *_ in first["log"])


def random_plan(seed: int) -> dict[str, Any]:
    """Kills at random moments, and sizes at random steps."""
    chosen = random.Random(seed)
    uids = chosen.sample(range(10), chosen.randint(1, 7))
    return {
        "seed": seed, "step_s": chosen.choice([0.0, 0.01, 0.03, 0.06]),
        "kill_after_s": {str(uid): chosen.uniform(0.0, chosen.choice([0.5, 4.0])) for uid in uids},
        "sizes": {str(chosen.randrange(60)): chosen.randint(2, 4) for _ in range(chosen.randint(0, 3))},
    }  # fmt: skip


def search(seeds: range) -> None:
    """Run a job for each seed; a job may end because too few ranks are left, and nothing else."""
    for seed in seeds:
        with tempfile.TemporaryDirectory() as name:
            plan = random_plan(seed)
            ranks = str(random.Random(seed).randint(2, 4))
            options = ("-n", ranks, "--elastic", "1:4", "--restart-limit", "20")
            try:
                reports, _ = run(Path(name), plan, *options)
                assert reports, "no rank has reported"
                check(reports)
            except AssertionError as error:
                sys.stderr.write(f"seed {seed}: {json.dumps(plan)}\n")
                if NONE_LEFT not in str(error):
                    raise
                continue
        sys.stderr.write(f"seed {seed}: {len(reports)} ranks\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.frameworks.horovod_elastic")
    parser.add_argument("--folder", type=Path, help="of reports: this process is a rank")
    parser.add_argument("--seeds", type=int, default=10, help="number of jobs")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("plan", nargs="?", default="{}")
    given = parser.parse_args()
    if given.folder:
        main(given.folder, json.loads(given.plan))
    else:
        search(range(given.first, given.first + given.seeds))
