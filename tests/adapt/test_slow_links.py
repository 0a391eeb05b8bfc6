"""AvoidSlowLinks on scripted networks: when it looks, what it sets, and when it takes that back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kfcomm.adapt import AvoidSlowLinks, Policy
from kfcomm.communicator import Communicator
from kfcomm.errors import ConfigError
from kfcomm.strategies import packed_trees
from kfcomm.types import Layout
from tests.adapt.scripted import Cost, adapted
from tests.conformance.worlds import on_loop

SIZE = 4
DROPS_AT = 12


@dataclass
class Measured:
    """What a probe would say."""

    bandwidth: Any


def links(slow: int | None) -> Any:
    """100 MB/s each, but a quarter of it to and from one host."""
    bandwidth = np.full((SIZE, SIZE), 100e6)
    if slow is not None:
        bandwidth[slow, :] = bandwidth[:, slow] = 25e6
    np.fill_diagonal(bandwidth, np.inf)
    return bandwidth


def falling(with_trees: float, with_ring: float = 4.0, *, until: int = 10_000) -> Cost:
    """The network takes a second for a step, and longer from `DROPS_AT` on: how much, depends on the strategy."""

    def cost(rank: int, step: int, strategy: str) -> tuple[float, float]:
        is_slow = DROPS_AT <= step < until
        return 1.0, (with_trees if strategy == "packed_trees" else with_ring) if is_slow else 1.0

    return cost


def policy(looks: list[int], *, slow: Callable[[int], int | None] = lambda look: 2, **options: Any) -> Any:
    async def measure(comm: Communicator) -> Measured:
        await comm.barrier()
        looks.append(comm.rank)
        return Measured(links(slow(looks.count(comm.rank))))

    return lambda comm: [AvoidSlowLinks(measure=measure, **{"least_nbytes": 1000, **options})]


@on_loop
async def test_a_link_that_drops() -> None:
    """Found in the second low step; the links are measured, and the trees set, at the end of the step after it."""
    looks: list[int] = []
    decisions, in_force = await adapted(policy(looks), cost=falling(1.5), steps=40, strategy="ring")
    assert sorted(looks) == [0, 1, 2, 3]
    found, changed, kept = decisions
    assert found.step == DROPS_AT + 1
    assert found.what == "4 of 4 ranks find the network slower: measures the links"
    assert found.evidence["MB/s"] == pytest.approx(1000 / 4 / 1e6)
    assert found.evidence["reference"] == pytest.approx(1000 / 1e6, rel=0.04)
    assert found.evidence["votes"] == (0, 1, 2, 3)
    assert found.evidence["most waited for"] == "rank 0"
    assert (changed.step, changed.what) == (DROPS_AT + 2, "strategy ring -> packed_trees")
    assert changed.evidence == {"slowest link": "0 -> 2", "its MB/s": 25.0, "median MB/s": 62.5}
    assert kept.what == "keeps packed_trees, which is 2.67 times as fast"
    assert in_force == ["ring"] * (DROPS_AT + 2) + ["packed_trees"] * (40 - DROPS_AT - 2)
    assert "step 13: AvoidSlowLinks: 4 of 4 ranks find the network slower" in str(found)


@on_loop
async def test_a_link_that_recovers() -> None:
    looks: list[int] = []
    decisions, in_force = await adapted(
        policy(looks, slow=lambda look: 2 if look == 1 else None, rest=8),
        cost=falling(1.5, until=40), steps=60, strategy="ring",
    )  # fmt: skip
    assert len(looks) == 2 * SIZE
    again = next(one for one in decisions if "faster: measures" in one.what)
    assert again.step == 41
    digests = {packed_trees(Layout.even(SIZE), links(slow)).digest for slow in (2, None)}
    assert len(digests) == 2
    # no faster than what was there: it goes back
    assert any(one.what.startswith("goes back to packed_trees") for one in decisions)
    assert in_force[-1] == "packed_trees"


@on_loop
async def test_trees_that_do_not_help_are_taken_back() -> None:
    looks: list[int] = []
    decisions, in_force = await adapted(policy(looks, rest=15), cost=falling(4.0), steps=40, strategy="ring")
    what = [one.what for one in decisions]
    assert what[1] == "strategy ring -> packed_trees"
    assert what[2] == "goes back to ring: packed_trees is no faster"
    assert what[3] == "strategy packed_trees -> ring"
    assert in_force[-1] == "ring"
    assert sorted(looks) == [0, 1, 2, 3]  # the slow state is the reference now


@on_loop
async def test_one_rank_alone_is_not_believed() -> None:
    def one_slow(rank: int, step: int, strategy: str) -> tuple[float, float]:
        return 1.0, 4.0 if rank == 1 and step >= DROPS_AT else 1.0

    looks: list[int] = []
    decisions, in_force = await adapted(policy(looks), cost=one_slow, steps=30, strategy="ring")
    assert not decisions
    assert not looks
    assert set(in_force) == {"ring"}


@on_loop
async def test_a_rank_that_computes_for_long_is_not_the_network() -> None:
    def late(rank: int, step: int, strategy: str) -> tuple[float, float]:
        own_s = 8.0 if rank == 1 and step >= DROPS_AT else 1.0
        longest_s = 8.0 if step >= DROPS_AT else 1.0
        return own_s, 1.0 + longest_s - own_s

    decisions, _ = await adapted(policy([]), cost=late, steps=30)
    assert not decisions


@on_loop
async def test_what_fits_already_is_kept_and_not_measured_again_too_soon() -> None:
    looks: list[int] = []
    fitting = packed_trees(Layout.even(SIZE), links(2))

    def worse(rank: int, step: int, strategy: str) -> tuple[float, float]:
        return 1.0, 1.2**step

    decisions, in_force = await adapted(policy(looks, rest=10), cost=worse, steps=40, strategy=fitting)
    assert {one.what for one in decisions} >= {"keeps packed_trees, which fits the links"}
    begun = [one.step for one in decisions if "measures the links" in one.what]
    assert len(begun) == len(looks) / SIZE > 1
    assert all(later - earlier >= 10 for earlier, later in zip(begun, begun[1:], strict=False))
    assert set(in_force) == {"packed_trees"}


@on_loop
async def test_little_messages_say_nothing_of_links() -> None:
    decisions, _ = await adapted(policy([], least_nbytes=1001), cost=falling(1.5), steps=30, strategy="ring")
    assert not decisions


@on_loop
async def test_a_probe_that_fails_leaves_the_job_as_it_is() -> None:
    async def measure(comm: Communicator) -> Measured:
        raise OSError("rank 2 does not answer")

    decisions, in_force = await adapted(
        lambda comm: [AvoidSlowLinks(measure=measure, least_nbytes=1)], cost=falling(1.5), steps=30, strategy="ring"
    )
    assert decisions[-1].what.startswith(
        "switched off: it raised on every rank: OSError in after_step: rank 2 does not"
    )
    assert set(in_force) == {"ring"}


@on_loop
async def test_the_program_changes_the_strategy_itself_meanwhile() -> None:
    """What was compared is gone: no verdict on the trees, and none on what the program has set."""

    class Program(Policy):
        def after_step(self, ctx: Any) -> None:
            if ctx.step == DROPS_AT + 3:
                ctx.set_strategy("star")

    decisions, in_force = await adapted(
        lambda comm: [*policy([])(comm), Program()], cost=falling(1.5), steps=40, strategy="ring"
    )
    assert in_force[-1] == "star"
    assert [one.policy for one in decisions] == ["AvoidSlowLinks", "AvoidSlowLinks", "Program"]


@pytest.mark.parametrize(
    ("options", "says"), [({"check": 0}, "check is at least 1"), ({"rest": 5}, "rest is at least check")]
)
def test_arguments_out_of_range(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        AvoidSlowLinks(**options)
