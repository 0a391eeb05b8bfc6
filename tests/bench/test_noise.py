"""False changes on a noisy network: what counts as one, and noise that is over afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from bench.netlab.noise import changes, noisy
from bench.netlab.steps import Step


def test_a_change_is_a_step_with_another_strategy() -> None:
    assert changes(["ring", "ring", "star", "star", "ring"]) == [2, 4]
    assert changes(["ring"]) == []


def test_a_slow_link_is_as_before_at_the_next_step() -> None:
    rates: list[tuple[str, float]] = []
    lab = SimpleNamespace(hosts=[SimpleNamespace(name=name) for name in ("h0", "h1")], set_rate=_append(rates))
    with noisy(cast(Any, lab), 100.0, seed=3) as noise:
        for number in range(400):
            noise.before_step(number, Step("adaptive", 4))
    slow, restored = rates[::2], rates[1::2]
    assert len(slow) > 5
    assert all(40.0 <= rate <= 90.0 for _, rate in slow)
    assert restored == [(name, 100.0) for name, _ in slow][: len(restored)]


def _append(found: list[tuple[str, float]]) -> Any:
    return lambda name, rate: found.append((name, rate))
