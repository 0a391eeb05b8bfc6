"""`GuardSteps` as a judge: pure, the same bits from the same evidence, and it ends."""

from __future__ import annotations

import math
import random
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.adapt import GuardSteps, StepEvidence, Void
from kfcomm.adapt.levels import Level, exact_log, exact_logs
from kfcomm.errors import ConfigError, GuardFailed

WRONG = (math.nan, math.inf, -math.inf)


def evidence(
    step: int, loss: float | None = 1.0, norm: float = 1.0, *, size: int = 3, batch: Any = None, **of_rank: Any
) -> StepEvidence:
    """Equal numbers on all ranks, but ``loss1=`` and ``norm1=`` of a rank."""
    losses = [of_rank.get(f"loss{rank}", loss) for rank in range(size)]
    norms = [of_rank.get(f"norm{rank}", norm) for rank in range(size)]
    return StepEvidence(step, losses, [one * one for one in norms], batch)


def warmed(guard: GuardSteps, steps: int = 20, **of_ranks: Any) -> GuardSteps:
    for step in range(steps):
        assert guard.judge(evidence(step, **of_ranks)) is None
    return guard


# ---------------------------------------------------------------- what is void


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("what", ["loss1", "norm1"])
def test_not_finite_is_void_in_the_first_step(what: str, wrong: float) -> None:
    guard = GuardSteps()
    void = guard.judge(evidence(0, **{what: wrong}))
    assert void is not None
    assert (void.ranks, void.is_finite, void.step) == ((1,), False, 0)
    assert guard.actions.void
    assert guard.num_void == 1
    assert ("loss is" if what == "loss1" else "gradient norm is") in void.what


def test_all_culprits_and_both_numbers_are_named() -> None:
    void = GuardSteps().judge(evidence(0, loss0=math.nan, norm2=math.inf))
    assert void is not None
    assert void.ranks == (0, 2)
    assert str(void) == "void because of ranks 0, 2: loss is nan and gradient norm is inf"


def test_jump_is_void_after_warmup_only() -> None:
    guard = GuardSteps(warmup=5)
    for step in range(5):
        assert guard.judge(evidence(step, norm1=10.0**step)) is None
    assert guard.judge(evidence(5, norm1=1e12)) == Void(
        5, (1,), "gradient norm is 1e+12, usually 1 (z = 111)", is_finite=True
    )


@pytest.mark.parametrize("what", ["loss", "norm"])
@pytest.mark.parametrize("factor", [10.0, 1e6, 1e300])
def test_jump_beside_a_plateau_names_the_culprit(what: str, factor: float) -> None:
    guard = warmed(GuardSteps(), 500)  # all numbers alike: MAD 0
    norm = factor if what == "loss" else min(factor, 1e150)
    void = guard.judge(evidence(500, **{f"{what}2": norm}))
    assert void is not None
    assert void.ranks == (2,)
    assert void.is_finite


@pytest.mark.parametrize("factor", [0.0, 1e-9, 0.5, 1.0, 1.01, 2.0, 4.0])
def test_after_a_plateau_small_changes_are_good(factor: float) -> None:
    guard = warmed(GuardSteps(), 500)
    assert guard.judge(evidence(500, loss=factor, norm=factor)) is None


def test_jump_of_all_ranks_has_no_culprit() -> None:
    batch = list(range(6))
    guard = warmed(GuardSteps(set_aside_after=1))
    void = guard.judge(evidence(20, norm=1e6, batch=batch))
    assert void is not None
    assert void.ranks == (0, 1, 2)
    assert guard.actions.set_aside == ()


@pytest.mark.parametrize("seed", range(5))
def test_noisy_training_has_no_void_steps_and_jumps_are_found(seed: int) -> None:
    """Log-normal norms that fall, and a loss that falls through zero."""
    rng = np.random.default_rng(seed)
    guard = GuardSteps()
    for step in range(2000):
        fall = 0.998**step
        norms = fall * rng.lognormal(0, 0.4, 4)
        losses = 5 * fall - 2 + rng.normal(0, 0.3, 4)
        is_wrong = step > 100 and step % 97 == 0
        if is_wrong:
            norms[step % 4] *= 1e4
        void = guard.judge(StepEvidence(step, losses.tolist(), (norms**2).tolist()))
        assert (void is not None) == is_wrong, step
        assert void is None or void.ranks == (step % 4,)
    assert guard.num_void == 19


def test_losses_of_zero_have_no_scale() -> None:
    guard = warmed(GuardSteps(), loss=0.0)
    assert guard.judge(evidence(20, loss=1e-9)) is None


def test_negative_losses_are_compared() -> None:
    guard = warmed(GuardSteps(), loss=-3.0)
    assert guard.judge(evidence(20, loss=-30.0)) is None  # better, not worse
    void = guard.judge(evidence(21, loss=-3.0, loss1=300.0))
    assert void is not None
    assert void.ranks == (1,)


def test_ranks_without_numbers_are_left_out() -> None:
    guard = GuardSteps()
    assert guard.judge(StepEvidence(0, [None, None], [1.0, None])) is None
    assert guard.judge(StepEvidence(1, [None, math.nan], [1.0, None])).ranks == (1,)  # type: ignore[union-attr]


# ---------------------------------------------------------------- it ends


def test_new_level_is_accepted_after_most_in_a_row() -> None:
    guard = warmed(GuardSteps(most_in_a_row=4, warmup=3))
    assert [guard.judge(evidence(step, norm=1e4)) is None for step in range(20, 26)] == [False] * 3 + [True] * 3
    assert [guard.judge(evidence(step, norm=norm)) is None for step, norm in ((26, 1e4), (27, 1e9))] == [True, False]


def test_steps_that_are_never_finite_raise_after_most_in_a_row() -> None:
    guard = GuardSteps(most_in_a_row=3)
    for step in range(2):
        assert guard.judge(evidence(step, loss=math.nan)) is not None
    with pytest.raises(GuardFailed, match=r"3 steps in a row are void.*loss is nan"):
        guard.judge(evidence(2, loss=math.nan))


def test_samples_of_culprits_are_set_aside_and_listed() -> None:
    guard = GuardSteps(set_aside_after=2)
    guard.judge(evidence(0, loss1=math.nan, batch=[5, 6, 7, 8, 9, 10]))
    assert guard.actions.set_aside == ()
    assert guard.judge(evidence(1, batch=[8, 9, 10, 11, 12, 13])) is None  # 8 was not to blame
    guard.judge(evidence(2, loss0=math.nan, batch=np.array([7, 8, 9, 10, 11, 12])))
    assert guard.actions.set_aside == (7,)
    assert guard.aside == (7,)
    guard.judge(evidence(3, loss0=math.nan, batch=[8, 1, 2, 3, 4, 5]))
    assert guard.aside == (7, 8)


def test_many_wrong_samples_do_not_exceed_most_in_a_row_while_they_are_set_aside() -> None:
    guard = GuardSteps(set_aside_after=1, most_in_a_row=2)
    for step in range(20):
        guard.judge(evidence(step, loss=math.nan, batch=[3 * step, 3 * step + 1, 3 * step + 2]))
    assert guard.aside == tuple(range(60))


# ---------------------------------------------------------------- actions


def test_rate_falls_and_returns() -> None:
    guard = GuardSteps(lower_rate=(0.5, 4))
    guard.judge(evidence(0))
    assert guard.actions.rate == 1.0
    guard.judge(evidence(1, loss=math.nan))
    rates = [guard.actions.rate]
    for step in range(2, 8):
        guard.judge(evidence(step))
        rates.append(guard.actions.rate)
    assert rates == [0.5, 0.625, 0.75, 0.875, 1.0, 1.0, 1.0]


def test_state_is_kept_now_and_then_and_restored_after_void_steps_in_a_row() -> None:
    guard = GuardSteps(roll_back_after=2, keep_every=3)
    kept = []
    for step in range(7):
        guard.judge(evidence(step))
        kept.append(guard.actions.keep)
    assert kept == [True, False, False, True, False, False, True]
    restored = []
    for step in range(7, 10):
        guard.judge(evidence(step, loss=math.nan))
        restored.append(guard.actions.roll_back)
    assert restored == [False, True, False]


def test_no_roll_back_before_the_first_good_step() -> None:
    guard = GuardSteps(roll_back_after=1, most_in_a_row=3)
    guard.judge(evidence(0, loss=math.nan))
    assert not guard.actions.roll_back


def test_restoring_the_same_state_again_and_again_raises() -> None:
    guard = GuardSteps(roll_back_after=1, keep_every=100)
    guard.judge(evidence(0))
    for step in range(3):
        guard.judge(evidence(step, loss=math.nan))
        assert guard.actions.roll_back
        assert guard.judge(evidence(step)) is None
    with pytest.raises(GuardFailed, match="restoring the kept state 3 times did not help"):
        guard.judge(evidence(9, loss=math.nan))


# ---------------------------------------------------------------- state


@given(seed=st.integers(0, 10_000), cut=st.integers(0, 80))
def test_state_continues_to_the_bit(seed: int, cut: int) -> None:
    """A guard with the state of another, through msgpack, judges as that one does."""
    rng = random.Random(seed)
    options: dict[str, Any] = {"warmup": 5, "window": 20, "lower_rate": (0.5, 7), "roll_back_after": 4, "keep_every": 5}
    first, second = GuardSteps(**options), GuardSteps(**options)
    samples = list(range(40))
    for step in range(100):
        wrong = rng.choice([math.nan, 1e9, *[1.0] * 8])
        rng.shuffle(samples)
        seen = evidence(step, rng.uniform(-1, 3), rng.lognormvariate(0, 0.5), norm1=wrong, batch=samples[:9])
        if step == cut:
            second.load_state_dict(msgpack.unpackb(msgpack.packb(first.state_dict())))
        void = first.judge(seen)
        if step >= cut:
            assert second.judge(seen) == void
            assert second.actions == first.actions
            assert second.state_dict() == first.state_dict()


@given(st.floats(min_value=5e-324, max_value=1.7e308))
def test_exact_log(x: float) -> None:
    assert exact_log(x) == pytest.approx(math.log(x), rel=1e-14, abs=1e-15)
    assert exact_logs(np.array([x, 2.0]))[0] == exact_log(x)


def test_z_score_is_that_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    values = rng.lognormal(1, 1, (50, 4))
    level = Level(40)
    for row in values:
        level.add(row.tolist())
    logs = np.log(values[-40:])
    middle = np.median(logs)
    mad = np.median(np.abs(logs - middle))
    assert level.z(100.0) == pytest.approx((math.log(100) - middle) / (1.4826 * mad), rel=1e-12)
    assert level.median == np.median(values[-40:])


def test_z_score_of_signed_numbers() -> None:
    values = np.random.default_rng(1).normal(size=(50, 20))
    level = Level(50)
    for row in values:
        level.add(row.tolist())
    kept = np.sort(values)[:, [(2 * k + 1) * 20 // 32 for k in range(16)]]
    scale = np.median(np.abs(kept))
    found = np.sign(kept) * np.log(1 + np.abs(kept) / scale)
    mad = np.median(np.abs(found - np.median(found)))
    wanted = (np.log(1 + 9.0 / scale) - np.median(found)) / (1.4826 * mad)
    assert level.z(9.0) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"z": 0}, {"z": math.nan}, {"z": True}, {"z": "6"}, {"window": 1}, {"warmup": 1.5}, {"most_in_a_row": 0},
        {"lower_rate": 0.5}, {"lower_rate": (1.5, 10)}, {"lower_rate": (0.5, 0)}, {"lower_rate": (0.5, 1.5)},
        {"roll_back_after": -1}, {"set_aside_after": 1.5}, {"keep_every": 0}, {"roll_back_after": 0},
        {"set_aside_after": 0}, {"window": True},
    ],
)  # fmt: skip
def test_wrong_options(options: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        GuardSteps(**options)
