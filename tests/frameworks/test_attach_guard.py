"""A step with wrong numbers on any rank leaves the models of all ranks as they were."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest

import kfcomm.sync
import kfcomm.torch
from kfcomm import testing
from kfcomm.adapt import GuardSteps
from kfcomm.elastic import ElasticSampler
from kfcomm.errors import ConfigError, GuardFailed
from tests.frameworks.ranks import each, filled

torch = pytest.importorskip("torch")

nn = torch.nn

WIDTH, STEPS, BAD = 4, 6, 3
ALGORITHMS = pytest.mark.parametrize("algorithm", ["ssgd", "sma"])


def made(seed: int = 0) -> Any:
    return filled(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)).double(), seed)


def data(rank: int, step: int) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(6, WIDTH, generator=generator, dtype=torch.float64)


def numbers(model: Any) -> dict[str, Any]:
    return {name: one.detach().clone() for name, one in model.state_dict().items()}


def train(comm: Any, steps: Any, damage: Callable[[Any, Any, int], Any], **options: Any) -> Any:
    """Train, with data that ``damage(x, rank, step)`` has changed; what is found at the end."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    attached = kfcomm.torch.attach(
        model, optimizer, comm, policies=[GuardSteps(warmup=2)], bucket_nbytes=200, **options
    )
    for step in steps:
        optimizer.zero_grad()
        x = damage(data(comm.rank, step), comm.rank, step)
        loss = (model(x) - x).square().mean()
        attached.observe(loss=loss)
        loss.backward()
        optimizer.step()
    attached.wait()
    state = {f"{number}/{key}": one for number, each in optimizer.state_dict()["state"].items()
             for key, one in each.items() if isinstance(one, torch.Tensor)}  # fmt: skip
    return numbers(model) | {name: one.clone() for name, one in state.items()}, attached.decisions


def with_nan(x: Any, rank: int, step: int) -> Any:
    if (rank, step) == (1, BAD):
        x[0, 0] = math.nan
    return x


@ALGORITHMS
def test_nan_in_inputs_of_one_rank_leaves_no_trace(algorithm: str) -> None:
    found = each(lambda comm: train(comm, range(STEPS), with_nan, algorithm=algorithm))
    wanted = each(
        lambda comm: train(comm, [one for one in range(STEPS) if one != BAD], lambda x, *_: x, algorithm=algorithm)
    )
    for (model, decisions), (like, none) in zip(found, wanted, strict=True):
        assert model.keys() == like.keys()
        for name, one in model.items():
            assert torch.equal(one, like[name]), name
        assert [one.step for one in decisions] == [BAD]
        assert "rank 1" in decisions[0].what
        assert "in rank 1: 0.weight, 0.bias, 1.weight, 3 more" in decisions[0].what
        assert not none


# ---------------------------------------------------------------- actions


def guarded(comm: Any, guard: Any, bad: dict[int, float], count: int = 12, **options: Any) -> Any:
    """Train on shifted data of one rank in some steps; what each step has left."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    attached = kfcomm.torch.attach(model, optimizer, comm, policies=[guard], **options)
    seen = []
    for step in range(count):
        optimizer.zero_grad()
        x = data(comm.rank, step) * (bad.get(step, 1.0) if comm.rank == 1 else 1.0)
        loss = (model(x) - x).square().mean()
        loss.backward()
        attached.observe(loss=loss)
        before = numbers(model)["0.weight"]
        optimizer.step()
        seen.append((before, numbers(model)["0.weight"], attached.last_void))
    return seen, attached


def test_jump_of_one_rank_makes_the_step_void_and_names_rank_and_parameters() -> None:
    for seen, attached in each(lambda comm: guarded(comm, GuardSteps(warmup=3), {8: 1e6})):
        assert [step for step, (before, after, _) in enumerate(seen) if torch.equal(before, after)] == [8]
        void = seen[8][2]
        assert void is not None
        assert (void.ranks, void.is_finite) == ((1,), True)
        assert void.names == ("rank 1: 1.weight, 2.weight",)
        assert "rank 1" in str(attached.decisions[0])


def test_learning_rate_falls_after_a_void_step_and_returns() -> None:
    guard = GuardSteps(warmup=2, lower_rate=(0.5, 4))
    rates = []

    def rank(comm: Any) -> None:
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.08)
        kfcomm.torch.attach(model, optimizer, comm, policies=[guard if comm.rank == 0 else GuardSteps(
            warmup=2, lower_rate=(0.5, 4))])  # fmt: skip
        for step in range(10):
            optimizer.zero_grad()
            x = with_nan(data(comm.rank, step), comm.rank, step)
            (model(x) - x).square().mean().backward()
            before, gradient = model[2].weight.detach().clone(), model[2].weight.grad.clone()
            optimizer.step()
            if comm.rank == 0:
                rates.append(float(((before - model[2].weight.detach()) / gradient).nanmedian()))
            assert optimizer.param_groups[0]["lr"] == 0.08

    each(rank)
    assert rates == pytest.approx([0.08] * 3 + [math.nan] + [0.04, 0.05, 0.06, 0.07, 0.08, 0.08], nan_ok=True)


def test_void_steps_in_a_row_restore_the_state_that_was_kept() -> None:
    guard = {"warmup": 100, "roll_back_after": 3, "keep_every": 4, "set_aside_after": None}
    bad = dict.fromkeys((6, 7, 8), math.nan)
    for seen, attached in each(lambda comm: guarded(comm, GuardSteps(**guard), bad)):
        kept = seen[4][1]  # after the good steps 0 to 4
        assert torch.equal(seen[8][1], kept)
        assert not torch.equal(seen[7][1], kept)
        assert not torch.equal(seen[9][1], kept)
        assert [one.step for one in attached.decisions] == [6, 7, 8, 8]


def test_step_that_a_scaler_leaves_out_is_no_offence() -> None:
    def rank(comm: Any) -> Any:
        model = made().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        attached = kfcomm.torch.attach(model, optimizer, comm, policies=[GuardSteps(warmup=2)])
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
        scales = []
        for step in range(30):
            optimizer.zero_grad()
            x = data(comm.rank, step).float() * (1e4 if comm.rank == 1 and step < 5 else 1.0)
            scaler.scale((model(x) - x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, attached.decisions, numbers(model)

    first, second = each(rank)
    assert first[0] == second[0]
    assert first[0][-1] < 2.0**120
    assert first[1] == second[1] == []
    assert all(torch.equal(one, second[2][name]) for name, one in first[2].items() if "running" not in name)


def test_scale_of_the_loss_is_no_jump() -> None:
    def rank(comm: Any) -> Any:
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        attached = kfcomm.torch.attach(model, optimizer, comm, policies=[GuardSteps(warmup=3)])
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_factor=1e6, growth_interval=5)
        for step in range(16):
            optimizer.zero_grad()
            scaler.scale((model(data(comm.rank, step)) - 1).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale(), attached.decisions

    assert each(rank) == [(pytest.approx(1e18), [])] * 2


def test_fault_that_stays_is_an_error_on_all_ranks() -> None:
    def rank(comm: Any) -> str:
        with pytest.raises(GuardFailed) as found:
            guarded(comm, GuardSteps(most_in_a_row=5, set_aside_after=None), dict.fromkeys(range(2, 40), math.nan), 40)
        return str(found.value)

    first, second = each(rank)
    assert first == second
    assert "rank 1" in first


def test_one_guard_is_enough() -> None:
    def rank(comm: Any) -> None:
        model = made()
        with pytest.raises(ConfigError, match="give one, which judges all steps"):
            kfcomm.torch.attach(
                model, torch.optim.SGD(model.parameters(), lr=0.1), comm, policies=[GuardSteps(), GuardSteps()]
            )

    each(rank)


def test_guarded_model_can_be_copied_and_saved() -> None:
    def rank(comm: Any) -> None:
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kfcomm.torch.attach(model, optimizer, comm, policies=[GuardSteps()])
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        for other in (copy.deepcopy(model), torch.load(saved, weights_only=False)):
            before = numbers(model)
            other(data(comm.rank, 0))
            assert not torch.equal(other[1].running_mean, before["1.running_mean"])
            assert all(torch.equal(one, before[name]) for name, one in numbers(model).items())

    each(rank)


def test_elastic_steps_return_to_the_state_that_was_kept_and_give_samples_again() -> None:
    def rank(comm: Any) -> Any:
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        guard = GuardSteps(warmup=1000, roll_back_after=3, keep_every=4, set_aside_after=None)
        sampler = ElasticSampler(96, 12)
        attached = kfcomm.torch.attach(model, optimizer, comm, elastic=sampler, policies=[guard])
        x = torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        seen, used = [], []
        for step in attached.steps(passes=1):
            seen.append((step.number, numbers(model)["0.weight"]))
            optimizer.zero_grad()
            bad = comm.rank == 1 and step.number in (6, 7, 8)
            loss = (model(x[step.indices] * (math.nan if bad else 1.0)) - x[step.indices]).square().mean()
            loss.backward()
            optimizer.step()
            if attached.last_void is None:
                used.append((step.number, step.batch.tolist()))
        return dict(seen), used, [one.what for one in attached.decisions]

    with testing.sync_world(2, elastic=True) as comms:
        for seen, used, decisions in testing.run_threads(list(comms), rank):
            assert torch.equal(seen[9], seen[5])  # kept at the end of step 4
            assert torch.equal(seen[8], seen[6])
            assert not torch.equal(seen[6], seen[5])
            assert sum("continues from" in one for one in decisions) == 1
            # Step 5 came after the kept state: its samples are used again.
            trained = [sample for number, batch in used if number != 5 for sample in batch]
            assert sorted(trained) == list(range(96))
