"""Pollux's model against adaptdl's values, and fits against models that made the measurements."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest

from kfcomm.errors import ConfigError
from kfcomm.train import GradientStatistics, Observation, Shape, Throughput, best_shape, efficiency, fit, goodput

MODEL = Throughput(0.121, 0.00568, 0.236, 0.0118, 0.117, 0.0195, 1.78)
GRADIENTS = GradientStatistics(signal=0.00136, variance=0.000502)


@pytest.mark.parametrize(
    ("shape", "rate", "worth", "good"),
    [
        (Shape(1, 1, 128), 150.936277, 1.0, 150.936277),
        (Shape(1, 4, 128), 587.700600, 0.3133625, 184.163332),
        (Shape(2, 8, 128), 1108.910322, 0.1635916, 181.408454),
    ],
)
def test_the_values_of_adaptdl(shape: Shape, rate: float, worth: float, good: float) -> None:
    assert MODEL.samples_per_s(shape.hosts, shape.ranks, shape.batch, shape.accumulations) == pytest.approx(rate)
    assert efficiency(GRADIENTS, 128, shape.samples) == pytest.approx(worth, rel=1e-6)
    assert goodput(MODEL, GRADIENTS, 128, shape) == pytest.approx(good)


def test_accumulations_take_their_time_before_the_exchange() -> None:
    one_s = MODEL.accumulation_s(64)
    assert MODEL.step_s(2, 4, 64, 3) == pytest.approx(3 * one_s + MODEL.step_s(2, 4, 64))
    serial = Throughput(0.1, 0.001, 0.2, 0.01, 0.1, 0.01, 1.0)
    assert serial.step_s(2, 4, 100) == pytest.approx(0.2 + 0.22)


def test_the_best_shape_is_the_one_with_the_highest_goodput() -> None:
    shapes = [Shape(1, 4, batch) for batch in range(32, 513, 32)]
    shape, found = best_shape(MODEL, GRADIENTS, 128, shapes)
    assert found == max(goodput(MODEL, GRADIENTS, 128, one) for one in shapes)
    assert found == goodput(MODEL, GRADIENTS, 128, shape)
    with pytest.raises(ConfigError, match="at least one shape"):
        best_shape(MODEL, GRADIENTS, 128, [])


def measured(model: Throughput, shapes: list[Shape], noise: float = 0.0, seed: int = 0) -> list[Observation]:
    rng = np.random.default_rng(seed)

    def seen(time_s: float) -> float:
        return time_s * float(np.exp(noise * rng.standard_normal()))

    return [
        Observation(
            one,
            seen(model.step_s(one.hosts, one.ranks, one.batch, one.accumulations)),
            seen(model.accumulation_s(one.batch)),
        )
        for one in shapes
    ]


SEEN = [Shape(hosts, ranks, batch) for hosts, ranks in ((1, 1), (1, 2), (1, 4), (2, 4), (2, 8), (4, 16))
        for batch in (32, 128, 512)]  # fmt: skip


@pytest.mark.parametrize("model", [MODEL, Throughput(0.01, 0.0002, 0.3, 0.02, 0.05, 0.001, 1.0)])
def test_a_fit_finds_the_model_that_made_the_measurements(model: Throughput) -> None:
    assert astuple(fit(measured(model, SEEN))) == pytest.approx(astuple(model), rel=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_a_fit_of_noisy_times_predicts_shapes_that_were_not_measured(seed: int) -> None:
    found = fit(measured(MODEL, SEEN, noise=0.05, seed=seed))
    for shape in (Shape(1, 3, 64), Shape(2, 6, 256), Shape(4, 12, 128), Shape(2, 8, 64, 3)):
        truth = MODEL.step_s(shape.hosts, shape.ranks, shape.batch, shape.accumulations)
        predicted = found.step_s(shape.hosts, shape.ranks, shape.batch, shape.accumulations)
        assert predicted == pytest.approx(truth, rel=0.1)


def test_unobserved_costs_are_zero() -> None:
    alone = fit(measured(MODEL, [Shape(1, 1, 64), Shape(1, 1, 256)]))
    assert alone.accumulation_s(1000) == pytest.approx(MODEL.accumulation_s(1000), rel=1e-6)
    assert (alone.alpha_r, alone.beta_r, alone.alpha_n, alone.beta_n) == (0, 0, 0, 0)
    pair = fit(measured(MODEL, [Shape(1, 1, 64), Shape(1, 2, 64), Shape(1, 2, 256)]))
    assert pair.alpha_r == pytest.approx(MODEL.alpha_r, rel=0.3)
    assert pair.beta_r == 0
    assert pair.alpha_n == pytest.approx(1.1 * pair.alpha_r)


def test_one_batch_size_leaves_half_of_the_time_to_what_samples_do_not_cost() -> None:
    found = fit([Observation(Shape(1, 1, 100), 0.5)])
    assert found.alpha_c == pytest.approx(0.25)
    assert found.accumulation_s(100) == pytest.approx(0.5)


def test_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="gamma"):
        Throughput(0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.5)
    with pytest.raises(ConfigError, match="at least 0"):
        Throughput(-0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 1.5)
    for hosts, ranks, batch, accumulations in ((2, 1, 8, 0), (0, 1, 8, 0), (1, 1, 0, 0), (1, 1, 8, -1)):
        with pytest.raises(ConfigError, match="a step has"):
            Shape(hosts, ranks, batch, accumulations)
    with pytest.raises(ConfigError, match="at least one observation"):
        fit([])
    with pytest.raises(ConfigError, match="above 0 s"):
        fit([Observation(Shape(1, 1, 8), 0.0)])
    with pytest.raises(ConfigError, match="batches"):
        efficiency(GRADIENTS, 0, 128)
