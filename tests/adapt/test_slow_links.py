"""AvoidSlowLinks on scripted networks: when it looks, what it sets, and when it takes that back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kfcomm.adapt import AvoidSlowLinks, Policy
from kfcomm.adapt.survey import fitting
from kfcomm.errors import ConfigError
from kfcomm.probe import Probe
from kfcomm.types import Layout
from kfcomm.world.communicator import Communicator
from tests.adapt.scripted import NBYTES, Cost, adapted

SIZE = 4
DROPS_AT = 12


def links(slow: int | None) -> Probe:
    """100 MB/s each, but a quarter of it to and from one host."""
    bandwidth = np.full((SIZE, SIZE), 100e6)
    if slow is not None:
        bandwidth[slow, :] = bandwidth[:, slow] = 25e6
    return Probe(Layout.even(SIZE, SIZE), np.full((SIZE, SIZE), 1e-4), bandwidth)


RING_TAKES_S = 4.0
TRIED = ("binary_tree_star", "packed_trees", "tree")
"""What fits these links, by prediction, the fastest first."""


def falling(*seconds: float, until: int = 10_000) -> Cost:
    """The network takes a second for a step, and longer from `DROPS_AT` on: for the first that are tried, so many."""
    taken_s = dict(zip(TRIED, seconds, strict=False))

    def cost(rank: int, step: int, strategy: str) -> tuple[float, float]:
        return 1.0, taken_s.get(strategy, RING_TAKES_S) if DROPS_AT <= step < until else 1.0

    return cost


def policy(looks: list[int], *, slow: Callable[[int], int | None] = lambda look: 2, **options: Any) -> Any:
    async def measure(comm: Communicator) -> Probe:
        await comm.barrier()
        looks.append(comm.rank)
        return links(slow(looks.count(comm.rank)))

    return lambda comm: [AvoidSlowLinks(measure=measure, **options)]


def test_fitting_strategies_are_those_predicted_to_be_fast() -> None:
    fits = [one.name for one in fitting(links(2), NBYTES)]
    assert fits == list(TRIED)
    large = Layout.even(65, 65)
    probe = Probe(large, np.full((65, 65), 1e-4), np.full((65, 65), 1e8))
    assert [one.name for one in fitting(probe, NBYTES)] == ["packed_trees"]
    alone = Probe(Layout.even(1), np.zeros((1, 1)), np.ones((1, 1)))
    assert len(fitting(alone, NBYTES)) >= 1


@pytest.mark.asyncio
async def test_a_link_that_drops() -> None:
    """Found in the third low step; the links are measured, and graphs set, at the end of the step after it."""
    looks: list[int] = []
    decisions, in_force = await adapted(policy(looks), cost=falling(1.5, 2.0), steps=40, strategy="ring")
    assert sorted(looks) == [0, 0, 1, 1, 2, 2, 3, 3]  # what leads to a change is measured twice
    found, changed, kept = decisions
    assert (found.step, found.what) == (DROPS_AT + 2, "the network is slower: measures the links")
    assert found.evidence["MB/s"] == pytest.approx(1.0)
    assert found.evidence["before"] == pytest.approx(4.0)
    assert found.evidence["noise"] == pytest.approx(0.05)
    assert found.evidence["most waited for"] == "rank 0"
    assert (changed.step, changed.what) == (DROPS_AT + 3, "strategy ring -> binary_tree_star")
    assert changed.evidence["slowest link"] == "0 -> 2"
    assert changed.evidence["its MB/s"] == 25.0
    assert changed.evidence["predicted gain"] > 1.1
    assert kept.what == "keeps binary_tree_star, 2.67 times as fast as before"
    assert kept.evidence == pytest.approx({"MB/s before": 1.0, "binary_tree_star": 8 / 3})
    assert in_force == ["ring"] * (DROPS_AT + 3) + ["binary_tree_star"] * (40 - DROPS_AT - 3)
    assert "step 14: AvoidSlowLinks: the network is slower" in str(found)


@pytest.mark.parametrize("seconds", [(4.0, 1.5), (1.5, 4.0), (5.0, 1.0)])
@pytest.mark.asyncio
async def test_a_prediction_that_does_not_hold_is_followed_by_the_next(seconds: tuple[float, float]) -> None:
    decisions, in_force = await adapted(policy([]), cost=falling(*seconds), steps=60, strategy="ring")
    first_good = next(name for name, took_s in zip(TRIED, seconds, strict=False) if took_s < 3.0)
    assert in_force[-1] == first_good
    times = f"{RING_TAKES_S / min(seconds):.2f}"
    assert f"keeps {first_good}, {times} times as fast as before" in [one.what for one in decisions]


@pytest.mark.asyncio
async def test_a_link_that_recovers() -> None:
    looks: list[int] = []
    decisions, in_force = await adapted(
        policy(looks, slow=lambda look: 2 if look <= 2 else None, rest=12),
        cost=falling(1.5, 2.0, until=40), steps=90, strategy="ring",
    )  # fmt: skip
    again = next(one for one in decisions if "faster: measures" in one.what)
    assert again.step == 43  # the fourth step that costs a third less
    # all are as fast then: nothing is 5 % faster than what was there, to which it goes back
    assert any(one.what == "goes back to binary_tree_star: nothing is faster" for one in decisions)
    assert in_force[-1] == "binary_tree_star"


@pytest.mark.asyncio
async def test_strategy_without_gain_is_undone() -> None:
    looks: list[int] = []
    decisions, in_force = await adapted(policy(looks), cost=falling(4.0, 5.0), steps=60, strategy="ring")
    what = [one.what for one in decisions]
    assert what[1] == "strategy ring -> binary_tree_star"
    assert what[-2:] == ["goes back to ring: nothing is faster", "strategy tree -> ring"]
    assert in_force[-1] == "ring"
    assert len(looks) == 2 * SIZE  # the slow state is the reference now


@pytest.mark.asyncio
async def test_unchanged_links_keep_the_strategy() -> None:
    looks: list[int] = []
    decisions, in_force = await adapted(
        policy(looks, slow=lambda look: None), cost=falling(1.5, 1.5), steps=60, strategy="clique"
    )
    assert [one.what for one in decisions] == [
        "the network is slower: measures the links", "keeps clique, which fits the links",
    ]  # fmt: skip
    assert len(looks) == SIZE
    assert set(in_force) == {"clique"}


@pytest.mark.asyncio
async def test_a_change_needs_both_probes() -> None:
    decisions, in_force = await adapted(
        policy([], slow=lambda look: 2 if look == 1 else None), cost=falling(1.5, 1.5), steps=40, strategy="clique"
    )
    assert decisions[-1].what == "keeps clique, which fits the links"
    assert set(in_force) == {"clique"}


@pytest.mark.asyncio
async def test_short_stalls_are_no_change() -> None:
    def stalling(rank: int, step: int, strategy: str) -> tuple[float, float]:
        return 1.0, 9.0 if step % 20 in (12, 13) else 1.0

    decisions, _ = await adapted(policy([]), cost=stalling, steps=100, strategy="ring")
    assert not decisions


@pytest.mark.asyncio
async def test_one_rank_alone_is_not_believed() -> None:
    def one_slow(rank: int, step: int, strategy: str) -> tuple[float, float]:
        return 1.0, 4.0 if rank == 1 and step >= DROPS_AT else 1.0

    looks: list[int] = []
    decisions, in_force = await adapted(policy(looks), cost=one_slow, steps=30, strategy="ring")
    assert not decisions
    assert not looks
    assert set(in_force) == {"ring"}


@pytest.mark.asyncio
async def test_a_rank_that_computes_for_long_is_not_the_network() -> None:
    def late(rank: int, step: int, strategy: str) -> tuple[float, float]:
        own_s = 8.0 if rank == 1 and step >= DROPS_AT else 1.0
        longest_s = 8.0 if step >= DROPS_AT else 1.0
        return own_s, 1.0 + longest_s - own_s

    decisions, _ = await adapted(policy([]), cost=late, steps=30)
    assert not decisions


@pytest.mark.asyncio
async def test_fitting_strategy_is_kept_and_not_measured_again_too_soon() -> None:
    looks: list[int] = []
    fits = links(2).packed_trees()

    def worse(rank: int, step: int, strategy: str) -> tuple[float, float]:
        return 1.0, 1.2**step

    decisions, in_force = await adapted(policy(looks, rest=12), cost=worse, steps=40, strategy=fits)
    assert {one.what for one in decisions} >= {"keeps packed_trees, which fits the links"}
    begun = [one.step for one in decisions if "measures the links" in one.what]
    assert len(begun) == len(looks) / SIZE > 1
    assert all(later - earlier >= 12 for earlier, later in zip(begun, begun[1:], strict=False))
    assert set(in_force) == {"packed_trees"}


@pytest.mark.asyncio
async def test_little_messages_say_nothing_of_links() -> None:
    decisions, _ = await adapted(policy([], least_nbytes=NBYTES + 1), cost=falling(1.5, 1.5), steps=30, strategy="ring")
    assert not decisions


@pytest.mark.asyncio
async def test_a_probe_that_fails_leaves_the_job_as_it_is() -> None:
    async def measure(comm: Communicator) -> Probe:
        raise OSError("rank 2 does not answer")

    decisions, in_force = await adapted(
        lambda comm: [AvoidSlowLinks(measure=measure)], cost=falling(1.5, 1.5), steps=30, strategy="ring"
    )
    assert decisions[-1].what.startswith(
        "switched off: it raised on every rank: OSError in after_step: rank 2 does not"
    )
    assert set(in_force) == {"ring"}


@pytest.mark.asyncio
async def test_the_program_changes_the_strategy_itself_meanwhile() -> None:
    """Nothing is left to compare: no decision on what was set, nor on the strategy that the program has set."""

    class Program(Policy):
        def after_step(self, ctx: Any) -> None:
            if ctx.step == DROPS_AT + 4:
                ctx.set_strategy("clique")

    decisions, in_force = await adapted(
        lambda comm: [*policy([])(comm), Program()], cost=falling(1.5, 1.5), steps=40, strategy="ring"
    )
    assert in_force[-1] == "clique"
    assert [one.policy for one in decisions] == ["AvoidSlowLinks", "AvoidSlowLinks", "Program"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"steps": 1}, "steps is at least 2, not 1"),
        ({"rest": 5}, "rest is at least 4 times steps, 12, not 5"),
        ({"false_alarms": 0}, "false_alarms is a rate above 0 and below 1, not 0"),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        AvoidSlowLinks(**options)
