"""Training with guarded steps, into which wrong numbers, errors, losses and joins are injected.

    python -m tests.search.voided --count 60 --seed 1

Wrong data stay wrong until they are set aside; wrong gradients, losses and errors come once. Ranks die before, within
and after the exchange, and others join. Beside it one process simulates the steps that count with the data as they
should be: models are equal to 1e-9, and each sample is used once in each pass, or set aside.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from kfcomm.adapt import Adaptation, GuardSteps, Hyperparameters
from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.errors import EpochChanged, PeerLost
from kfcomm.testing import world
from tests.elastic.support import Died, die
from tests.search import driver

LENGTH, BATCH, PASSES, WARMUP = 240, 12, 2, 5
KINDS = ("nan", "inf", "-inf", "huge", "loss", "error")
RATE, MOMENTUM = 0.05, 0.5
USED = 1e-6
"""Scale of the marks of used samples, which travel with gradients and must not count in their norm."""


def data(seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Inputs and outputs of a linear model."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(LENGTH, 4))
    return x, x @ [1.0, -2.0, 3.0, 0.5] + 0.1 * rng.normal(size=LENGTH)


def gradients_of(w: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Sums over samples of the gradient, and their mean loss."""
    error = x @ w[:4] + w[4] - y
    return np.concatenate([x.T @ error, [error.sum()]]), float(np.mean(error**2)) if len(y) else None


@dataclass
class Round:
    """Injections of one job, and what they came to."""

    seed: int
    num_ranks: int
    wrong_samples: dict[int, float] = field(default_factory=dict)
    num_injections: int = 0
    num_void: int = 0
    num_lost: int = 0
    num_joined: int = 0

    def __post_init__(self) -> None:
        random = Random(f"samples {self.seed}")
        for sample in random.sample(range(LENGTH), random.choice([0, 1, 3])):
            self.wrong_samples[sample] = random.choice([math.nan, math.inf, -math.inf])
        self.num_injections += len(self.wrong_samples)
        self.p_wrong = random.choice([0.05, 0.1, 0.3])
        self.p_lost = random.choice([0.0, 0.01, 0.04])
        self.lower_rate = random.choice([None, (0.5, 10)])
        self.on_loss = random.choice(["finish", "raise", "restart_step"])
        self.keeps_policies = random.random() < 0.5
        self.joins_at = random.choice([None, 3, 20])

    def kind(self, step: int, uid: int) -> str | None:
        """Injection of one rank in one step, the same whenever it is asked for."""
        random = Random(f"{self.seed} {step} {uid}")
        # At times several ranks, or several steps in a row, are wrong at once.
        together = Random(f"{self.seed} {step // 2}").random() < 0.05
        if not together and random.random() >= self.p_wrong / self.num_ranks:
            return None
        kind = random.choice(KINDS)
        return "nan" if kind == "huge" and step < 2 * WARMUP + 40 else kind

    def dies(self, step: int, uid: int) -> str | None:
        """Place in the step at which a rank dies."""
        random = Random(f"loss {self.seed} {step} {uid}")
        return random.choice(["before", "within", "after"]) if random.random() < self.p_lost else None


class Rank:
    """One rank's program."""

    def __init__(self, comms: Any, comm: Any, given: Round, may_join: asyncio.Event) -> None:
        self.comms, self.comm, self.given, self.may_join = comms, comm, given, may_join
        self.uid: int = -1
        # By step: samples used, rate, and the model after it; of steps that count.
        self.trace: dict[int, tuple[Any, float, Any]] = {}
        self.state = State()
        self.aside: list[int] = []
        self.is_dead = False

    async def run(self) -> Rank:
        """Train to the end, or to this rank's death."""
        x, y = data(self.given.seed)
        self.x, self.y = x.copy(), y
        for sample, value in self.given.wrong_samples.items():
            self.x[sample, sample % 4] = value
        sampler = ElasticSampler(LENGTH, BATCH, seed=self.given.seed)
        guard = GuardSteps(
            warmup=WARMUP, set_aside_after=3, lower_rate=self.given.lower_rate, most_in_a_row=100,
        )  # fmt: skip
        self.uid = self.comm.births[self.comm.rank]
        parameters = Hyperparameters(batch_size=BATCH, learning_rate=RATE)
        adaptation = Adaptation(self.comm, [guard], hyperparameters=parameters)
        also = {"adaptation": adaptation} if self.given.keeps_policies else {}
        self.state = State(w=np.zeros(5), v=np.zeros(5), used=np.zeros(LENGTH), **also)
        try:
            async with Elastic(self.comm, self.state, on_loss=self.given.on_loss) as elastic, adaptation:
                async for step in elastic.steps(sampler, passes=PASSES, used_in="guarded"):
                    self.trace.pop(step.number, None)  # of a step that is repeated
                    restarts = self.given.on_loss == "restart_step"
                    with step if restarts else contextlib.suppress(EpochChanged, PeerLost):
                        await self._step(step, adaptation)
                    if step.number == self.given.joins_at and self.uid == 0:
                        self.may_join.set()
        except Died:
            self.is_dead = True
        self.aside = sampler.aside
        return self

    async def _step(self, step: Any, adaptation: Adaptation) -> None:
        number, given, state = adaptation.num_steps, self.given, self.state
        async with adaptation.step(step) as now:
            self._may_die("before", number)
            grads, loss = gradients_of(state.w, self.x[step.indices], self.y[step.indices])
            marks = np.zeros(LENGTH)
            marks[step.indices] = USED
            tree = {"w": grads, "used": marks}
            kind = given.kind(number, self.uid)
            given.num_injections += kind is not None
            loss = self._spoil(tree, kind, loss, number)
            exchange = asyncio.ensure_future(now.guarded(tree, loss=loss, op="sum"))
            if self._dies("within", number):
                await asyncio.sleep(0)
                exchange.cancel()
                die(self.comms, self.comm)
            found = await exchange
            used = found["used"] / USED
            count = round(used.sum())
            state.v = MOMENTUM * state.v + found["w"] / count
            rate = adaptation.learning_rate or 0.0
            state.w = state.w - rate * state.v
            state.used = state.used + used.round()
            self.trace[step.number] = used > 0.5, rate, state.w
            self._may_die("after", number)
        if now.is_void and self.comm.rank == 0:
            given.num_void += 1

    def _spoil(self, tree: dict[str, Any], kind: str | None, loss: Any, number: int) -> Any:
        random = Random(f"place {self.given.seed} {number} {self.uid}")
        match kind:
            case "nan" | "inf" | "-inf":
                name = random.choice(sorted(tree))
                tree[name][random.randrange(len(tree[name]))] = float(kind)
            case "huge":
                tree["w"][random.randrange(5)] = 1e12 * random.choice([-1, 1])
            case "loss":
                return random.choice([math.nan, math.inf])
            case "error":
                raise FloatingPointError("injected")
        return loss

    def _dies(self, place: str, number: int) -> bool:
        alive = self.comm.size - self.given.num_lost
        if alive <= 1 or self.uid == 0 or self.given.dies(number, self.uid) != place:
            return False
        self.given.num_lost += 1
        self.given.num_injections += 1
        return True

    def _may_die(self, place: str, number: int) -> None:
        if self._dies(place, number):
            die(self.comms, self.comm)


async def trained(given: Round) -> list[Rank]:
    """Train with all injections; the ranks that survive."""
    async with world(given.num_ranks, elastic=True) as comms:
        may_join = asyncio.Event()
        ranks = [Rank(comms, comm, given, may_join) for comm in comms]

        async def joining() -> Rank | None:
            if given.joins_at is None:
                return None
            await may_join.wait()
            rank = Rank(comms, await comms.join(9), given, may_join)
            given.num_joined += 1
            return await rank.run()

        found = await asyncio.gather(*(rank.run() for rank in ranks), joining())
    return [rank for rank in found if rank is not None and not rank.is_dead]


def check(given: Round, ranks: list[Rank]) -> None:
    """Compare the ranks with each other, and with a simulation."""
    first = ranks[0]
    for rank in ranks:
        assert np.array_equal(rank.state.w, first.state.w), given
        assert np.array_equal(rank.state.used, first.state.used), given
        assert rank.aside == first.aside, given
    assert np.isfinite(first.state.w).all(), given
    x, y = data(given.seed)
    w, v, total = np.zeros(5), np.zeros(5), np.zeros(LENGTH)
    for used, rate, model in first.trace.values():
        v = MOMENTUM * v + gradients_of(w, x[used], y[used])[0] / used.sum()
        w = w - rate * v
        total += used
        assert np.allclose(model, w, rtol=1e-9, atol=1e-9), (given, len(total))
    kept = np.ones(LENGTH, bool)
    kept[first.aside] = False
    assert set(given.wrong_samples) <= set(first.aside), given
    assert (total[list(given.wrong_samples)] == 0).all(), given
    assert (total[kept] == PASSES).all(), (given, np.flatnonzero(kept & (total != PASSES)), total)
    assert (total <= PASSES).all(), given


def once(seed: int) -> Round:
    """One job with all kinds of injections."""
    given = Round(seed, Random(f"ranks {seed}").choice([1, 2, 3, 4]))
    ranks = asyncio.run(asyncio.wait_for(trained(given), 300))
    check(given, ranks)
    return given


def case(seed: int) -> dict[str, int]:
    """Run the job of a seed."""
    found = once(seed)
    return {name: getattr(found, f"num_{name}") for name in ("injections", "void", "lost", "joined")}


if __name__ == "__main__":
    raise SystemExit(driver.run("voided", case))
