"""Injected faults in training with torch, whose models have to come out as if the void steps had not been.

python -m tests.search.guarded --seconds 60 --seed 1

A seed is one program: an algorithm, an optimizer, a kind of step, and options of attach. In some of its steps one or
more ranks get NaN, infinity or a huge value: in their inputs, in the gradient of one weight, or in the loss. The ranks
run it, and then only those of its steps that were not void, without a fault. Both have to end with the same bits.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.search import driver

STEPS = 24
WIDTH = 4
WARMUP = 4
HUGE_FROM = WARMUP + 2
"""Good steps after which a huge value is to be found: the guard knows what is usual after its warmup."""


@dataclass
class Fault:
    """A fault of one step.

    Attributes:
        kind: ``nan``, ``inf`` or ``huge``.
        where: ``inputs``, ``weight`` or ``loss``.
        ranks: that have it.
    """

    kind: str
    where: str
    ranks: tuple[int, ...]

    @property
    def value(self) -> float:
        """The wrong number."""
        return {"nan": math.nan, "inf": math.inf, "huge": 1e12}[self.kind]


@dataclass
class Case:
    """A program, drawn from its seed."""

    size: int
    algorithm: Any
    optimizer: str
    act: str
    observes: str
    options: dict[str, Any]
    faults: dict[int, Fault] = field(default_factory=dict)

    @property
    def is_scaled(self) -> bool:
        """Whether a ``GradScaler`` makes the steps."""
        return self.act == "scaled"

    @classmethod
    def drawn(cls, random: Random) -> Case:
        from kfcomm.train import Algorithm

        size = random.choice([2, 2, 3])
        named = {
            "ssgd": Algorithm("ssgd"), "adasum": Algorithm("adasum"), "sma": Algorithm("sma"),
            "ea-sgd": Algorithm("ea-sgd", alpha=0.1), "local-sgd": Algorithm("local-sgd", every=3),
            "diloco": Algorithm("diloco", every=4),
        }  # fmt: skip
        name = random.choice(["ssgd"] * 4 + list(named))
        optimizer = random.choice(["sgd", "adamw", "decaying", "lbfgs"])
        acts = ["plain", "plain", "gathered", "closed", "scaled"] + ["twice"] * (optimizer != "decaying")
        act = "closed" if optimizer == "lbfgs" else random.choice(acts)
        if act == "scaled" and name != "ssgd":
            act = "plain"  # a rank's own infinite gradients let only its own step update nothing
        options: dict[str, Any] = {"bucket_nbytes": random.choice([1, 200, 1 << 20])}
        if name == "ssgd":
            options["defer"] = random.random() < 0.4
            # With other scales of the loss, as after a step that a scaler leaves out, the errors of compressors differ.
            # A line search along gradients that are approximations leaves the model's range by itself.
            is_exact = act == "scaled" or optimizer == "lbfgs"
            kinds = [None, None, "bfloat16"] + ["powersgd", "topk"] * (not is_exact)
            options["compression"] = random.choice(kinds)
        case = cls(size, named[name], optimizer, act, random.choice(["before", "late", "never"]), options)
        for step in range(STEPS - 1):
            if random.random() < 0.4:
                case.faults[step] = case._fault(random, step - len(case.faults))
        return case

    def _fault(self, random: Random, num_good: int) -> Fault:
        kinds = ["nan", "inf"] + ["huge"] * (num_good >= HUGE_FROM and not self.is_scaled)
        kind = random.choice(kinds)
        where = random.choice(["inputs", "weight"] + ["loss"] * (kind != "huge"))
        several = random.random() < 0.2
        ranks = tuple(range(self.size)) if several and kind != "huge" else (random.randrange(self.size),)
        return Fault(kind, where, ranks)


class Run:
    """One run of a case, of one rank."""

    def __init__(self, case: Case, comm: Any) -> None:
        import torch

        import kfcomm.torch
        from kfcomm.adapt import GuardSteps

        self.case, self.comm, self.torch = case, comm, torch
        self.model = model_of(torch)
        self.optimizer = optimizer_of(torch, case.optimizer, self.model)
        self.attached = kfcomm.torch.attach(
            self.model, self.optimizer, comm, algorithm=case.algorithm,
            policies=[GuardSteps(warmup=WARMUP, set_aside_after=None)], **case.options,
        )  # fmt: skip
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=5)

    def train(self, steps: Iterable[int], *, faulty: bool) -> tuple[dict[str, Any], list[int]]:
        """The state at the end, and which of the steps were void."""
        voids = []
        for step in steps:
            fault = self.case.faults.get(step) if faulty else None
            mine = fault if fault is not None and self.comm.rank in fault.ranks else None
            before, self.is_void = self.scaler.get_scale(), False
            getattr(self, self.case.act)(step, mine)
            if self.is_void or self.attached.last_void is not None or self.scaler.get_scale() < before:
                voids.append(step)
        self.attached.wait()
        return self.state(), voids

    def state(self) -> dict[str, Any]:
        """Model and optimizer."""
        found = {name: one.detach().clone() for name, one in self.model.state_dict().items()}
        for number, of_one in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}/{key}": one.clone() for key, one in of_one.items() if hasattr(one, "clone")}
        return found

    def loss(self, step: int, fault: Fault | None, part: int = 0) -> Any:
        """Loss of a part of a step; its gradients have the fault when the pass is made."""
        torch = self.torch
        generator = torch.Generator().manual_seed(100_000 * part + 1000 * step + self.comm.rank)
        x = torch.randn(6, WIDTH, generator=generator, dtype=torch.float64)
        if fault is not None and fault.where == "inputs":
            x[step % 6, step % WIDTH] = fault.value
        found = (self.model(x) - x).square().mean()
        if fault is not None and fault.where == "loss":
            found = found * fault.value
        if self.case.observes == "before":
            self.attached.observe(loss=found)
        if fault is not None and fault.where == "weight":
            weight = self.model[-1].weight
            hook = weight.register_hook(lambda gradient: _wrong(gradient, fault.value))
            self._hooks = [hook]
        return found

    def backward(self, loss: Any) -> None:
        """Make the pass, and end its fault."""
        loss.backward()
        for hook in getattr(self, "_hooks", ()):
            hook.remove()
        if self.case.observes == "late":
            self.attached.observe(loss=loss)

    def plain(self, step: int, fault: Fault | None) -> None:
        self.optimizer.zero_grad()
        self.backward(self.loss(step, fault))
        self.optimizer.step()

    def gathered(self, step: int, fault: Fault | None) -> None:
        self.optimizer.zero_grad()
        first = step % 2 == 0
        with self.attached.no_sync():
            self.backward(self.loss(step, fault if first else None, part=1) / 2)
        self.backward(self.loss(step, None if first else fault) / 2)
        self.optimizer.step()

    def twice(self, step: int, fault: Fault | None) -> None:
        """Two exchanged passes, and two steps with their gradients."""
        self.optimizer.zero_grad()
        first = step % 2 == 0
        self.backward(self.loss(step, fault if first else None, part=1) / 2)
        self.backward(self.loss(step, None if first else fault) / 2)
        self.optimizer.step()
        self.is_void = self.attached.last_void is not None
        self.optimizer.step()

    def closed(self, step: int, fault: Fault | None) -> None:
        def closure() -> Any:
            self.optimizer.zero_grad()
            loss = self.loss(step, fault)
            self.backward(loss)
            return loss

        self.optimizer.step(closure)

    def scaled(self, step: int, fault: Fault | None) -> None:
        self.optimizer.zero_grad()
        self.backward(self.scaler.scale(self.loss(step, fault)))
        if step % 3 == 0:
            self.scaler.unscale_(self.optimizer)
            self.torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def _wrong(gradient: Any, value: float) -> Any:
    gradient = gradient.clone()
    gradient.view(-1)[1] = value
    return gradient


def model_of(torch: Any) -> Any:
    """A model with buffers, the same on all ranks."""
    nn = torch.nn
    model = nn.Sequential(
        nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, WIDTH)
    ).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(0.5 * torch.randn(one.shape, generator=generator, dtype=one.dtype))
    return model


def optimizer_of(torch: Any, name: str, model: Any) -> Any:
    """An optimizer by name."""

    class Decaying(torch.optim.SGD):  # type: ignore[misc]
        """Changes parameters without a gradient, too."""

        def step(self, closure: Any = None) -> Any:
            found = super().step(closure)
            with torch.no_grad():
                for group in self.param_groups:
                    for one in group["params"]:
                        one.mul_(0.999)
            return found

    match name:
        case "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        case "adamw":
            return torch.optim.AdamW(model.parameters(), lr=0.01)
        case "decaying":
            return Decaying(model.parameters(), lr=0.02, momentum=0.5)
        case _:
            return torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=2, line_search_fn="strong_wolfe")


def once(random: Random) -> tuple[Case, int]:
    """Run one case; returns it, and how many faults it had.

    Raises:
        AssertionError: a fault was not found, or has left a trace.
    """
    from kfcomm import testing

    case = Case.drawn(random)

    def ranks(steps: list[int], *, faulty: bool) -> list[Any]:
        with testing.sync_world(case.size) as comms:
            return testing.run_threads(comms, lambda comm: Run(case, comm).train(steps, faulty=faulty))

    found = ranks(list(range(STEPS)), faulty=True)
    voids = found[0][1]
    for _, of_rank in found:
        assert of_rank == voids, f"ranks found {voids} and {of_rank} void: {case}"
    missed = case.faults.keys() - set(voids)
    assert not missed, f"faults of steps {sorted(missed)} were not found: {case}"
    false = set(voids) - case.faults.keys()
    assert all(step > WARMUP for step in false), f"steps {sorted(false)} are void without a fault: {case}"
    wanted = ranks([step for step in range(STEPS) if step not in voids], faulty=False)
    for rank, ((state, _), (like, none)) in enumerate(zip(found, wanted, strict=True)):
        assert state.keys() == like.keys(), f"rank {rank} has {sorted(state.keys() ^ like.keys())}: {case}"
        for name, one in state.items():
            # The batch of a step that a scaler leaves out is in the statistics of batch norm, as in one process.
            is_kept = case.is_scaled and ("running" in name or "num_batches" in name)
            same = one.isfinite().all() if is_kept else (one == like[name]).all() if none == [] else True
            assert bool(same), f"{name} of rank {rank} differs: {case}"
    return case, len(case.faults)


def case(seed: int) -> dict[str, int]:
    """Run the program of a seed; see `once`."""
    import torch

    torch.set_num_threads(1)
    return {"faults": once(Random(seed))[1]}


if __name__ == "__main__":
    sys.exit(driver.run("guarded", case))
