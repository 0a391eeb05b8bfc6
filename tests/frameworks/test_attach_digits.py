"""Attached perceptrons learn handwritten digits, whatever the algorithm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kfcomm.torch
from kfcomm.train import Algorithm
from tests.frameworks.ranks import each

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.slow

SIZE, BATCH, EPOCHS, NUM_TRAINED = 4, 8, 8, 1437
ALGORITHMS = [
    Algorithm("ssgd"), Algorithm("adasum"), Algorithm("sma"), Algorithm("ea-sgd"), Algorithm("local-sgd", every=8),
    Algorithm("adasgd", after=200), Algorithm("pair-averaging"), Algorithm("diloco", every=8, lr=0.7, momentum=0.5),
]  # fmt: skip


def digits() -> tuple[Any, Any]:
    from sklearn.datasets import load_digits

    loaded = load_digits()
    order = np.random.default_rng(0).permutation(len(loaded.target))
    return torch.tensor(loaded.data[order] / 16, dtype=torch.float32), torch.tensor(loaded.target[order])


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_mean_of_the_models_recognizes_digits(algorithm: Algorithm) -> None:
    x, y = digits()

    def rank(comm: Any) -> Any:
        generator = torch.Generator().manual_seed(comm.rank)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        kfcomm.torch.attach(model, optimizer, comm, algorithm=algorithm)
        for _ in range(EPOCHS * NUM_TRAINED // (SIZE * BATCH)):
            some = torch.randint(NUM_TRAINED, (BATCH,), generator=generator)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[some]), y[some]).backward()
            optimizer.step()
        found = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        torch.nn.utils.vector_to_parameters(comm.all_reduce(found, op="avg"), model.parameters())
        with torch.no_grad():
            right = model(x[NUM_TRAINED:]).argmax(1) == y[NUM_TRAINED:]
        return float(right.float().mean())

    found = each(rank, SIZE)
    assert len(set(found)) == 1
    assert found[0] > 0.94, f"{algorithm}: {found[0]:.3f}"
