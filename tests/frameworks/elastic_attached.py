"""An elastic job of attached models, one for each algorithm and optimizer, and one process that does the same sums.

The job is a program: ``python elastic_attached.py FOLDER PLAN``, where PLAN tells when ranks die, and how many there
are to be. Each rank writes what it has seen, and what it has come to, to a file of its own.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch  # noqa: TID253  run where there is torch, by nothing else

import kfcomm.sync
import kfcomm.torch
from kfcomm.elastic import Elastic, ElasticSampler, PerRank, State
from kfcomm.elastic.sampler import share
from kfcomm.train import Algorithm

if __name__ == "__main__":  # in the tests' own process it would hold for all of them
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)

LENGTH, BATCH, WIDTH, PASSES = 96, 24, 4, 12
ALPHA, EVERY, AFTER = 0.2, 3, 30
KINDS = {
    "ssgd": Algorithm("ssgd"),
    "adasum": Algorithm("adasum"),
    "sma": Algorithm("sma", alpha=ALPHA),
    "ea-sgd": Algorithm("ea-sgd", alpha=ALPHA),
    "local-sgd": Algorithm("local-sgd", every=EVERY),
    "diloco": Algorithm("diloco", every=EVERY, lr=0.5, momentum=0.8),
    "adasgd": Algorithm("adasgd", alpha=ALPHA, after=AFTER),
    "local-adaalter": Algorithm("local-adaalter", every=EVERY),
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "plain": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
}
CASES = [
    (kind, optimizer)
    for kind in KINDS
    for optimizer in OPTIMIZERS
    if (kind == "local-adaalter") == (optimizer == "plain")
]


SWITCHED = {0: "sma", 2: "ssgd", 20: "diloco"}
"""By the step before which it begins; ranks join and die between."""
WRAPPED, SWITCHING = "wrapped", "switching"


class Net(torch.nn.Module):
    """Has buffers, a tied weight, and (but for AdaAlter) a parameter that it never uses."""

    def __init__(self, *, has_unused: bool = True) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        self.last = torch.nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        if has_unused:
            self.unused = torch.nn.Linear(2, 2)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for one in self.parameters():
                one.copy_(torch.randn(one.shape, generator=generator) / 2)

    def forward(self, x: Any) -> Any:
        return self.last(self.first(self.norm(x)).tanh())


def data() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(LENGTH, WIDTH, generator=generator), torch.randn(LENGTH, WIDTH, generator=generator)


def gradients(model: Any, indices: Any) -> None:
    x, y = data()
    model.zero_grad()
    (model(x[indices]) - y[indices]).square().mean().backward()


def values(model: Any) -> list[float]:
    tensors = [*model.parameters(), model.norm.running_mean, model.norm.running_var]
    return [float(number) for one in tensors for number in one.detach().reshape(-1)]


class Moments:
    """State of an Adam, for a `State` in which it differs between ranks, whose groups must not be averaged."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        found = self._optimizer.state_dict()["state"]
        return {str(n): {**one, "step": int(one["step"])} for n, one in found.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        groups = self._optimizer.state_dict()["param_groups"]
        found = {int(n): {**one, "step": torch.tensor(float(one["step"]))} for n, one in state.items()}
        self._optimizer.load_state_dict({"state": found, "param_groups": groups})


# ---------------------------------------------------------------- the job


def main(folder: Path, plan: dict[str, Any]) -> None:
    OPTIMIZERS["adam"](Net())  # torch imports its compiler with the first optimizer: before the others wait for it
    with kfcomm.sync.init(elastic=True) as comm:
        me = comm.births[comm.rank]
        held: dict[str, tuple[Any, Any, Any]] = {}
        for kind, optimizer in CASES:
            model = Net(has_unused=kind != "local-adaalter")
            chosen = OPTIMIZERS[optimizer](model)
            name = f"{kind} {optimizer}"
            attached = kfcomm.torch.attach(model, chosen, comm, name=name, algorithm=KINDS[kind])
            held[name] = model, chosen, attached
        states: dict[str, Any] = {f"of_{n}": one[2] for n, one in enumerate(held.values())}
        model = Net()
        chosen = OPTIMIZERS["adam"](model)
        switching = kfcomm.torch.attach(model, chosen, comm, name=SWITCHING, algorithm=KINDS[SWITCHED[0]])
        held[SWITCHING] = model, chosen, switching
        states[SWITCHING] = switching
        model = Net()
        chosen = kfcomm.torch.optimizers.sma(OPTIMIZERS["adam"](model), comm, ALPHA, name=WRAPPED)
        held[WRAPPED] = model, chosen, None
        states |= {"model": PerRank(model, "mean"), "moments": PerRank(Moments(chosen), "mean")}
        states["way"] = chosen.agreement
        log = []
        with Elastic(comm, State(**states), checkpoint=plan.get("checkpoint"), checkpoint_every=4) as elastic:
            for step in elastic.steps(ElasticSampler(LENGTH, BATCH), passes=PASSES):
                if step.number == 4 and comm.rank == 0 and plan["size"] != comm.size:
                    comm.propose_size(plan["size"])
                if plan["waits"] and 4 <= step.number < 24 and comm.size < plan["size"]:
                    time.sleep(0.2 * (step.number - 3))  # for those that are to join: 42 s, however busy the machine is
                if [me, step.number] in plan["kills"]:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step.number in SWITCHED and switching.algorithm != KINDS[SWITCHED[step.number]]:
                    switching.use(KINDS[SWITCHED[step.number]])
                for model, _, _ in held.values():
                    gradients(model, step.indices)
                for _, chosen, _ in held.values():
                    chosen.step()
                log.append([step.number, list(comm.births), step.batch.tolist()])
                if plan.get("stops") == step.number:
                    os._exit(0)
        found = {name: values(model) for name, (model, _, _) in held.items()}
        (folder / f"{me}.json").write_text(json.dumps({"log": log, "births": list(comm.births), "found": found}))


# ---------------------------------------------------------------- the same sums in one process


class Replica:
    """Model of one rank, with its optimizer."""

    def __init__(self, kind: str, optimizer: str) -> None:
        self.model = Net(has_unused=kind != "local-adaalter")
        self.optimizer = OPTIMIZERS[optimizer](self.model)

    @property
    def tensors(self) -> list[Any]:
        """Everything that the ranks merge when they change."""
        state = [one for p in self.model.parameters() for key, one in sorted(self.optimizer.state.get(p, {}).items())
                 if key != "step" and one is not None]  # fmt: skip
        return [*(one.detach() for one in self.model.parameters()), *self.buffers, *state]

    @property
    def buffers(self) -> list[Any]:
        return [self.model.norm.running_mean, self.model.norm.running_var]

    def parameters(self) -> Any:
        return torch.nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()

    def put(self, vector: Any) -> None:
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(vector, self.model.parameters())

    def gradient(self) -> list[Any]:
        return [None if one.grad is None else one.grad.clone() for one in self.model.parameters()]

    def put_gradient(self, found: Sequence[Any]) -> None:
        for one, gradient in zip(self.model.parameters(), found, strict=True):
            one.grad = gradient


class Simulation:
    """All ranks of one case. ``shares_gradients``: the models stay equal."""

    def __init__(self, kind: str, optimizer: str, uids: Sequence[int]) -> None:
        self.kind, self.optimizer = kind, optimizer
        self.replicas = {uid: Replica(kind, optimizer) for uid in uids}
        first = next(iter(self.replicas.values()))
        self.num_steps = 0
        self.is_shared = kind in ("ssgd", "adasum")
        self.kept = first.parameters()
        self.velocity = torch.zeros_like(self.kept)
        ones = [torch.ones_like(one) for one in first.model.parameters()]
        self.squares, self.own = ones, {uid: [one.clone() for one in ones] for uid in uids}
        self.num_local = 0

    def change(self, uids: Sequence[int]) -> None:
        """The ranks are these from now on."""
        having = [uid for uid in self.replicas if uid in uids]
        first = self.replicas[having[0]]
        if not self.is_shared:
            merged = [average(some) for some in zip(*(self.replicas[uid].tensors for uid in having), strict=True)]
            own = [average(some) for some in zip(*(self.own[uid] for uid in having), strict=True)]
            for one, mean in zip(first.tensors, merged, strict=True):
                one.copy_(mean)
            self.own = dict.fromkeys(having, own)
        self.replicas = {uid: self.replicas[uid] if self.is_shared and uid in having else copy.deepcopy(first)
                         for uid in uids}  # fmt: skip
        self.own = {uid: [one.clone() for one in self.own[having[0]]] for uid in uids}

    def switch(self, kind: str) -> None:
        """Continue by another algorithm, from the mean of the models."""
        living = list(self.replicas.values())
        mean = torch.stack([one.parameters() for one in living]).mean(0)
        if not self.is_shared:
            self._towards(living, mean, 1.0)
            for one in living[1:] if kind == "ssgd" else ():
                one.optimizer.load_state_dict(copy.deepcopy(living[0].optimizer.state_dict()))
        self.kind, self.is_shared = kind, kind == "ssgd"
        self.kept, self.velocity, self.num_steps = mean, torch.zeros_like(mean), 0

    def step(self, shares: dict[int, Any], given: Sequence[int]) -> None:
        """Make one step; ``given``: ranks that live to the end of it."""
        for uid in given:
            gradients(self.replicas[uid].model, shares[uid])
        living = [self.replicas[uid] for uid in given]
        self._exchange(living, given)
        for one in living:
            one.optimizer.step()

    def _exchange(self, living: Sequence[Replica], given: Sequence[int]) -> None:  # noqa: C901  a table
        self.num_steps += 1
        mean = torch.stack([one.parameters() for one in living]).mean(0)
        is_meeting = self.num_steps % EVERY == 0
        match self.kind:
            case "ssgd" | "adasum":
                combine = average if self.kind == "ssgd" else adasum
                self._share(living, combine)
                for one in living[1:]:
                    for own, other in zip(one.buffers, living[0].buffers, strict=True):
                        own.copy_(other)
            case "sma":
                self._towards(living, mean, ALPHA)
            case "ea-sgd":
                center = self.kept
                self._towards(living, center, ALPHA)
                self.kept = center + ALPHA * len(living) * (mean - center)
            case "local-sgd" if is_meeting:
                self._towards(living, mean, 1.0)
            case "diloco" if is_meeting:
                change = self.kept - mean
                self.velocity = 0.8 * self.velocity + change
                self.kept = self.kept - 0.5 * (change + 0.8 * self.velocity)
                self._towards(living, self.kept, 1.0)
            case "adasgd" if self.num_steps <= AFTER:
                self._towards(living, mean, ALPHA)
            case "adasgd":
                self._share(living, average)
                if not self.is_shared:
                    self.is_shared = True
                    self._towards(living, mean, 1.0)
                    for one in living[1:]:
                        one.optimizer.load_state_dict(copy.deepcopy(living[0].optimizer.state_dict()))
            case "local-adaalter":
                self._adaalter(living, given, mean, is_meeting=is_meeting)

    def _adaalter(self, living: Sequence[Replica], given: Sequence[int], mean: Any, *, is_meeting: bool) -> None:
        # The meeting is begun before this step's gradients are known, and uses what was there.
        before, told = [self.own[uid] for uid in given], self.num_local
        self.num_local += 1
        for uid, one in zip(given, living, strict=True):
            found = one.gradient()
            self.own[uid] = [own + g * g for own, g in zip(self.own[uid], found, strict=True)]
            one.put_gradient([g / (b + self.num_local) ** 0.5 for g, b in zip(found, self.squares, strict=True)])
        if is_meeting:
            self._towards(living, mean, 1.0)
            self.squares = [torch.stack(some).mean(0) for some in zip(*before, strict=True)]
            for place, uid in enumerate(given):
                added = [own - old for own, old in zip(self.own[uid], before[place], strict=True)]
                self.own[uid] = [b + more for b, more in zip(self.squares, added, strict=True)]
            self.num_local -= told

    def _towards(self, living: Sequence[Replica], goal: Any, alpha: float) -> None:
        for one in living:
            x = one.parameters()
            one.put(x + alpha * (goal - x))

    def _share(self, living: Sequence[Replica], combine: Callable[[Sequence[Any]], Any]) -> None:
        found = [combine(some) if some[0] is not None else None
                 for some in zip(*(one.gradient() for one in living), strict=True)]  # fmt: skip
        for one in living:
            one.put_gradient([None if g is None else g.clone() for g in found])


def average(some: Sequence[Any]) -> Any:
    return torch.stack(list(some)).mean(0)


def adasum(some: Sequence[Any]) -> Any:
    """(0, 1), (2, 3), ... are combined first, then pairs of pairs."""
    found = list(some)
    while len(found) > 1:
        pairs = [found[n : n + 2] for n in range(0, len(found), 2)]
        found = [pair[0] if len(pair) == 1 else combined(*pair) for pair in pairs]
    return found[0]


def combined(a: Any, b: Any) -> Any:
    dot, one, other = float((a * b).sum()), float((a * a).sum()), float((b * b).sum())
    return (1 - dot / (2 * one) if one else 1.0) * a + (1 - dot / (2 * other) if other else 1.0) * b


def simulated(
    kind: str, optimizer: str, log: Sequence[Any], last: Sequence[int], *, switches: dict[int, str] | None = None
) -> dict[int, list[float]]:
    """Results of the ranks at the end (``last``), by uid; ``log``: number, ranks and samples of each step."""
    simulation = Simulation(kind, optimizer, log[0][1])
    uids = log[0][1]
    for place, (number, now, batch) in enumerate(log):
        if now != uids:
            simulation.change(now)
            uids = now
        if number in (switches or {}) and number:
            simulation.switch((switches or {})[number])
        later = log[place + 1][1] if place + 1 < len(log) else last
        # A rank that is gone in the next step, by a number that is not the plan's, was killed in this one.
        given = [uid for uid in now if uid in later]
        shares = {uid: share(np.array(batch), rank, len(now)) for rank, uid in enumerate(now)}
        simulation.step(shares, given)
    return {uid: values(simulation.replicas[uid].model) for uid in last}


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
