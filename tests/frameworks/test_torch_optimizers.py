"""Distributed optimizers of torch give the results of `kfcomm.train`, and keep their other features."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kfcomm import testing
from kfcomm.errors import CollectiveMismatch, ConfigError
from kfcomm.torch import optimizers
from kfcomm.train import (
    SMA,
    AdaSGD,
    Agreement,
    DiLoCo,
    ElasticAveraging,
    GradientMonitor,
    LocalAdaAlter,
    LocalSGD,
    SynchronousSGD,
)
from tests.frameworks.ranks import each

torch = pytest.importorskip("torch")

SIZE, STEPS, LR = 2, 6, 0.2


class Model(torch.nn.Module):
    """Two parameters, and a loss whose gradient is x minus the number of the rank and of the step."""

    def __init__(self, start: float = 1.0) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((3, 2), start))
        self.b = torch.nn.Parameter(torch.full((2,), -start))

    def forward(self, target: float) -> Any:
        return ((self.w - target) ** 2).sum() / 2 + ((self.b - target) ** 2).sum() / 2


def values(model: Any) -> Any:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()


WAYS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Agreement]]] = {
    "synchronous": (optimizers.synchronous_sgd, lambda comm, _: SynchronousSGD(comm)),
    "adasum": (
        lambda one, comm: optimizers.synchronous_sgd(one, comm, op="adasum"),
        lambda comm, _: SynchronousSGD(comm, op="adasum"),
    ),
    "sma": (lambda one, comm: optimizers.sma(one, comm, 0.3), lambda comm, _: SMA(comm, 0.3)),
    "elastic": (
        lambda one, comm: optimizers.elastic_averaging(one, comm, 0.2, every=2),
        lambda comm, tree: ElasticAveraging(comm, tree, 0.2, every=2),
    ),
    "adasgd": (
        lambda one, comm: optimizers.adasgd(one, comm, 0.3, after=3),
        lambda comm, _: AdaSGD(comm, 0.3, after=3),
    ),
    "local": (lambda one, comm: optimizers.local_sgd(one, comm, 3), lambda comm, _: LocalSGD(comm, 3)),
    "diloco": (
        lambda one, comm: optimizers.diloco(one, comm, every=2, lr=0.5),
        lambda comm, tree: DiLoCo(comm, tree, every=2, lr=0.5),
    ),
    "adaalter": (
        lambda one, comm: optimizers.local_adaalter(one, comm, 2),
        lambda comm, tree: LocalAdaAlter(comm, tree, 2),
    ),
}


def by_hand(comm: Any, make: Callable[[Any, Any], Agreement]) -> Any:
    """The loop of `kfcomm.train`, on NumPy's arrays."""
    model = {"w": np.full((3, 2), 1.0, np.float32), "b": np.full(2, -1.0, np.float32)}
    way = make(comm, model)
    for step in range(STEPS):
        pending = way.parameters(model)
        found = way.gradients({name: x - np.float32(comm.rank + step) for name, x in model.items()}).wait()
        model = {name: x - np.float32(LR) * found[name] for name, x in pending.wait().items()}
    return np.concatenate([model["w"].ravel(), model["b"]])


@pytest.mark.parametrize("is_closure", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_steps_are_those_of_the_loop(way: str, is_closure: bool) -> None:
    wrap, make = WAYS[way]

    def main(comm: Any) -> tuple[Any, Any]:
        model = Model(1.0 + comm.rank)  # all begin with rank 0's
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=LR), comm)
        for step in range(STEPS):

            def closure(step: int = step) -> Any:
                optimizer.zero_grad()
                loss = model(float(comm.rank + step))
                loss.backward()
                return loss

            if is_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        return values(model), by_hand(comm, make)

    found = each(main)
    for mine, wanted in found:
        np.testing.assert_allclose(mine, wanted, rtol=1e-5)
    assert not np.array_equal(found[0][0], Model()(0.0))


def test_pair_averaging_comes_to_a_consensus() -> None:
    def main(comm: Any) -> Any:
        model = Model()
        optimizer = optimizers.pair_averaging(torch.optim.SGD(model.parameters(), lr=0.0), comm, seed=1)
        with torch.no_grad():
            for one in model.parameters():
                one += comm.rank
        for _ in range(40):
            model(0.0).backward()
            optimizer.step()
        comm.barrier()
        return values(model)

    found = np.stack(each(main, 3))
    assert np.ptp(found, axis=0).max() < 0.2


def test_models_are_read_where_they_are_and_gradients_are_given_back_as_torch_has_them() -> None:
    def main(comm: Any) -> None:
        model = Model()
        before = {one.data_ptr() for one in model.parameters()}
        optimizer = optimizers.synchronous_sgd(torch.optim.SGD(model.parameters(), lr=LR), comm)
        model(float(comm.rank)).backward()
        optimizer.agree()
        assert float(model.w.grad[0, 0]) == 0.5
        model.w.grad *= comm.rank + 1
        optimizer.step()
        assert {one.data_ptr() for one in model.parameters()} == before
        assert values(model)[0] == pytest.approx(1.0 - LR * 0.5 * (comm.rank + 1)), "it agreed once"

    each(main)


def test_it_stays_the_optimizer_that_it_was() -> None:
    def main(comm: Any) -> Any:
        model = Model()
        plain = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
        before = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
        optimizer = optimizers.synchronous_sgd(plain, comm)
        assert optimizer is plain
        assert isinstance(optimizer, torch.optim.SGD)
        assert isinstance(optimizer, optimizers.Agreeing)
        assert type(optimizer).__name__ == "SGD"
        after = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        rates = []
        for step in range(3):
            optimizer.zero_grad()
            model(float(comm.rank + step)).backward()
            optimizer.step()
            before.step()
            rates.append(optimizer.param_groups[0]["lr"])
        after.step()
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        assert optimizer.state_dict()["param_groups"] == saved["param_groups"]
        more = torch.nn.Parameter(torch.ones(2))
        optimizer.add_param_group({"params": [more]})
        more.grad = torch.full((2,), float(comm.rank))
        model(float(comm.rank)).backward()
        optimizer.step()
        assert float(more.grad[0]) == 0.5
        return rates, values(model)

    (rates, first), (_, second) = each(main)
    assert rates == [0.2, 0.1, 0.05]
    assert np.array_equal(first, second)


def test_a_copy_agrees_with_nobody_nor_does_one_that_was_detached() -> None:
    def main(comm: Any) -> None:
        model = Model()
        optimizer = optimizers.sma(torch.optim.SGD(model.parameters(), lr=LR), comm)
        assert isinstance(optimizer.agreement, SMA)
        for alone in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert type(alone) is torch.optim.SGD
            assert not hasattr(alone, "agreement")
            alone.step()
        optimizer.detach()
        assert type(optimizer) is torch.optim.SGD
        model(float(comm.rank)).backward()
        if comm.rank:  # nobody else makes it
            optimizer.step()
        optimizers.local_sgd(optimizer, comm, 2, name="again")

    each(main)


def test_lbfgs_searches_along_one_line_on_all_ranks() -> None:
    """As a single process with the whole batch does."""
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.standard_normal((8, 3)).astype(np.float32))
    outputs = inputs @ torch.tensor([1.0, -2.0, 0.5]) + 0.1

    def train(rows: slice, wrap: Callable[[Any], Any]) -> Any:
        x = torch.nn.Parameter(torch.zeros(3))
        optimizer = wrap(torch.optim.LBFGS([x], max_iter=8, line_search_fn="strong_wolfe"))

        def closure() -> Any:
            optimizer.zero_grad()
            loss = ((inputs[rows] @ x - outputs[rows]) ** 2).mean()
            loss.backward()
            return loss

        losses = [float(optimizer.step(closure).detach()) for _ in range(2)]
        return [*losses, *x.detach().tolist()]

    alone = train(slice(None), lambda one: one)
    found = each(
        lambda comm: train(slice(4 * comm.rank, 4 * comm.rank + 4), lambda one: optimizers.synchronous_sgd(one, comm))
    )
    assert found[0] == found[1]
    assert found[0] == pytest.approx(alone, rel=1e-3, abs=1e-4)


def test_a_closure_may_give_a_number_or_nothing() -> None:
    def main(comm: Any) -> None:
        model = Model()
        optimizer = optimizers.synchronous_sgd(torch.optim.SGD(model.parameters(), lr=LR), comm)

        def closure(loss: Any) -> Any:
            optimizer.zero_grad()
            model(0.0).backward()
            return loss

        assert optimizer.step(closure=lambda: closure(float(comm.rank))) == 0.5
        assert optimizer.step(lambda: closure(None)) is None
        optimizer.agree()
        with pytest.raises(ConfigError, match=r"agree\(\) is for steps without"):
            optimizer.step(lambda: closure(1.0))

    each(main)


def test_a_scaler_leaves_out_a_step_on_all_ranks_where_one_has_overflowed() -> None:
    def main(comm: Any) -> Any:
        model = Model()
        optimizer = optimizers.synchronous_sgd(torch.optim.SGD(model.parameters(), lr=LR), comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            target = float("inf") if step == 1 and comm.rank == 1 else float(comm.rank)
            scaler.scale(model(target)).backward()
            optimizer.agree()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            seen.append((scaler.get_scale(), *values(model).tolist()))
        return seen

    first, second = each(main)
    assert first == second
    assert [scale for scale, *_ in first] == [8.0, 4.0, 4.0]
    assert first[1][1:] == first[0][1:]
    assert first[0][1] == pytest.approx(1.0 - LR * 0.5)
    assert first[2][1] < first[1][1]


def test_adasgd_changes_when_a_rank_says_so_and_a_monitor_learns() -> None:
    def main(comm: Any) -> Any:
        model, other = Model(), Model()
        optimizer = optimizers.adasgd(torch.optim.Adam(model.parameters(), lr=LR), comm)
        monitor = GradientMonitor(comm, 8)
        watched = optimizers.synchronous_sgd(
            torch.optim.Adam(other.parameters(), lr=LR), comm, monitor=monitor, name="watched"
        )
        for step in range(6):
            if step == 1 and comm.rank == 1:
                optimizer.agreement.change()
            for one, whose in ((model, optimizer), (other, watched)):
                whose.zero_grad()
                one(float(comm.rank + step)).backward()
                whose.step()
        assert optimizer.agreement.is_synchronous
        assert monitor.noise_scale.num_updates == 5
        return values(model), values(other)

    first, second = each(main)
    for one, other in zip(first, second, strict=True):
        assert np.array_equal(one, other)


# ------------------------------------------------------------------ what cannot be


def refused(make: Callable[[Any, Any], Any], error: type[Exception], says: str, start: Any = None) -> list[str]:
    def main(comm: Any) -> str:
        with pytest.raises(error, match=says) as caught:
            make(comm, start if start is not None else Model())
        comm.barrier()  # it stays usable
        return str(caught.value)

    return each(main)


def test_ranks_with_different_optimizers_see_both_sides() -> None:
    def make(comm: Any, model: Any) -> None:
        cls = torch.optim.Adam if comm.rank else torch.optim.Adagrad
        optimizers.sma(cls(model.parameters(), lr=0.1), comm)

    first, second = refused(make, CollectiveMismatch, r"different optimizers: rank 0 has Adagrad\(lr=0.1, .* of 2 para")
    assert "; rank 1 has Adam(lr=0.1, " in first
    assert first == second


def test_ranks_with_different_learning_rates_see_both_sides() -> None:
    def make(comm: Any, model: Any) -> None:
        optimizers.sma(torch.optim.SGD(model.parameters(), lr=0.1 * (1 + comm.rank)), comm)

    refused(make, CollectiveMismatch, r"rank 0 has SGD\(lr=0.1, .*; rank 1 has SGD\(lr=0.2, ")


def test_ranks_that_agree_in_different_ways_see_both_sides() -> None:
    def make(comm: Any, model: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _ = optimizers.sma(optimizer, comm) if comm.rank else optimizers.synchronous_sgd(optimizer, comm)

    refused(make, CollectiveMismatch, r"rank 0 has SynchronousSGD\(op='avg'.*\); rank 1 has SMA\(alpha=0.1\)")


def test_a_number_out_of_range_on_one_rank_is_an_error_on_all() -> None:
    """And then another one of this name works."""

    def main(comm: Any) -> str:
        optimizer = torch.optim.SGD(Model().parameters(), lr=0.1)
        with pytest.raises(ConfigError, match=r"SMA\(alpha=-1.0\): alpha is above 0 and at most 1, not -1") as caught:
            optimizers.sma(optimizer, comm, 0.1 if comm.rank else -1.0)
        assert type(optimizer) is torch.optim.SGD
        optimizers.local_sgd(optimizer, comm, 1)
        return str(caught.value)

    _, other = each(main)
    assert other.endswith("; rank 1 has SMA(alpha=0.1)")


def test_parameters_that_differ_are_an_error_on_all() -> None:
    def make(comm: Any, _: Any) -> None:
        shape = (2, 3) if comm.rank else (3, 2)
        optimizers.sma(torch.optim.SGD([torch.nn.Parameter(torch.zeros(shape))], lr=0.1), comm)

    refused(make, ConfigError, "is not the same on all ranks: 0/0 is")


def test_gradients_that_only_some_ranks_have_are_an_error_on_all() -> None:
    def main(comm: Any) -> str:
        model = Model()
        optimizer = optimizers.synchronous_sgd(torch.optim.SGD(model.parameters(), lr=LR), comm)
        (model(0.0) if comm.rank else model.w.sum()).backward()
        with pytest.raises(CollectiveMismatch, match="0/1") as caught:
            optimizer.step()
        return str(caught.value)

    each(main)


def test_errors_of_one_rank() -> None:
    with testing.sync_world(1) as (comm,):
        model = Model()
        optimizer = optimizers.sma(torch.optim.SGD(model.parameters(), lr=LR), comm)
        with pytest.raises(ConfigError, match=r"this SGD agrees already, by <SMA\(alpha=0.1\)"):
            optimizers.sma(optimizer, comm)
        with pytest.raises(ConfigError, match=r"kfcomm.sync, not a Communicator"):
            optimizers.sma(torch.optim.SGD(model.parameters(), lr=LR), comm._inner)
        embedding = torch.nn.Embedding(4, 2, sparse=True)
        optimizer = optimizers.synchronous_sgd(torch.optim.SGD(embedding.parameters(), lr=LR), comm, name="sparse")
        embedding(torch.tensor([1])).sum().backward()
        with pytest.raises(ConfigError, match="parameter 0/0 is sparse"):
            optimizer.step()
