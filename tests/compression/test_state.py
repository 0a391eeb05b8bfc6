"""State of compressors: a run that is saved and loaded continues; errors are not lost when ranks change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kfcomm.compression import PowerSGD, TopK
from kfcomm.errors import ConfigError
from kfcomm.testing import run_threads, sync_world
from tests.train.merging import converted

MAKERS: dict[str, Callable[[], Any]] = {
    "power": lambda: PowerSGD(2, begin_after=2, seed=5),
    "top": lambda: TopK(0.1),
}


def gradients(rank: int, step: int) -> dict[str, Any]:
    random = np.random.default_rng((rank, step))
    found = {"b": random.standard_normal((12, 20)), "a": random.standard_normal((16, 3, 5)), "v": np.ones(3) * rank}
    # One name comes later: its Q is drawn after the state was saved.
    return found if step < 5 else found | {"late": random.standard_normal((12, 20))}


def run(size: int, compressors: list[Any], steps: range) -> list[Any]:
    def rank(comm: Any) -> list[Any]:
        return [compressors[comm.rank].average(comm, gradients(comm.rank, step)) for step in steps]

    with sync_world(size) as comms:
        return run_threads(comms, rank)


@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("kind", MAKERS)
def test_saved_and_loaded_compressor_continues_as_the_original(kind: str, at: int) -> None:
    ones, others = ([MAKERS[kind]() for _ in range(2)] for _ in range(2))
    run(2, ones, range(at))
    for one, other in zip(ones, others, strict=True):
        other.load_state_dict(copy.deepcopy(one.state_dict()))
    for mine, theirs in zip(run(2, ones, range(at, 8)), run(2, others, range(at, 8)), strict=True):
        for step, other in zip(mine, theirs, strict=True):
            assert step.keys() == other.keys()
            assert all(np.array_equal(step[name], other[name]) for name in step)


@pytest.mark.parametrize("sizes", [(3, 2), (2, 4)])
@pytest.mark.parametrize("kind", MAKERS)
def test_errors_are_kept_when_the_ranks_change(kind: str, sizes: tuple[int, int]) -> None:
    """Σ over all steps of size · average + the errors in the end is the sum of all gradients that were given."""
    old, new = ([MAKERS[kind]() for _ in range(size)] for size in sizes)
    total = np.zeros((12, 20))
    for size, compressors, steps in ((sizes[0], old, range(3, 7)), (sizes[1], new, range(7, 12))):
        if compressors is new:
            states = converted([one.state_dict() for one in old], old[0].merging(), len(new))
            for one, state in zip(new, states, strict=True):
                one.load_state_dict(state)
        given = sum(gradients(rank, step)["b"] for step in steps for rank in range(size))
        total += given - size * sum(step["b"] for step in run(size, compressors, steps)[0])
    left: Any = sum(one.errors.of("b") for one in new)
    np.testing.assert_allclose(left, total, rtol=0, atol=1e-12)


def test_state_of_matrices_of_another_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match="has rank 4; the state is of one with rank 2"):
        PowerSGD(4).load_state_dict(PowerSGD(2).state_dict())
