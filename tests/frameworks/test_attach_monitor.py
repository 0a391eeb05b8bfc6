"""The monitor of an attachment measures what one that is given whole gradients measures."""

from __future__ import annotations

import math
from typing import Any

import pytest

import kfcomm.sync
import kfcomm.torch
from kfcomm.train import GradientMonitor
from kfcomm.train.policies import NoiseScaleBatch
from tests.frameworks.ranks import each, filled

torch = pytest.importorskip("torch")

nn = torch.nn

WIDTH, STEPS, SIZE, BATCH = 6, 12, 3, 12
SAME = ("gradient_norm", "gradient_variance", "gradient_cosine", "noise_scale", "local_norm", "big_batch")


def made() -> Any:
    return filled(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)).double(), 0)


def loss(model: Any, rank: int, step: int) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(BATCH // SIZE, WIDTH, generator=generator, dtype=torch.float64)
    return (model(x) - x).square().mean()


def watched(comm: Any, *, scale: float = 1.0, **options: Any) -> list[dict[str, float]]:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    attached = kfcomm.torch.attach(
        model, optimizer, comm, monitor={"every": 1}, batch_size=BATCH, bucket_nbytes=200, **options
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=4, enabled=scale != 1.0)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss(model, comm.rank, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        attached.wait()
        found.append(dict(attached.monitor.values))
    return found


def by_hand(comm: Any) -> list[dict[str, float]]:
    """The same with a monitor that squares whole gradients."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    monitor = GradientMonitor(comm, BATCH // SIZE)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, comm.rank, step).backward()
        given = {name: one.grad.numpy() for name, one in model.named_parameters()}
        told = comm.all_reduce_many({**given, "/sums": monitor.sums(given)}, op="avg")
        monitor.update(told.pop("/sums"), told)
        for name, one in model.named_parameters():
            one.grad = torch.from_numpy(told[name])
        optimizer.step()
        found.append(dict(monitor.values))
    return found


@pytest.mark.parametrize(
    "options", [{}, {"defer": True}, {"scale": 8.0}, {"scale": 8.0, "defer": True}],
    ids=["at once", "deferred", "scaled", "scaled and deferred"],
)  # fmt: skip
def test_monitor_of_buckets_measures_what_one_of_whole_gradients_does(options: dict[str, Any]) -> None:
    found, wanted = each(lambda comm: watched(comm, **options), SIZE), each(by_hand, SIZE)
    for of_rank, like in zip(found, wanted, strict=True):
        of_measurement = {one["measurement"]: one for one in of_rank if "measurement" in one}
        for right in like[1:-2]:
            values = of_measurement[right["measurement"]]
            for name in SAME:
                assert values.get(name) == pytest.approx(right.get(name), rel=1e-9), name
        assert math.isfinite(of_rank[-1]["noise_scale"])


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_attach_names_the_optimizer_to_the_batch_policy(kind: str) -> None:
    def main(comm: Any) -> str | None:
        model, policy = made(), NoiseScaleBatch(512)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.05)
        kfcomm.torch.attach(model, optimizer, comm, policies=[policy], batch_size=BATCH)
        return policy.optimizer

    assert each(main, 2) == [kind, kind]
