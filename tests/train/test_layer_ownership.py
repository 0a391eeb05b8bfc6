"""K-FAC's owners: fair, the same on every rank; and preconditioned gradients as one process would make them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.errors import ConfigError
from kfcomm.testing import run_threads, sync_world, world
from kfcomm.train import Layer, LayerOwnership, owners, preconditioned
from kfcomm.train.kfac import cost


def test_owners_by_hand() -> None:
    layers = {"a": (4, 2), "b": (5, 1), "c": (3, 3), "d": (2, 2)}
    # costs 72, 126, 54, 16: b to 0, a to 1, c to 1 (72 < 126), d to 0 (126 = 126: the first)
    assert owners(layers, 2) == {"a": (1, 1), "b": (0, 0), "c": (1, 1), "d": (0, 0)}
    # in a group of both: b's 125 to 0, its 1 to 1; a's 64 and 8 to 1, and c's 27 and 27 to it (127); d's to 0, 1
    assert owners(layers, 2, group_size=2) == {"a": (1, 1), "b": (0, 1), "c": (1, 1), "d": (0, 1)}


@given(st.dictionaries(st.text(min_size=1), st.tuples(st.integers(1, 50), st.integers(1, 50)), max_size=20), st.data())
def test_work_is_balanced_between_ranks(layers: Any, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 2, 4, 8]))
    of = owners(layers, size)
    loads = [sum(cost(layers[name]) for name, ranks in of.items() if ranks[0] == rank) for rank in range(size)]
    largest = max((cost(one) for one in layers.values()), default=0)
    assert max(loads) <= sum(loads) / size + largest, "the bound of giving the largest first to who has least"
    shuffled = dict(data.draw(st.permutations(list(layers.items()))))
    assert owners(shuffled, size) == of


def layers(rank: int) -> dict[str, Layer]:
    rng = np.random.default_rng(7)
    shared = {name: rng.standard_normal(shape) for name, shape in (("one", (4, 3)), ("two", (2, 5)), ("three", (6, 6)))}
    mine = np.random.default_rng(rank)
    made = {}
    for name, gradient in shared.items():
        outer, inner = (mine.standard_normal((8, count)) for count in gradient.shape)
        made[name] = Layer(gradient, outer.T @ outer / 8, inner.T @ inner / 8)
    return made


def expected(size: int) -> dict[str, Any]:
    ranks = [layers(rank) for rank in range(size)]
    found = {}
    for name, first in ranks[0].items():
        outer = sum(one[name].outer for one in ranks) / size + 0.1 * np.eye(len(first.outer))
        inner = sum(one[name].inner for one in ranks) / size + 0.1 * np.eye(len(first.inner))
        found[name] = np.linalg.inv(outer) @ first.gradient @ np.linalg.inv(inner)
    return found


def test_every_rank_gets_what_one_process_would_make() -> None:
    with sync_world(3) as comms:
        found = run_threads(comms, lambda comm: LayerOwnership(comm, 0.1).precondition(layers(comm.rank)).wait())
    for one in found:
        for name, truth in expected(3).items():
            np.testing.assert_allclose(one[name], truth, rtol=1e-9, atol=1e-9)
            assert np.array_equal(one[name], found[0][name])


def test_the_formula_with_identities_divides_by_damping() -> None:
    gradient = np.arange(6.0).reshape(2, 3)
    assert preconditioned(gradient, np.eye(2), np.eye(3), 1.0) == pytest.approx(gradient / 4)


@pytest.mark.asyncio
async def test_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="do not divide"):
        owners({}, 4, group_size=3)
    async with world(1) as comms:
        with pytest.raises(ConfigError, match="damping"):
            LayerOwnership(comms[0], 0)
