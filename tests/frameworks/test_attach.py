"""A model that is attached learns as a single process does that has the whole batch."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kfcomm.sync
import kfcomm.torch
from kfcomm import testing
from kfcomm.errors import ConfigError, KfcommError
from kfcomm.monitor.timeline import Timeline
from tests.frameworks.ranks import each
from tests.monitor.timeline.traces import events_of
from tests.sync.worlds import joined

torch = pytest.importorskip("torch")

nn = torch.nn

SIZE, STEPS, BATCH, WIDTH = 2, 4, 6, 5
CHANCE = threading.Lock()


class Tied(nn.Module):
    """Shares a weight between its first and its last layer, has one that it never uses, and one every other time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        x = self.first(x).tanh()
        if self.calls % 2:
            x = self.sometimes(x).tanh()
        return self.last(x)


class Attention(nn.Module):
    """Reads parameters of a module that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 1, batch_first=True)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        x = self.norm(x)[:, None, :]
        return self.out(self.attention(x, x, x)[0][:, 0, :])


MODELS: dict[str, Callable[[], Any]] = {
    "perceptron": lambda: nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 5)),
    "tied": Tied,
    "attention": Attention,
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}


def made(kind: str, seed: int = 0) -> Any:
    with CHANCE:  # it is of the process
        torch.manual_seed(seed)
        return MODELS[kind]()


def batches(rank: int | None, size: int = SIZE) -> list[tuple[Any, Any]]:
    """Of one rank, or of all."""
    generator = torch.Generator().manual_seed(7)
    whole = [
        (torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator))
        for _ in range(STEPS)
    ]
    part = slice(None) if rank is None else slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    return [(x[part], y[part]) for x, y in whole]


def train(model: Any, optimizer: Any, data: list[tuple[Any, Any]]) -> None:
    for x, y in data:
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()


def alone(kind: str, optimizer: str) -> dict[str, Any]:
    model = made(kind)
    train(model, OPTIMIZERS[optimizer](model), batches(None))
    return dict(model.state_dict())


def same_as_alone(
    steps: Callable[[Any, Any, list[tuple[Any, Any]]], object], kind: str, optimizer: str, *, defer: bool
) -> None:
    """``steps(model, optimizer, data)`` makes the same on ranks with a part of the data as on one process with all."""

    def rank(comm: Any) -> dict[str, Any]:
        model, chosen, _ = attached(comm, kind, optimizer, defer=defer)
        steps(model, chosen, batches(comm.rank))
        return {name: one.detach().clone() for name, one in model.named_parameters()}

    model = made(kind)
    steps(model, OPTIMIZERS[optimizer](model), batches(None))
    first, second = each(rank)
    close(first, dict(model.named_parameters()))
    assert all(torch.equal(first[name], second[name]) for name in first)


def attached(comm: Any, kind: str, optimizer: str = "sgd", *, seed: int | None = None, **options: Any) -> Any:
    """Model, optimizer, and what holds them together; other weights on every rank before."""
    model = made(kind, 0 if comm.rank == 0 else 100 + comm.rank if seed is None else seed)
    chosen = OPTIMIZERS[optimizer](model)
    return model, chosen, kfcomm.torch.attach(model, chosen, comm, **{"bucket_nbytes": 150, **options})


def close(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        torch.testing.assert_close(
            found[name], one, rtol=2e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("defer", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_training_equals_one_process_with_the_whole_batch(kind: str, defer: bool) -> None:
    same_as_alone(train, kind, "sgd", defer=defer)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("defer", [True, False])
def test_same_bits_in_a_rerun_over_links_and_slots(transport: str, defer: bool) -> None:
    def rank(comm: Any) -> dict[str, Any]:
        model, chosen, held = attached(comm, "perceptron", "adamw", defer=defer)
        train(model, chosen, batches(comm.rank) * 3)
        assert (comm.statistics().symmetric_nbytes > 0) == (transport == "shm")
        held.detach()  # lets go of the memory
        return dict(model.state_dict())

    found = []
    for _ in range(2):
        with joined(transport) as comms:
            found += testing.run_threads(comms, rank)
    assert all(torch.equal(one[name], found[0][name]) for one in found for name in one)
    model = made("perceptron")
    train(model, OPTIMIZERS["adamw"](model), batches(None) * 3)
    close(found[0], model.state_dict())


def test_gradients_that_the_program_keeps_stay_where_they_are() -> None:
    """Without deferred updates, ``parameter.grad`` is the memory that travels, and autograd adds to it."""

    def rank(comm: Any) -> None:
        model, chosen, _ = attached(comm, "perceptron", defer=False)
        places = set()
        for x, y in batches(comm.rank):
            chosen.zero_grad(set_to_none=False)
            (model(x) - y).square().mean().backward()
            chosen.step()
            places.add(tuple(one.grad.data_ptr() for one in model.parameters()))
        assert len(places) == 1

    each(rank)


def test_a_gradient_alone_is_read_where_autograd_has_made_it() -> None:
    def rank(comm: Any) -> None:
        made_at, read_at = set(), set()
        verb = comm.all_reduce_init

        def look(x: Any, name: str, **options: Any) -> Any:
            read_at.add(x.__array_interface__["data"][0])
            return verb(x, name, **options)

        comm.all_reduce_init = look
        model = made("perceptron")
        for one in model.parameters():
            one.register_post_accumulate_grad_hook(lambda one: made_at.add(one.grad.data_ptr()))
        chosen = OPTIMIZERS["sgd"](model)
        kfcomm.torch.attach(model, chosen, comm, bucket_nbytes=1)
        train(model, chosen, batches(comm.rank)[:1])
        assert len(made_at) == 6
        assert made_at <= read_at

    each(rank)


@pytest.mark.parametrize("defer", [True, False])
def test_parameter_used_on_one_rank_is_averaged_with_zeros(defer: bool) -> None:
    def rank(comm: Any) -> dict[str, Any]:
        model, chosen, _ = attached(comm, "tied", defer=defer)
        for x, y in batches(comm.rank):
            chosen.zero_grad()
            model.calls = comm.rank  # the first rank uses the branch, the second does not
            (model(x) - y).square().mean().backward()
            chosen.step()
        return dict(model.state_dict())

    model = made("tied")
    chosen = OPTIMIZERS["sgd"](model)
    for x, y in batches(None):
        chosen.zero_grad()
        for calls, part in enumerate((slice(None, 3), slice(3, None))):
            model.calls = calls
            ((model(x[part]) - y[part]).square().mean() / 2).backward()
        chosen.step()
    first, second = each(rank)
    close(first, model.state_dict())
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("defer", [True, False])
def test_a_forward_pass_from_before_the_step(defer: bool) -> None:
    """Its backward pass brings gradients of parameters that are not updated yet: they are, first."""

    def steps(model: Any, chosen: Any, data: list[tuple[Any, Any]]) -> None:
        early = model[4].bias * 2  # saves nothing that the update changes
        train(model, chosen, data[:1])
        chosen.zero_grad()
        early.sum().backward()
        chosen.step()

    same_as_alone(steps, "perceptron", "sgd", defer=defer)


@pytest.mark.parametrize("defer", [True, False])
def test_a_model_that_is_never_called_is_updated_at_once(defer: bool) -> None:
    def steps(model: Any, chosen: Any, data: list[tuple[Any, Any]]) -> None:
        for x, y in data:
            chosen.zero_grad()
            found = nn.functional.linear(x, model[0].weight, model[0].bias)
            (found.sum(dim=1) - y.sum(dim=1)).square().mean().backward()
            chosen.step()

    same_as_alone(steps, "perceptron", "sgd", defer=defer)


@pytest.mark.parametrize("defer", [True, False])
def test_after_detaching_nothing_is_exchanged(defer: bool) -> None:
    def rank(comm: Any) -> Any:
        model, chosen, held = attached(comm, "perceptron", defer=defer)
        (x, y), *_ = batches(comm.rank)
        (model(x) - y).square().mean().backward()
        chosen.step()
        held.detach()
        before = comm.statistics().steps[0].count
        train(model, chosen, batches(comm.rank))
        assert comm.statistics().steps[0].count == before == 1
        return model[0].weight.detach().clone()

    first, second = each(rank)
    assert not torch.equal(first, second)


def test_small_gradients_share_a_bucket_across_larger_ones() -> None:
    def rank(comm: Any) -> tuple[set[str], dict[str, Any]]:
        model = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        chosen = torch.optim.SGD(model.parameters(), lr=0.1)
        kfcomm.torch.attach(model, chosen, comm, bucket_nbytes=600)
        train(model, chosen, batches(comm.rank))
        return {key.name for key in comm.statistics().keys}, dict(model.state_dict())

    (names, first), (_, second) = each(rank)
    assert all(torch.equal(first[name], second[name]) for name in first)
    averaged = {name for name in names if name.endswith(("weight", "bias", "more"))}
    assert averaged == {"grad/4.weight", "grad/2.weight", "grad/0.weight", "grad/4.bias and 2 more"}


@pytest.mark.parametrize("defer", [True, False])
def test_mixed_dtypes_and_a_wire_dtype(defer: bool) -> None:
    def rank(comm: Any) -> dict[str, Any]:
        model = made("perceptron", comm.rank)
        model[2].to(torch.bfloat16)
        model[2].register_forward_pre_hook(lambda _, given: (given[0].to(torch.bfloat16),))
        model[2].register_forward_hook(lambda _m, _i, out: out.float())
        chosen = torch.optim.SGD(model.parameters(), lr=0.1)
        held = kfcomm.torch.attach(model, chosen, comm, bucket_nbytes=1 << 20, defer=defer)
        assert len(held._exchange.buckets) == 2
        train(model, chosen, batches(comm.rank))
        return dict(model.state_dict())

    first, second = each(rank)
    assert all(torch.equal(first[name], second[name]) for name in first)

    def narrow(comm: Any) -> dict[str, Any]:
        model, chosen, _ = attached(comm, "perceptron", wire_dtype="bfloat16", defer=defer)
        train(model, chosen, batches(comm.rank))
        return dict(model.state_dict())

    wanted = alone("perceptron", "sgd")
    for name, one in each(narrow)[0].items():
        torch.testing.assert_close(one, wanted[name], rtol=0, atol=0.01)


def test_invalid_models_and_optimizers_are_errors() -> None:
    model, layer = made("perceptron"), nn.Linear(2, 2)
    both = torch.optim.SGD([*model.parameters(), *layer.parameters()], lr=0.1)
    with kfcomm.sync.init() as comm:
        for options, message in (
            ((nn.ReLU(), both, comm), "has no parameter of the model"),
            ((model, both, comm), "2 parameters of the optimizer are not the model's"),
            ((model, both, comm._inner), "needs a communicator of kfcomm.sync, not a Communicator"),
        ):
            with pytest.raises(ConfigError, match=message):
                kfcomm.torch.attach(*options)
        elsewhere = nn.Linear(2, 2, device="meta")
        with pytest.raises(ConfigError, match="weight is on device 'meta': attach is for models on the CPU and one"):
            kfcomm.torch.attach(elsewhere, torch.optim.SGD(elsewhere.parameters(), lr=0.1), comm)


def test_sparse_gradients_and_added_parameters_are_errors() -> None:
    with kfcomm.sync.init() as comm:
        model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 3))
        chosen = torch.optim.SGD(model.parameters(), lr=0.1)
        held = kfcomm.torch.attach(model, chosen, comm)
        with pytest.raises(ConfigError, match=r"the gradient of 0.weight is sparse"):
            model(torch.tensor([1, 2])).sum().backward()
        chosen.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        with pytest.raises(ConfigError, match="has got parameters since it was attached"):
            chosen.step()
        assert repr(held) == "<Attached, 3 parameters in 1 buckets>"


@pytest.mark.parametrize("defer", [True, False])
def test_a_peer_that_dies_ends_the_step_of_the_others(defer: bool) -> None:
    with testing.sync_world(3) as comms:
        ready = threading.Barrier(3)

        def rank(comm: Any) -> str:
            model, chosen, _ = attached(comm, "perceptron", defer=defer)
            train(model, chosen, batches(comm.rank, 3))
            ready.wait()
            if comm.rank == 2:
                comms.kill(2)
                return "killed"
            with pytest.raises(KfcommError, match="rank 2") as caught:
                train(model, chosen, batches(comm.rank, 3))
            return type(caught.value).__name__

        with ThreadPoolExecutor(3) as pool:
            said = list(pool.map(rank, comms))
    assert said == ["PeerLost", "PeerLost", "killed"]


@pytest.mark.parametrize("defer", [True, False])
def test_the_profile_of_steps(tmp_path: Path, defer: bool) -> None:
    with joined("tcp") as comms:
        timelines = [Timeline.of(comm._session, tmp_path) for comm in comms]

        def rank(comm: Any) -> Any:
            model, chosen, _ = attached(comm, "perceptron", defer=defer)
            train(model, chosen, batches(comm.rank))
            model.state_dict()
            return comm.statistics()

        first, _ = testing.run_threads(comms, rank)
    (found,) = first.steps
    assert (found.name, found.count) == ("grad", STEPS)
    assert found.nbytes == STEPS * 4 * sum(one.numel() for one in made("perceptron").parameters())
    assert found.waited_s >= 0
    assert 0 <= found.hidden_s <= found.in_flight_s
    assert all(name.startswith("grad/") for name, _ in found.waited_for)
    assert sum(seconds for _, seconds in found.waited_for) == pytest.approx(found.waited_s)
    assert type(first).from_json(json.loads(json.dumps(first.as_json()))) == first
    for one in timelines:
        spans = [event["name"] for event in events_of(one.path) if event.get("cat") == "program"]
        assert spans.count("backward") == STEPS


def test_buckets_that_the_forward_pass_needs_first_have_priority() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.late, self.early = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            return self.late(self.early(x))

    with joined("tcp") as comms:

        def rank(comm: Any) -> None:
            model = Backwards()
            chosen = torch.optim.SGD(model.parameters(), lr=0.1)
            held = kfcomm.torch.attach(model, chosen, comm, bucket_nbytes=1, defer=True)
            train(model, chosen, batches(comm.rank))
            urgency = {bucket.name: number for bucket, number in held._exchange.urgency.items()}
            assert urgency["grad/early.weight"] > urgency["grad/late.weight"] > 0

        testing.run_threads(comms, rank)
