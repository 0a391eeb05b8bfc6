"""The noise scale over changing batches, and the coverage of its confidence interval, in simulation."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.errors import ConfigError
from kfcomm.train import NoiseScale
from tests.train.noises import Gradients


def scales(truth: Gradients, batch: float, ranks: int, *, steps: int, number: int, seed: int = 0) -> list[NoiseScale]:
    """So many estimates, each from ``steps`` measurements."""
    local, both = truth.draw(np.random.default_rng(seed), batch, ranks, (number, steps))
    found = [NoiseScale() for _ in range(number)]
    for one, *norms in zip(found, local.tolist(), both.tolist(), strict=True):
        for norm, mean in zip(*norms, strict=True):
            one.update(norm, mean, batch / ranks, batch)
    return found


@pytest.mark.parametrize("steps", [5, 30, 100])
@pytest.mark.parametrize(
    ("truth", "batch", "ranks"),
    [
        (Gradients(10.0, 1000.0), 32, 4),
        (Gradients(10.0, 1000.0), 800, 2),
        (Gradients(1.0, 1000.0), 8, 8),  # a batch far below the noise scale: |G|² is hard to see
        (Gradients(4.0, 40.0, dimension=20), 16, 4),
    ],
)
def test_an_interval_of_95_percent_covers_the_truth_that_often(
    truth: Gradients, batch: int, ranks: int, steps: int
) -> None:
    intervals = [one.interval() for one in scales(truth, batch, ranks, steps=steps, number=600)]
    covers = np.mean([one is not None and one[0] <= truth.scale <= one[1] for one in intervals])
    assert 0.92 <= covers <= 0.985  # chance alone: 0.95 ± 0.009


@pytest.mark.parametrize(("z", "wanted"), [(1.0, 0.683), (1.645, 0.90), (2.576, 0.99)])
def test_the_quantile_is_that_of_the_normal_distribution(z: float, wanted: float) -> None:
    truth = Gradients(10.0, 1000.0)
    found = [one.interval(z) or (0.0, 0.0) for one in scales(truth, 64, 4, steps=60, number=1000)]
    covers = np.mean([low <= truth.scale <= high for low, high in found])
    assert covers == pytest.approx(wanted, abs=0.04)


def test_an_interval_holds_where_batches_ranks_and_every_change() -> None:
    """Random jobs: the batch, the ranks and the noise of each measurement are others; each brings its own batch."""
    covered, number = 0, 400
    random = np.random.default_rng(5)
    truth = Gradients(10.0, 1000.0)
    for _ in range(number):
        scale = NoiseScale()
        for _ in range(80):
            ranks, small = int(random.integers(2, 9)), int(random.integers(1, 64))
            local, both = truth.draw(random, small * ranks, ranks, ())
            scale.update(float(local), float(both), small, small * ranks)
        low, high = scale.interval() or (0.0, 0.0)
        covered += low <= 100 <= high
    assert 0.91 <= covered / number <= 0.985


def test_an_interval_ends_at_infinity_while_there_may_be_no_signal() -> None:
    scale = NoiseScale()
    for both in (10.0, 12.0, 9.0, 11.0, 10.5, 9.5, 10.1):
        scale.update(40.0 + both / 10, both, 8, 32)
    low, high = scale.interval() or (0.0, 0.0)
    assert 0 < low < math.inf
    assert high == math.inf
    for _ in range(20):
        scale.update(10.0, 1.0, 8, 32)  # |G|² = −2
    assert scale.value is None
    assert scale.interval() == (0.0, math.inf)


def test_a_noise_scale_that_grows_does_not_widen_its_interval() -> None:
    """|G|² falls to a tenth along 200 steps: the interval stays as wide as the measurements' noise makes it."""
    random, falling, steady = np.random.default_rng(2), NoiseScale(0.97), NoiseScale(0.97)
    for step in range(200):
        truth = Gradients(100 * 0.1 ** (step / 200), 10_000.0)
        for scale, one in ((falling, truth), (steady, Gradients(14.0, 10_000.0))):
            local, both = one.draw(random, 256, 4, ())
            scale.update(float(local), float(both), 64, 256)
    (low, high), (least, most) = falling.interval() or (0, 1), steady.interval() or (0, 1)
    assert high / low == pytest.approx(most / least, rel=0.3)


def test_equal_gradients_have_an_interval_from_zero() -> None:
    scale = NoiseScale()
    for _ in range(10):
        scale.update(4.0, 4.0, 8, 32)
    assert scale.interval() == (0.0, 0.0)


def test_an_interval_needs_five_measurements() -> None:
    scale = NoiseScale()
    for number in range(6):
        assert (scale.interval() is None) == (number < 5)
        scale.update(40.0 + number, 12.0, 8, 32)
    assert NoiseScale(decay=0.0).interval() is None
    for z in (0, -1, math.nan, math.inf):
        with pytest.raises(ConfigError, match="z is above 0"):
            scale.interval(z)


norms = st.floats(0.01, 1e3)


@given(st.lists(st.tuples(norms, norms), min_size=5, max_size=30), st.floats(0.5, 0.999))
def test_an_interval_contains_the_value_and_is_that_of_the_weighted_moments(
    measured: list[tuple[float, float]], decay: float
) -> None:
    scale = NoiseScale(decay)
    for local, both in measured:
        scale.update(local, both, 8, 32)
    interval = scale.interval()
    if interval is not None and scale.value is not None:
        assert interval[0] <= scale.value * (1 + 1e-6) + 1e-9
        assert interval[1] >= scale.value * (1 - 1e-6) - 1e-9


def test_state_continues_to_the_bit() -> None:
    (one,) = scales(Gradients(10.0, 1000.0), 64, 4, steps=30, number=1)
    other = NoiseScale()
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for both in (20.0, 30.0, math.nan):
        for scale in (one, other):
            scale.update(90.0, both, 16, 64)
    assert other.state_dict() == one.state_dict()
    assert (other.value, other.interval(), other.num_left_out) == (one.value, one.interval(), 1)


def test_parts_are_averaged_separately_without_bias() -> None:
    """The mean of quotients is far off where a step's |G|² is noisy; the quotient of means is not."""
    truth = Gradients(1.0, 100.0, dimension=50)
    found = scales(truth, 32, 4, steps=400, number=50)
    values: list[Any] = [one.value for one in found]
    assert np.mean(values) == pytest.approx(truth.scale, rel=0.1)
