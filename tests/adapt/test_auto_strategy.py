"""AutoStrategy on scripted networks: what it tries, keeps, and when it looks again."""

from __future__ import annotations

from typing import Any

import pytest

from kfcomm.adapt import AutoStrategy, Policy
from kfcomm.errors import ConfigError
from tests.adapt.scripted import adapted, words

SECONDS = {"ring": 2.0, "binary_tree": 3.0, "star": 9.0, "clique": 1.0}


def network(rank: int, step: int, strategy: str) -> tuple[float, float]:
    """One rank is at its own work for longer, which is not due to the strategy."""
    own_s = 2.0 if rank == 3 else 0.5
    return own_s, SECONDS[strategy] + 2.0 - own_s


@pytest.mark.asyncio
async def test_it_keeps_the_fastest() -> None:
    decisions, in_force = await adapted(
        lambda comm: [AutoStrategy(("star", "ring", "clique", "binary_tree"), rest=5)], cost=network, steps=60
    )
    what = [one.what for one in decisions]
    assert what[0] == "tries star, ring, clique, binary_tree: first trials"
    assert what[-1] == "keeps clique, the fastest" or what[-2] == "keeps clique, the fastest"
    assert set(in_force[20:]) == {"clique"}
    # a round is 4 steps each, those that take more than twice the best 3; the others are out after it
    assert in_force.index("clique", 12) <= 16
    kept = next(one for one in decisions if one.what.startswith("keeps"))
    assert kept.evidence["clique MB/s"] == pytest.approx(4.0)
    assert kept.evidence["ring MB/s"] == pytest.approx(2.0)
    assert in_force.count("star") <= 5


@pytest.mark.asyncio
async def test_it_tries_again_when_the_network_has_changed() -> None:
    def changing(rank: int, step: int, strategy: str) -> tuple[float, float]:
        slower = 4.0 if step >= 40 and strategy == "clique" else 1.0
        return 1.0, SECONDS[strategy] * slower

    decisions, in_force = await adapted(
        lambda comm: [AutoStrategy(("ring", "clique"), rest=10)], cost=changing, steps=80
    )
    assert in_force[39] == "clique"
    assert in_force[-1] == "ring"
    again = [one for one in decisions if one.what.startswith("tries")]
    assert len(again) == 2
    assert again[1].step == 42  # the third step that costs more
    assert again[1].what == "tries ring, clique: the network is slower"


@pytest.mark.asyncio
async def test_it_does_not_look_again_before_it_has_rested() -> None:
    def falling(rank: int, step: int, strategy: str) -> tuple[float, float]:
        return 1.0, 1.5**step

    decisions, _ = await adapted(lambda comm: [AutoStrategy(("ring", "clique"), rest=30)], cost=falling, steps=80)
    begun = [one.step for one in decisions if one.what.startswith("tries")]
    ended = [one.step for one in decisions if one.what.startswith("keeps")]
    assert len(begun) > 1
    assert all(after - before >= 30 for before, after in zip(ended, begun[1:], strict=False))


@pytest.mark.asyncio
async def test_equal_graphs_are_tried_once_and_one_is_simply_set() -> None:
    decisions, in_force = await adapted(
        lambda comm: [AutoStrategy(("ring", "ring"))], cost=network, steps=6, strategy="star"
    )
    assert words(decisions) == [
        (0, "AutoStrategy", "tries ring: first trials"),
        (0, "AutoStrategy", "strategy star -> ring"),
        (3, "AutoStrategy", "keeps ring, the fastest"),
    ]
    assert set(in_force) == {"ring"}


@pytest.mark.asyncio
async def test_without_collectives_nothing_is_learned() -> None:
    def idle(rank: int, step: int, strategy: str) -> tuple[float, float]:
        return 1.0, 0.0

    decisions, in_force = await adapted(lambda comm: [AutoStrategy(("ring", "clique"))], cost=idle, steps=20)
    assert len(decisions) == 2
    assert set(in_force) == {"ring"}


@pytest.mark.asyncio
async def test_another_policy_changes_the_strategy_meanwhile() -> None:
    class Meddler(Policy):
        def after_step(self, ctx: Any) -> None:
            if ctx.step in (1, 4):
                ctx.set_strategy("star")

    _, in_force = await adapted(lambda comm: [AutoStrategy(("ring", "clique")), Meddler()], cost=network, steps=40)
    assert in_force[-1] == "clique"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"candidates": ()}, "one or more strategies"),
        ({"candidates": "ring"}, "one or more strategies, not 'ring'"),
        ({"candidates": ("rnig",)}, "unknown strategy 'rnig'; did you mean ring"),
        ({"rest": 0}, "rest is at least 1 step, not 0"),
        ({"steps": 2}, "at least 3 steps"),
    ],
)
def test_arguments_that_cannot_work(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        AutoStrategy(**arguments)
