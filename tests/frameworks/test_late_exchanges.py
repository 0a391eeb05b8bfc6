"""An exchange of a failed pass that is late: it makes no call in the pass after."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import kfcomm.torch
from kfcomm import testing
from kfcomm.compression import PowerSGD
from kfcomm.elastic import ElasticSampler

torch = pytest.importorskip("torch")

nn = torch.nn

DIES_AT = 2
WAITED_FOR_S = 1.0
"""The thread's wait for a pass that does not begin before the thread has ended."""


class Died(Exception):
    """This rank was killed: it does nothing more."""


def made() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 24)).double()


@pytest.mark.parametrize("late", ["0.weight", "2.weight", "4.weight"])
def test_a_void_step_is_repeated_without_calls_of_its_late_threads(late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_void: set[int] = set()
    is_repeated = threading.Event()

    def average(self: PowerSGD, comm: Any, gradients: Any, *, name: str = "power") -> Any:
        if late in gradients and comm.births[comm.rank] in is_void:
            is_void.clear()
            is_repeated.wait(WAITED_FOR_S)
        return by_hand(self, comm, gradients, name=name)

    by_hand = PowerSGD.average
    monkeypatch.setattr(PowerSGD, "average", average)

    def main(comm: Any) -> Any:
        uid, model = comm.births[comm.rank], made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attached = kfcomm.torch.attach(
            model, optimizer, comm, elastic={"sampler": ElasticSampler(60, 6, seed=5), "on_loss": "restart_step"},
            compression="powersgd", bucket_nbytes=200,
        )  # fmt: skip
        numbers = []
        try:
            for step in attached.steps(passes=1):
                with step:
                    x = torch.randn(len(step.indices), 24, dtype=torch.float64)
                    if step.number == DIES_AT and comm.size == 3:
                        if uid == 1:
                            comms.kill(1)
                            raise Died
                        is_void.add(2)
                    if uid == 2 and comm.size == 2:
                        is_repeated.set()
                    optimizer.zero_grad()
                    (model(x) - x).square().mean().backward()
                    optimizer.step()
                    numbers.append(step.number)
        except Died:
            return None
        return numbers, model.state_dict()

    with testing.sync_world(3, elastic=True, timeout=20.0) as comms:
        first, _, last = testing.run_threads(list(comms), main)
    assert first[0] == last[0] == sorted(set(first[0]))
    for name, one in first[1].items():
        assert torch.equal(one, last[1][name]), name
