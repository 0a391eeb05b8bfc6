"""An attachment agrees by any algorithm, as `kfcomm.torch.optimizers` do, and switches between them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kfcomm.torch
from kfcomm.errors import ConfigError
from kfcomm.torch import optimizers
from kfcomm.train import Agreement, Algorithm
from tests.frameworks.ranks import each, filled

torch = pytest.importorskip("torch")

nn = torch.nn
SIZE, STEPS, WIDTH = 3, 7, 4
Tree = Any


class Net(nn.Module):
    """Has buffers, a tied weight, and a parameter that it never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        return self.last(self.norm(self.first(x)).tanh())


class HalfWay(Agreement):
    """An algorithm of the program's own: half the way to the mean of all models."""

    default_name = "half-way"

    def __init__(self, comm: Any, *, name: str | None = None) -> None:
        super().__init__(comm, name, {})

    def _parameters(self, tree: Tree) -> Any:
        mean = yield from self._reduced(tree, "model")
        return {one: (x + mean[one]) / 2 for one, x in tree.items()}


class OwnMean(Agreement):
    """Another one, of gradients."""

    default_name = "own-mean"
    shares_gradients = True

    def __init__(self, comm: Any, *, name: str | None = None) -> None:
        super().__init__(comm, name, {})

    def _gradients(self, tree: Tree) -> Any:
        return (yield from self._reduced(tree, "gradients"))


KINDS: dict[str, tuple[Any, Callable[[Any, Any], Any]]] = {
    "ssgd": ("ssgd", optimizers.synchronous_sgd),
    "adasum": ("adasum", lambda one, comm: optimizers.synchronous_sgd(one, comm, op="adasum")),
    "sma": (Algorithm("sma", alpha=0.3), lambda one, comm: optimizers.sma(one, comm, 0.3)),
    "ea-sgd": (
        Algorithm("ea-sgd", alpha=0.2, every=2),
        lambda one, comm: optimizers.elastic_averaging(one, comm, 0.2, every=2),
    ),
    "local-sgd": (Algorithm("local-sgd", every=3), lambda one, comm: optimizers.local_sgd(one, comm, 3)),
    "diloco": (
        Algorithm("diloco", every=2, lr=0.5),
        lambda one, comm: optimizers.diloco(one, comm, every=2, lr=0.5),
    ),
    "adasgd": (Algorithm("adasgd", alpha=0.3, after=4), lambda one, comm: optimizers.adasgd(one, comm, 0.3, after=4)),
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.05),
}


def made(seed: int = 0) -> Any:
    """A model whose numbers are the same wherever it is made."""
    model = Net()
    return filled(model, seed, 0.5)


def batches(rank: int, seed: int = 0) -> Iterator[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    while True:
        yield torch.randn(6, WIDTH, generator=generator), torch.randn(6, WIDTH, generator=generator)


def train(model: Any, optimizer: Any, data: Iterator[tuple[Any, Any]], steps: int = STEPS) -> None:
    for _, (x, y) in zip(range(steps), data, strict=False):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()


def values(model: Any) -> Any:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def rank_of(algorithm: Any, *, optimizer: str = "momentum", **options: Any) -> Callable[[Any], Any]:
    def main(comm: Any) -> Any:
        model = made(comm.rank)
        chosen = OPTIMIZERS[optimizer](model)
        kfcomm.torch.attach(model, chosen, comm, algorithm=algorithm, **options)
        train(model, chosen, batches(comm.rank))
        return values(model)

    return main


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_attached_algorithm_equals_the_optimizers_to_the_bit(kind: str, optimizer: str) -> None:
    algorithm, wrap = KINDS[kind]

    def wrapped(comm: Any) -> Any:
        model = made(0)
        chosen = wrap(OPTIMIZERS[optimizer](model), comm)
        train(model, chosen, batches(comm.rank))
        return values(model)

    found, wanted = each(rank_of(algorithm, optimizer=optimizer), SIZE), each(wrapped, SIZE)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert not torch.equal(found[0], values(made(0)))


def test_local_adaalter_over_plain_sgd_equals_the_optimizer() -> None:
    def main(comm: Any, *, is_attached: bool) -> Any:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        with torch.no_grad():
            for one in model.parameters():
                one.fill_(0.25)
        chosen = torch.optim.SGD(model.parameters(), lr=0.1)
        if is_attached:
            kfcomm.torch.attach(model, chosen, comm, algorithm=Algorithm("local-adaalter", every=2))
        else:
            optimizers.local_adaalter(chosen, comm, 2)
        train(model, chosen, batches(comm.rank))
        return values(model)

    found = each(lambda comm: main(comm, is_attached=True))
    wanted = each(lambda comm: main(comm, is_attached=False))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_pair_averaging_draws_models_together() -> None:
    def main(comm: Any) -> Any:
        model = made(0)
        chosen = torch.optim.SGD(model.parameters(), lr=0.0)
        attached = kfcomm.torch.attach(model, chosen, comm, algorithm="pair-averaging")
        with torch.no_grad():
            model.first.weight += comm.rank
        train(model, chosen, batches(comm.rank), 40)
        comm.barrier()
        assert attached.agreement is not None
        return values(model)

    found = torch.stack(each(main, SIZE))
    assert (found.max(0).values - found.min(0).values).max() < 0.3


@pytest.mark.parametrize("algorithm", [HalfWay, lambda comm, model, *, name: HalfWay(comm, name=name), OwnMean])
def test_algorithms_of_the_program(algorithm: Any) -> None:
    found = each(rank_of(algorithm), SIZE)
    if algorithm is OwnMean:
        wanted = each(rank_of("ssgd"), SIZE)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    else:
        spread = torch.stack(found).std(0).max()
        alone = torch.stack(each(rank_of(Algorithm("local-sgd", every=1000)), SIZE)).std(0).max()
        assert 0 < spread < alone / 2


def test_buffers_of_replicas_stay_each_ranks_own() -> None:
    def main(comm: Any) -> Any:
        model = made(0)
        chosen = OPTIMIZERS["momentum"](model)
        kfcomm.torch.attach(model, chosen, comm, algorithm="sma")
        train(model, chosen, batches(comm.rank))
        return model.norm.running_mean.clone()

    first, second = each(main)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("former", ["ssgd", "ea-sgd", "adasgd", "pair-averaging"])
@pytest.mark.parametrize("latter", [*KINDS, "pair-averaging"])
def test_switch_leaves_the_model_that_the_next_algorithm_needs(former: str, latter: str) -> None:
    first, second = (KINDS[one][0] if one in KINDS else one for one in (former, latter))

    def main(comm: Any) -> Any:
        model = made(0)
        chosen = OPTIMIZERS["adam"](model)
        attached = kfcomm.torch.attach(model, chosen, comm, algorithm=first)
        data = batches(comm.rank)
        train(model, chosen, data, 3)
        before = values(model)
        attached.use(second)
        assert attached.algorithm == Algorithm.of(second)
        comm.barrier()
        rates = [group["lr"] for group in chosen.param_groups]
        for group in chosen.param_groups:
            group["lr"] = 0.0  # only the algorithm moves the model in this step
        train(model, chosen, data, 1)
        begun = values(model)
        comm.barrier()  # else a peer's later model is fetched
        for group, rate in zip(chosen.param_groups, rates, strict=True):
            group["lr"] = rate
        train(model, chosen, data, 3)
        comm.barrier()
        return before, begun, values(model)

    found = each(main, SIZE)
    before, begun, after = (torch.stack([one[place] for one in found]) for place in range(3))
    if former != latter or former == "ssgd":
        wanted = before.mean(0)
        assert (begun - wanted).abs().max() < 1e-5 * max(1.0, float(wanted.abs().max()))
    if second in ("ssgd", "adasum"):
        assert torch.equal(after[0], after[1])
        assert torch.equal(after[0], after[2])


def test_state_continues_on_another_attachment() -> None:
    def main(comm: Any) -> None:
        for kind, (algorithm, _) in KINDS.items():
            runs = []
            for is_cut in (False, True):
                model = made(0)
                chosen = OPTIMIZERS["adam"](model)
                attached = kfcomm.torch.attach(model, chosen, comm, name=f"{kind} {is_cut}", algorithm=algorithm)
                data = batches(comm.rank)
                train(model, chosen, data, 3)
                if is_cut:
                    kept = copy.deepcopy(attached.state_dict())
                    attached.detach()
                    model = made(1)
                    chosen = torch.optim.Adam(model.parameters(), lr=1.0)
                    attached = kfcomm.torch.attach(model, chosen, comm, name=f"{kind} again", algorithm="ssgd")
                    attached.load_state_dict(kept)
                    assert attached.algorithm == Algorithm.of(algorithm)
                train(model, chosen, data, 4)
                runs.append((values(model), model.norm.running_var.clone()))
            for one, other in zip(*runs, strict=True):
                assert torch.equal(one, other), kind

    each(main)


def test_merging_says_what_differs_between_ranks() -> None:
    def main(comm: Any) -> tuple[dict[str, str], dict[str, str]]:
        model = made(0)
        chosen = OPTIMIZERS["adam"](model)
        attached = kfcomm.torch.attach(model, chosen, comm, algorithm="sma")
        of_replicas = attached.merging()
        attached.use("ssgd")
        return of_replicas, attached.merging()

    assert each(main) == [({"training/model": "mean", "training/optimizer": "mean"}, {})] * 2


def test_load_of_another_models_state_changes_nothing() -> None:
    def main(comm: Any) -> None:
        model = made(0)
        attached = kfcomm.torch.attach(model, OPTIMIZERS["momentum"](model), comm)
        state = attached.state_dict()
        state["training/model"] = {**state["training/model"], "first.bias": torch.zeros(WIDTH + 1)}
        before = values(model)
        with pytest.raises(ConfigError, match=r"first\.bias is \(4,\) here and \(5,\) in the state"):
            attached.load_state_dict(state)
        del state["training/model"]["first.bias"]
        with pytest.raises(ConfigError, match=r"the model has a 'first\.bias', the state does not"):
            attached.load_state_dict(state)
        assert torch.equal(values(model), before)

    each(main, 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"algorithm": "sma", "defer": True}, "defer is for gradients that travel during the backward pass"),
        ({"algorithm": "sma", "compression": "topk"}, "compression is for gradients that travel"),
        ({"algorithm": "sma", "wire_dtype": "float16"}, "wire_dtype is for gradients that travel"),
        ({"algorithm": "adasum", "compression": "powersgd"}, "compression is for means of gradients"),
        ({"algorithm": Algorithm("ssgd", wire_dtype="float16")}, r"attach\(..., wire_dtype=...\)"),
        ({"algorithm": "smart"}, "algorithm 'smart' is not known"),
        ({"algorithm": Algorithm("sma", alpha=2.0)}, "alpha is above 0 and at most 1"),
        ({"elastic": object()}, "elastic is a kfcomm.elastic.ElasticSampler"),
    ],
)
def test_options_without_a_meaning_are_refused_on_all_ranks(options: dict[str, Any], text: str) -> None:
    def main(comm: Any) -> None:
        model = made(0)
        with pytest.raises(ConfigError, match=text):
            kfcomm.torch.attach(model, OPTIMIZERS["momentum"](model), comm, **options)

    each(main)


def test_ranks_that_attach_other_algorithms_raise_on_all_ranks() -> None:
    def main(comm: Any) -> None:
        model = made(0)
        with pytest.raises(ConfigError, match="algorithm is sma on rank 0, and ssgd on rank 1"):
            kfcomm.torch.attach(
                model, OPTIMIZERS["momentum"](model), comm, algorithm="sma" if comm.rank == 0 else "ssgd"
            )

    each(main)


@pytest.mark.parametrize("kind", [*KINDS, "pair-averaging"])
def test_scaler_that_meets_infinite_gradients_on_one_rank_keeps_no_rank_waiting(kind: str) -> None:
    algorithm = KINDS[kind][0] if kind in KINDS else kind

    def main(comm: Any) -> tuple[Any, Any]:
        model = made(0)
        chosen = OPTIMIZERS["momentum"](model)
        kfcomm.torch.attach(model, chosen, comm, algorithm=algorithm)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step, (x, y) in zip(range(6), batches(comm.rank), strict=False):
            chosen.zero_grad()
            loss = (model(x) - y).square().mean()
            if step == 2 and comm.rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(chosen)
            scaler.update()
        comm.barrier()
        return values(model), scaler.get_scale()

    found = each(main)
    assert all(bool(one.isfinite().all()) for one, _ in found)
    assert found[1][1] == 2.0


@pytest.mark.parametrize("kind", KINDS)
def test_scaled_steps_equal_plain_ones(kind: str) -> None:
    def main(comm: Any) -> tuple[Any, Any]:
        runs = []
        for is_scaled in (False, True):
            model = made(0)
            chosen = OPTIMIZERS["momentum"](model)
            kfcomm.torch.attach(model, chosen, comm, name=f"scaled {is_scaled}", algorithm=KINDS[kind][0])
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=is_scaled)
            for _, (x, y) in zip(range(STEPS), batches(comm.rank), strict=False):
                chosen.zero_grad()
                scaler.scale((model(x) - y).square().mean()).backward()
                scaler.step(chosen)
                scaler.update()
            runs.append(values(model))
        return tuple(runs)

    for plain, scaled in each(main):
        torch.testing.assert_close(scaled, plain, rtol=1e-5, atol=1e-6)
