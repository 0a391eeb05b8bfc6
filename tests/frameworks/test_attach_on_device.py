"""Attached models on a device: host memory treated as such, whose streams record the order of their work.

What CUDA does with them is in ``tests/gpu``.
"""

from __future__ import annotations

from typing import Any

import pytest

import kfcomm.torch
from kfcomm.adapt.guard import GuardSteps
from kfcomm.arrays.devices.routes import Choice, Route
from kfcomm.elastic import ElasticSampler
from kfcomm.errors import ConfigError
from kfcomm.sync import Communicator
from kfcomm.torch import Compression
from kfcomm.torch.reductions import RepeatedAllReduce
from kfcomm.train import Algorithm
from tests.frameworks.device_streams import DeviceStreams, on_device
from tests.frameworks.ranks import each, filled
from tests.frameworks.test_attach import MODELS, attached, batches, same_as_alone, train
from tests.frameworks.test_attach_monitor import watched

torch = pytest.importorskip("torch")

nn = torch.nn

WIDTH, STEPS, BATCH_SIZE = 6, 6, 4


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> DeviceStreams:
    return on_device(monkeypatch)


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("defer", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_training_equals_one_process_with_the_whole_batch(kind: str, defer: bool) -> None:
    same_as_alone(train, kind, "sgd", defer=defer)


class Net(nn.Module):
    """Has a buffer, and a layer that is used in every other step by rank 1 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 40), nn.BatchNorm1d(40)
        self.sometimes, self.last = nn.Linear(40, 40), nn.Linear(40, WIDTH)
        filled(self.double(), 3, 0.3)

    def forward(self, x: Any, *, branch: bool) -> Any:
        x = self.norm(self.first(x)).tanh()
        return self.last(self.sometimes(x).tanh() if branch else x)


def trained(comm: Any, *, lr: float = 0.05, momentum: float = 0.9, guard: bool = False, **options: Any) -> list[Any]:
    """Parameters and buffers after some steps."""
    model = Net()
    if guard:
        options["policies"] = [GuardSteps(warmup=2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    held = kfcomm.torch.attach(model, optimizer, comm, bucket_nbytes=2000, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + comm.rank)
        x = torch.randn(BATCH_SIZE, WIDTH, generator=generator, dtype=torch.float64)
        is_branch = "algorithm" in options or (step % 2 == 1 and comm.rank == 1)
        (model(x, branch=is_branch) - x).square().mean().backward()
        optimizer.step()
    held.detach()
    return [one.detach().clone() for one in model.state_dict().values()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"defer": True},
        {"algorithm": "adasum"},
        {"compression": Compression("powersgd", rank=2)},
        {"compression": Compression("topk", share=0.3)},
        {"compression": "factors"},
        {"guard": True},
        {"algorithm": Algorithm("sma", alpha=0.3)},
        {"algorithm": Algorithm("adasgd", after=3)},
        {"algorithm": Algorithm("diloco", every=2)},
        {"algorithm": Algorithm("local-adaalter", every=2), "momentum": 0.0},
    ],
    ids=lambda options: ", ".join(f"{name} {one}" for name, one in options.items()) or "mean",
)
def test_same_result_as_in_host_memory(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = each(lambda comm: trained(comm, **options))
    on_device(monkeypatch)
    found = each(lambda comm: trained(comm, **options))
    for of_rank, like in zip(found, wanted, strict=True):
        for one, other in zip(of_rank, like, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("wire_dtype", ["bfloat16", torch.float16])
def test_gradients_travel_in_a_smaller_type(wire_dtype: Any) -> None:
    def rank(comm: Any) -> Any:
        model = filled(nn.Linear(3, 2), comm.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kfcomm.torch.attach(model, optimizer, comm, wire_dtype=wire_dtype)
        model(torch.full((1, 3), 1.001 + comm.rank)).sum().backward()
        return model.weight.grad.clone()

    first, second = each(rank)
    assert torch.equal(first, second)
    rounded = [torch.full((2, 3), 1.001 + one).to(getattr(torch, str(wire_dtype).removeprefix("torch.")))
               for one in range(2)]  # fmt: skip
    torch.testing.assert_close(first, ((rounded[0] + rounded[1]) / 2).float(), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"defer": True}, {"scale": 8.0}], ids=str)
def test_monitor_learns_the_same_one_step_later(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = each(lambda comm: watched(comm, **options), 3)
    on_device(monkeypatch)
    found = each(lambda comm: watched(comm, **options), 3)
    for late, early in zip(found, wanted, strict=True):
        of_measurement = {one["measurement"]: one for one in early if "measurement" in one}
        measured = [one for one in late if "measurement" in one]
        assert len(measured) > len(early) // 2
        for one in measured:
            for name in ("local_norm", "gradient_norm", "gradient_variance", "noise_scale"):
                assert one.get(name) == pytest.approx(of_measurement[one["measurement"]].get(name), rel=1e-9), name


# ---------------------------------------------------------------- streams


def test_calls_wait_for_gradients_and_the_step_for_calls(
    streams: DeviceStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call is on an urgent stream behind all gradients of its bucket; after the pass the program's is behind it."""
    calls: list[Any] = []
    urgent: set[Any] = set()

    def rank(comm: Any) -> None:
        program = streams.current_stream()
        start = RepeatedAllReduce.start

        def checked(self: RepeatedAllReduce) -> None:
            here = streams.current_stream()
            assert here.priority < 0
            assert here.has_seen(program)
            here.place += 1
            urgent.add(here)
            calls.append((self._name, self._x.data_ptr(), self._x.shape))
            start(self)

        monkeypatch.setattr(RepeatedAllReduce, "start", checked)
        model, chosen, held = attached(comm, "perceptron", defer=False)
        for one in model.parameters():
            one.register_hook(lambda _: setattr(program, "place", program.place + 1))
        data = batches(comm.rank, 1)
        for x, y in data:
            chosen.zero_grad(set_to_none=False)
            (model(x) - y).square().mean().backward()
            assert urgent
            assert all(map(program.has_seen, urgent))
            chosen.step()
        count = len(held._exchange.buckets)
        assert len(calls) == count * len(data)
        assert len(set(calls)) == count  # the same name, address and shape in each step

    each(rank, 1)


def test_gradients_of_several_streams_are_all_waited_for(streams: DeviceStreams) -> None:
    """Autograd makes a gradient on the stream of its forward pass; a bucket may have gradients of several."""
    other = streams.Stream()

    def rank(comm: Any) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def elsewhere(_: Any) -> None:
            other.place += 1
            streams._chosen.stream = other

        program = streams.current_stream()
        model[1].weight.register_hook(elsewhere)
        model[0].weight.register_hook(lambda _: setattr(streams._chosen, "stream", program))
        kfcomm.torch.attach(model, optimizer, comm)
        model(torch.ones(1, 2)).sum().backward()
        assert program.has_seen(other)

    each(rank, 1)


# ---------------------------------------------------------------- through host memory


@pytest.mark.usefixtures("streams")
def test_models_that_peers_read_are_copied_to_host_memory() -> None:
    def rank(comm: Any) -> Any:
        model = filled(nn.Linear(2, 2), comm.rank)
        held = kfcomm.torch.attach(model, torch.optim.SGD(model.parameters(), lr=0.0), comm, algorithm="pair-averaging")
        with torch.no_grad():
            model.weight += comm.rank
        for _ in range(12):
            model(torch.ones(1, 2)).sum().backward()
            held._method._optimizer.step()
        held.use("ssgd")
        return model.weight.detach()

    first, second = each(rank)
    assert torch.equal(first, second)


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize(
    "algorithm", ["ssgd", "adasum", Algorithm("sma", alpha=0.5), Algorithm("diloco", every=2)], ids=str
)
def test_elastic_job(algorithm: Any) -> None:
    with kfcomm.sync.init(elastic=True, device="none") as comm:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sampler = ElasticSampler(8, batch=4)
        held = kfcomm.torch.attach(model, optimizer, comm, algorithm=algorithm, elastic=sampler, monitor=True)
        before = model.weight.detach().clone()
        for _ in held.steps(passes=1):
            optimizer.zero_grad()
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
        assert not torch.equal(model.weight.detach(), before)
        if algorithm in ("ssgd", "adasum"):
            torch.testing.assert_close(model.weight.detach(), before - 0.1 * 4 * 2)


@pytest.mark.usefixtures("streams")
def test_kfac_is_for_host_memory() -> None:
    def rank(comm: Any) -> None:
        model = nn.Linear(2, 2)
        with pytest.raises(ConfigError, match="KFAC is for models in host memory"):
            kfcomm.torch.KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), comm)

    each(rank, 1)


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize(
    ("route", "count"),
    [(None, 1), (Route.STAGED, 1), (Route.SLOTS, 1), (Route.BACKEND, 4), (Route.HIERARCHY, 4)],
    ids=str,
)
def test_buckets_by_the_route(route: Route | None, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a backend a pass has several, of at least a mebibyte; 4 MiB here."""
    choice = None if route is None else Choice(route, False, "the test says so")
    monkeypatch.setattr(Communicator, "route", choice, raising=False)

    def rank(comm: Any) -> None:
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
        held = kfcomm.torch.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), comm)
        assert len(held._exchange.buckets) == count

    each(rank, 1)
