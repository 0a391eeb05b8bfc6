"""A batch that follows the noise scale beside fixed ones: what counts as reached, and that it runs."""

from __future__ import annotations

from typing import Any

import pytest

from bench.netlab.batches import Figure, figure, measured, table, verdict
from bench.netlab.batching import ADAPTIVE, Task, learn_all
from bench.netlab.hosts import even
from bench.netlab.lab import Netlab
from kfcomm.testing import run_ranks, world
from kfcomm.world.communicator import Communicator


def ran(batch: int, time_s: float, *, is_reached: bool = True) -> Figure:
    return Figure(batch, time_s, time_s, 100, ((0, 16),), 0.8, is_reached)


@pytest.mark.parametrize(
    ("adaptive", "others", "reached"),
    [
        (ran(ADAPTIVE, 10.9), [ran(64, 10.0), ran(16, 14.3)], True),
        (ran(ADAPTIVE, 11.1), [ran(64, 10.0), ran(16, 20.0)], False),  # beside the best
        (ran(ADAPTIVE, 10.0), [ran(64, 10.0), ran(16, 12.9)], False),  # beside the worst
        (ran(ADAPTIVE, 10.0, is_reached=False), [ran(64, 10.0), ran(16, 20.0)], False),
        (ran(ADAPTIVE, 10.0), [ran(64, 12.0), ran(16, 13.0, is_reached=False)], True),
        (ran(ADAPTIVE, 10.0), [ran(64, 20.0, is_reached=False)], True),
    ],
    ids=["reached", "slower than the best", "as slow as the worst", "never", "the worst never", "no other"],
)
def test_outcome_reaches_ratio_and_excess(adaptive: Figure, others: list[Figure], reached: bool) -> None:
    found = verdict([*others, adaptive])
    assert found["reached"] is reached
    assert (found["worst"], found["worst_is_reached"]) == (others[-1].batch, others[-1].is_reached)
    assert "by noise scale" in table([*others, adaptive])


def test_a_step_that_was_disturbed_counts_in_one_of_the_two_times() -> None:
    run: dict[str, Any] = {
        "batch": ADAPTIVE, "batches": [16, 16, 16, 32, 32], "steps_s": [1.0, 9.0, 1.0, 2.0, 2.0],
        "tried": [(2, 0.1), (4, 0.7), (5, 0.9)],
    }  # fmt: skip
    found = figure(run, 0.8)
    assert (found.time_s, found.steady_s, found.num_steps) == (15.0, 7.0, 5)
    assert found.changes == ((0, 16), (3, 32))
    assert found.is_reached
    assert not figure(run, 0.81).is_reached


@pytest.mark.asyncio
@pytest.mark.slow
async def test_all_ranks_learn_with_the_same_batches() -> None:
    """One that is fixed from its second step on, and one that follows; it ends when the accuracy is there."""

    async def rank(comm: Communicator) -> list[dict[str, Any]]:
        return await learn_all(comm, Task(0.65, 1e9, 0.0, 64), [128, ADAPTIVE])

    async with world(2) as comms:
        of_ranks = await run_ranks(comms, rank)
    assert [run["batches"] for run in of_ranks[0]] == [run["batches"] for run in of_ranks[1]]
    fixed, adaptive = of_ranks[0]
    assert set(fixed["batches"][2:]) == {128}
    assert adaptive["batches"][:10] == [16] * 10
    assert max(adaptive["batches"]) > 16
    for run in of_ranks[0]:
        assert figure(run, 0.65).is_reached


@pytest.mark.slow
@pytest.mark.netns
def test_it_runs_across_hosts() -> None:
    with Netlab(even(2, 200e6), network="10.80.4.0/24") as lab:
        found = measured(lab, [256, ADAPTIVE], 0.3, 60.0)
    assert [one.batch for one in found] == [256, ADAPTIVE]
    assert all(one.is_reached for one in found)
