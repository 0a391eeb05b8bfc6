"""Injected faults in elastic training with torch, while ranks die and join.

python -m tests.search.guarded_elastic --seconds 60 --seed 1

A seed is one job. Some of its samples are bad for good: a rank that trains on one gets NaN. Some steps have a fault of
their own: infinity in the gradient of one rank, before which, or within its backward pass, that rank may die. A rank
may join. At the end all surviving ranks have the same model, to the bit, in which nothing is infinite; bad samples are
on the list, and the others were used once in each pass, but for those of a rank that died.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.search import driver
from tests.search.guarded import WIDTH, model_of, optimizer_of

LENGTH, BATCH, PASSES = 96, 12, 3
EQUAL = ("ssgd", "adasum")
"""Algorithms that exchange gradients in each step, so that models are equal."""


class Died(Exception):
    """This rank was killed: it does nothing more."""


@dataclass
class Job:
    """A job, drawn from its seed.

    Attributes:
        algorithm: name.
        optimizer: see `guarded`.
        bad: samples that are always wrong.
        faults: uid of the rank that has wrong gradients, by step.
        death: uid, step, and whether it comes within the backward pass; None for no death.
        joins_at: step in which rank 3 is started; None for never.
        compression: of gradients.
        restarts: whether a step in which a rank is lost is made again.
    """

    algorithm: str
    optimizer: str
    bad: tuple[int, ...]
    faults: dict[int, int]
    death: tuple[int, int, bool] | None
    joins_at: int | None
    compression: str | None
    restarts: bool

    @classmethod
    def drawn(cls, random: Random) -> Job:
        """A job."""
        algorithm = random.choice(["ssgd", "ssgd", "adasum", "sma", "diloco"])
        bad = tuple(random.sample(range(LENGTH), random.choice([0, 1, 2])))
        faults = {random.randrange(26): random.randrange(3) for _ in range(random.choice([2, 4, 8]))}
        death = (random.choice([1, 2]), random.randrange(2, 18), random.random() < 0.6)
        if random.random() < 0.5:  # the rank that dies has wrong gradients in that step
            faults[death[1]] = death[0]
        joins_at = random.randrange(3, 16) if random.random() < 0.4 else None
        optimizer = random.choice(["sgd", "adamw", "decaying"])
        death = death if random.random() < 0.7 else None
        compression = random.choice([None, "powersgd", "topk"]) if algorithm == "ssgd" else None
        restarts = random.random() < 0.4
        return cls(algorithm, optimizer, bad, faults, death, joins_at, compression, restarts)


class Ranks:
    """All ranks of a job, as threads."""

    def __init__(self, job: Job, comms: Any) -> None:
        import torch

        self.job, self.comms, self.torch = job, comms, torch
        self.threads: list[threading.Thread] = []
        self.joined: list[Any] = []
        generator = torch.Generator().manual_seed(11)
        self.x = torch.randn(LENGTH, WIDTH, generator=generator, dtype=torch.float64)
        for one in job.bad:
            self.x[one, one % WIDTH] = math.nan

    def main(self, comm: Any, uid: int) -> Any:
        """One rank: its model, what it has seen of each step, and its list."""
        import kfcomm.torch
        from kfcomm.adapt import GuardSteps
        from kfcomm.elastic import ElasticSampler
        from kfcomm.train import Algorithm

        torch = self.torch
        model = model_of(torch)
        optimizer = optimizer_of(torch, self.job.optimizer, model)
        sampler = ElasticSampler(LENGTH, BATCH, seed=5)
        options = {"every": 4} if self.job.algorithm == "diloco" else {}
        attached = kfcomm.torch.attach(
            model, optimizer, comm, algorithm=Algorithm(self.job.algorithm, **options),
            elastic={"sampler": sampler, "on_loss": "restart_step" if self.job.restarts else "finish"},
            compression=self.job.compression, policies=[GuardSteps(warmup=1000)], bucket_nbytes=200,
        )  # fmt: skip
        log = []
        try:
            for step in attached.steps(passes=PASSES):
                if uid == 0 and step.number == self.job.joins_at:
                    self._join()
                with step if self.job.restarts else contextlib.nullcontext():
                    optimizer.zero_grad()
                    x = self.x[step.indices]
                    if len(x) < 2:  # the last batch of a pass may be too small for batch norm
                        x = torch.cat([x, torch.eye(2, WIDTH, dtype=x.dtype)])
                    loss = (model(x) - x).square().mean()
                    attached.observe(loss=loss)
                    self._backward(model, loss, uid, step.number)
                    optimizer.step()
                    is_void = attached.last_void is not None
                    log.append((step.number, sampler.passes, step.batch.tolist(), is_void, tuple(comm.births)))
        except Died:
            return None
        state = {name: one.detach().clone() for name, one in model.state_dict().items()}
        return state, log, sampler.aside, [str(one) for one in attached.decisions]

    def _join(self) -> None:
        thread = threading.Thread(target=lambda: self.joined.append(self.main(self.comms.join(3), 3)))
        thread.start()
        self.threads.append(thread)

    def _backward(self, model: Any, loss: Any, uid: int, number: int) -> None:
        hooks = []
        if self.job.faults.get(number) == uid:
            hooks.append(model[-1].weight.register_hook(lambda gradient: gradient * math.inf))
        death = self.job.death
        if death is not None and death[:2] == (uid, number):
            if not death[2]:
                self._die(uid)
            hooks.append(model[0].weight.register_hook(lambda _: self._die(uid)))
        try:
            loss.backward()
        finally:  # a step in which a rank is lost raises, where it is made again
            for hook in hooks:
                hook.remove()

    def _die(self, uid: int) -> None:
        self.comms.kill(uid)
        raise Died


def once(random: Random) -> tuple[Job, int]:
    """Run one job; returns it, and how many steps were void.

    Raises:
        AssertionError: something is not as it has to be.
    """
    from kfcomm.testing import run_threads, sync_world

    job = Job.drawn(random)
    with sync_world(3, elastic=True) as comms:
        ranks = Ranks(job, comms)
        found = run_threads(list(comms), lambda comm: ranks.main(comm, comm.births[comm.rank]))
        for thread in ranks.threads:
            thread.join()
    ended = [one for one in (*found, *ranks.joined) if one is not None]
    check(job, ended)
    return job, sum(is_void for *_, is_void, _ in ended[0][1])


def check(job: Job, ended: Sequence[Any]) -> None:
    """Check what the ranks that have come to the end have."""
    state, log, aside, _ = ended[0]
    for name, one in state.items():
        assert bool(one.isfinite().all()), f"{name} is not finite: {job}"
    for other, _, others_aside, _ in ended[1:]:
        assert others_aside == aside, f"{aside} and {others_aside} are set aside: {job}"
        if job.algorithm in EQUAL:
            unequal = [name for name, one in state.items() if not bool((one == other[name]).all())]
            assert not unequal, f"{unequal} differ: {job}"
        assert all(bool(one.isfinite().all()) for one in other.values()), f"not finite: {job}"
    voids = {number for number, *_, is_void, _ in log if is_void}
    for number, uid in job.faults.items():
        births = next((births for step, *_, births in log if step == number), ())
        is_dead = job.death is not None and uid == job.death[0] and number >= job.death[1]
        assert number in voids or uid not in births or is_dead, f"the fault of step {number} was missed: {job}"
    assert set(job.bad) <= set(aside) or len(log) < 3, f"{aside} is set aside of {job.bad}: {job}"
    # Without an exchange in it, the step before a death is unfinished, too: its reports come with the next one.
    is_exact = job.death is None or (job.restarts and job.algorithm in EQUAL)
    last = () if is_exact or job.death is None else (job.death[1] - 1, job.death[1])
    lost = {one for step, _, batch, *_ in log if step in last for one in batch}
    for number in range(PASSES):
        used = Counter(one for _, passes, batch, is_void, _ in log if not is_void and passes == number for one in batch)
        for sample in range(LENGTH):
            most = 2 if sample in lost else 1
            assert used[sample] <= most, f"sample {sample} was used {used[sample]} times in pass {number}: {job}"
            is_listed = sample in aside
            assert used[sample] >= 1 or is_listed, f"sample {sample} was not used in pass {number}: {job}"


def case(seed: int) -> dict[str, int]:
    """Run the job of a seed; see `once`."""
    import torch

    torch.set_num_threads(1)
    return {"void steps": once(Random(seed))[1]}


if __name__ == "__main__":
    sys.exit(driver.run("guarded_elastic", case))
