"""Policies of an attachment decide at the end of ``optimizer.step()``; what they change holds from the next step on."""

from __future__ import annotations

from typing import Any

import pytest

import kfcomm.sync
import kfcomm.torch
from kfcomm import testing
from kfcomm.adapt import Free, Hyperparameters, Policy
from kfcomm.elastic import ElasticSampler
from kfcomm.errors import ConfigError
from kfcomm.train.policies import NoiseScaleBatch
from tests.frameworks.ranks import each, filled

torch = pytest.importorskip("torch")

nn = torch.nn

WIDTH, STEPS, SIZE = 4, 8, 2
DEFER = pytest.mark.parametrize("defer", [False, True], ids=["at once", "deferred"])


class Asks(Policy):
    """Asks for what a script says, after each step."""

    def __init__(self, script: dict[int, dict[str, Any]]) -> None:
        self._script = script
        self.seen: list[dict[str, Any]] = []

    def after_step(self, ctx: Any) -> None:
        self.seen.append({name: tuple(one) for name, one in ctx.metrics.observed.items()})
        for name, value in self._script.get(ctx.step, {}).items():
            getattr(ctx, f"set_{name}")(value)


def made() -> Any:
    return filled(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), 0)


def loss(model: Any, rank: int, step: int) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(3, WIDTH, generator=generator)
    return (model(x) - x).square().mean()


def close(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=2e-5, atol=2e-6)


@DEFER
def test_learning_rate_is_a_factor_beside_a_scheduler(defer: bool) -> None:
    # Asked for after step 2, in the table of step 3, in force from step 4 on.
    def rank(comm: Any) -> Any:
        model = made()
        optimizer = torch.optim.SGD(
            [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}], lr=0.05
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
        attached = kfcomm.torch.attach(
            model, optimizer, comm, policies=[Asks({2: {"learning_rate": 0.3}})], defer=defer
        )
        rates = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(model, comm.rank, step).backward()
            optimizer.step()
            rates.append([group["lr"] for group in optimizer.param_groups])
            scheduler.step()
        attached.wait()
        return list(model.parameters()), rates

    def alone() -> Any:
        model = made()
        optimizer = torch.optim.SGD(
            [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}], lr=0.05
        )
        for step in range(STEPS):
            factor = 0.5 ** (step // 3) * (3.0 if step >= 4 else 1.0)
            optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.1 * factor, 0.05 * factor
            optimizer.zero_grad()
            (sum(loss(model, rank, step) for rank in range(SIZE)) / SIZE).backward()
            optimizer.step()
        return list(model.parameters())

    for parameters, rates in each(rank, SIZE):
        close(parameters, alone())
        assert [one[0] for one in rates] == pytest.approx([0.1 * 0.5 ** (step // 3) for step in range(STEPS)])


def test_batch_of_policies_is_that_of_the_attachment_and_of_its_monitor() -> None:
    def rank(comm: Any) -> Any:
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        asks = Asks({1: {"batch_size": 20}})
        attached = kfcomm.torch.attach(
            model, optimizer, comm, policies=[asks], monitor={"every": 1}, batch_size=6
        )  # fmt: skip
        batches = []
        for step in range(STEPS):
            batches.append((attached.batch_size, attached.local_batch_size, attached.monitor.batch))
            optimizer.zero_grad()
            loss(model, comm.rank, step).backward()
            attached.observe(loss=comm.rank)
            optimizer.step()
        return batches, asks.seen, [(one.step, one.what) for one in attached.decisions]

    for batches, seen, decisions in each(rank, SIZE):
        assert batches == [(6, 3, 3)] * 3 + [(20, 10, 10)] * (STEPS - 3)
        assert all(one["loss"] == (0.0, 1.0) for one in seen)
        big = [one["big_batch"] for one in seen if "big_batch" in one]
        assert {size for sizes in big for size in sizes} == {6.0, 20.0}
        assert decisions == [(2, "batch size 6 -> 20")]


def test_wire_dtype_of_policies_is_that_of_the_gradients() -> None:
    def rank(comm: Any) -> Any:
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        kfcomm.torch.attach(model, optimizer, comm, policies=[Asks({1: {"wire_dtype": "bfloat16"}})])
        rounded = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(model, comm.rank, step).backward()
            gradient = model[0].weight.grad
            mean = torch.zeros_like(gradient)
            model_of_all = made()
            model_of_all.load_state_dict(model.state_dict())
            (sum(loss(model_of_all, one, step) for one in range(SIZE)) / SIZE).backward()
            mean = model_of_all[0].weight.grad
            rounded.append(bool(((gradient - mean).abs() > 1e-4 * mean.abs()).any()))
            optimizer.step()
        return rounded

    assert each(rank, SIZE) == [[False] * 3 + [True] * (STEPS - 3)] * SIZE


def test_algorithm_of_policies_is_used_from_the_next_forward_pass_on() -> None:
    def rank(comm: Any) -> Any:
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        names = Hyperparameters(agreements=("ssgd", "sma"))
        script = {1: {"agreement": "sma"}, 4: {"agreement": "ssgd"}}
        attached = kfcomm.torch.attach(model, optimizer, comm, policies=[Asks(script)], hyperparameters=names)
        used, equal = [], []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(model, comm.rank, step).backward()
            used.append(str(attached.algorithm))
            optimizer.step()
            weights = comm.all_gather(model[0].weight.detach().numpy().copy())
            equal.append(bool((weights[0] == weights[1]).all()))
        return used, equal

    for used, equal in each(rank, SIZE):
        assert used == ["ssgd"] * 3 + ["sma"] * 3 + ["ssgd"] * 2
        assert equal == [True] * 3 + [False] * 3 + [True] * 2


def test_noise_scale_policy_grows_the_batch_and_the_rate() -> None:
    def rank(comm: Any) -> Any:
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        attached = kfcomm.torch.attach(
            model, optimizer, comm, monitor={"every": 1}, policies=[NoiseScaleBatch(512)], batch_size=4
        )
        generator = torch.Generator().manual_seed(comm.rank)
        for _ in range(150):
            x = torch.randn(attached.local_batch_size, WIDTH, generator=generator)
            optimizer.zero_grad()
            (model(x) - torch.randn(x.shape, generator=generator)).square().mean().backward()
            optimizer.step()
        return attached.batch_size, [one.what for one in attached.decisions]

    first, second = each(rank, SIZE)
    assert first == second
    assert first[0] > 4


@pytest.mark.parametrize("is_detached", [True, False])
def test_attached_policies_end_with_the_attachment_or_the_communicator(is_detached: bool) -> None:
    ended = []

    class Ends(Policy):
        def on_end(self, ctx: Any) -> None:
            ended.append(ctx.step)

    def rank(comm: Any) -> None:
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        attached = kfcomm.torch.attach(model, optimizer, comm, policies=[Ends()])
        loss(model, comm.rank, 0).backward()
        optimizer.step()
        if is_detached:
            attached.detach()
        else:
            comm.close()

    each(rank, SIZE)
    assert ended == [1, 1]


def test_monitor_without_a_batch_is_refused() -> None:
    def rank(comm: Any) -> None:
        model = made()
        with pytest.raises(ConfigError, match="needs to know the batch"):
            kfcomm.torch.attach(model, torch.optim.SGD(model.parameters(), lr=0.05), comm, monitor=True)

    each(rank, SIZE)


def test_different_policies_of_ranks_are_refused() -> None:
    def rank(comm: Any) -> None:
        model = made()
        policies = [Asks({})] if comm.rank else []
        with pytest.raises(ConfigError, match="policies"):
            kfcomm.torch.attach(model, torch.optim.SGD(model.parameters(), lr=0.05), comm, policies=policies)

    each(rank, SIZE)


class Counts(Policy):
    """Counts steps, and says so."""

    def __init__(self) -> None:
        self.count = 0

    def after_step(self, ctx: Any) -> None:
        self.count += 1
        ctx.decide(f"{self.count} steps")

    def state_dict(self) -> Any:
        return self.count

    def load_state_dict(self, state: Any) -> None:
        self.count = state


def test_policies_and_decisions_outlive_the_steps_and_the_job(tmp_path: Any) -> None:
    """A second job resumes from the checkpoint of the first, with the count of its policy."""

    def rank(comm: Any, passes: int) -> list[str]:
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        elastic = {"sampler": ElasticSampler(24, batch=4), "checkpoint": tmp_path / "train.npz", "checkpoint_every": 1}
        attached = kfcomm.torch.attach(model, optimizer, comm, policies=[Counts()], elastic=elastic)
        for step in attached.steps(passes=passes):
            optimizer.zero_grad()
            loss(model, comm.rank, step.number).backward()
            optimizer.step()
        return [one.what for one in attached.decisions]

    with testing.sync_world(2, elastic=True) as comms:
        for found in testing.run_threads(list(comms), lambda comm: rank(comm, 1)):
            assert found == [f"{number} steps" for number in range(1, 7)]
    with testing.sync_world(1, elastic=True) as comms:
        found = testing.run_threads(list(comms), lambda comm: rank(comm, 3))[0]
    assert found[-1] == "18 steps"
    assert len(found) < 18  # the file may be some steps back, but is not from the beginning


class AsksFree(Policy):
    """Asks for values of free hyperparameters, and for the end."""

    def __init__(self, script: dict[int, tuple[str, Any]], last: int) -> None:
        self._script, self._last = script, last
        self.samples: list[int] = []

    def after_step(self, ctx: Any) -> None:
        self.samples.append(ctx.num_samples)
        if ctx.step in self._script:
            ctx.set(*self._script[ctx.step])
        if ctx.step == self._last:
            ctx.stop("enough")


def test_free_hyperparameters_are_options_of_the_optimizer_and_of_the_algorithm() -> None:
    def rank(comm: Any) -> Any:
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        free = {"momentum": Free(0.9, low=0.0, high=0.99), "alpha": Free(0.1, low=0.0, high=1.0)}
        asks = AsksFree({1: ("momentum", 0.5), 3: ("alpha", 0.4)}, 6)
        attached = kfcomm.torch.attach(
            model, optimizer, comm, algorithm="sma", policies=[asks], batch_size=6,
            hyperparameters=Hyperparameters(batch_size=6, free=free),
        )  # fmt: skip
        seen = []
        step = 0
        while not attached.is_over:
            optimizer.zero_grad()
            loss(model, comm.rank, step).backward()
            seen.append((optimizer.param_groups[0]["momentum"], attached.algorithm.options.get("alpha")))
            optimizer.step()
            step += 1
        return seen, asks.samples

    for seen, samples in each(rank, SIZE):
        assert seen == [(0.9, None)] * 3 + [(0.5, None)] * 2 + [(0.5, 0.4)] * 3
        assert samples == [6 * (number + 1) for number in range(len(seen))]
