"""Models and optimizers for `attach_programs`, and what a program is drawn from."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 4


class Model(nn.Module):
    """Layers that are tied, checkpointed, used sometimes and never; buffers of both kinds, one of them a rank's own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.sometimes, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shift", torch.full((WIDTH,), 0.01 * seed))
        self.register_buffer("hidden", torch.full((WIDTH,), 0.02 * seed), persistent=False)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.double()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for one in self.parameters():
                one.copy_(torch.randn(one.shape, generator=generator, dtype=one.dtype) * 0.5)

    def forward(self, x: Any, *, branch: bool = False, how: bool | None = None) -> Any:
        if self.training:
            self.seen = x.detach().mean(dim=0)  # of this rank's rows
            self.calls += 1
        x = self.first(x + self.shift).tanh()
        if how is None:
            x = self.second(x).tanh()
        else:
            # the state of chance is of the process, and torch's lock on it is not made for ranks that are threads
            options = {"use_reentrant": how, "preserve_rng_state": False}
            x = checkpoint(lambda y: checkpoint(self.second, y, **options).tanh(), x, **options)
        if branch:
            x = self.sometimes(x).tanh()
        return self.last(x) * self.scale + self.hidden


class Counting(torch.optim.SGD):
    """Counts its steps, and has one of its own."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "counting": lambda model: Counting(model.parameters(), lr=0.05, momentum=0.5),
    "groups": lambda model: torch.optim.RMSprop(
        [
            {"params": [one for one in model.parameters() if one.dim() > 1], "lr": 0.003},
            {"params": [one for one in model.parameters() if one.dim() == 1], "momentum": 0.5},
        ]
    ),
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=3, line_search_fn="strong_wolfe"),
}

READS = ["read", "average_in", "written", "save", "load", "copied", "torch_saved", "evaluated"]
CLOSED = ["closed", "closed", "by_hand", "kept_gradients", "failed", *READS]
ACTS = [
    "plain", "plain", "plain", "zeroed_after", "accumulated", "gathered", "over_the_step", "retained", "discarded",
    "skipped", "clipped", "scaled", "not_finite", "penalty", "by_hand", "put", "replaced", "closed", "kept_gradients",
    "failed", "scheduled", "frozen", *READS,
]  # fmt: skip


@dataclass
class Settings:
    """Settings of a program, drawn from its seed.

    Attributes:
        size: number of ranks.
        optimizer: see ``OPTIMIZERS``.
        acts: names of methods of `Program`, and what each draws from.
        options: of ``attach``.
        is_watched: gradients are measured, and steps guarded, which finds nothing.
    """

    size: int
    optimizer: str
    acts: list[tuple[str, int]]
    options: dict[str, Any]
    is_watched: bool = False

    @classmethod
    def drawn(cls, seed: int) -> Settings:
        chance = random.Random(seed)
        optimizer = chance.choice(["sgd", "sgd", "adamw", "adamw", "counting", "groups", "lbfgs"])
        names = CLOSED if optimizer == "lbfgs" else ACTS
        acts = [(chance.choice(names), chance.randrange(1 << 30)) for _ in range(chance.randint(3, 14))]
        options = {"bucket_nbytes": chance.choice([1, 200, 1 << 20]), "defer": chance.random() < 0.5}
        # A guard makes steps void that the program makes with infinite gradients: those of such a loss, or those that a
        # scaler has left, to which others are added.
        done = {name for name, _ in acts}
        adds = "scaled" in done and bool(done & {"over_the_step", "zeroed_after"})
        is_watched = chance.random() < 0.5 and "not_finite" not in done and not adds
        return cls(chance.choice([2, 3]), optimizer, acts, options, is_watched)
