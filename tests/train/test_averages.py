"""Moving averages, and where figures of training are shown."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.errors import ConfigError
from kfcomm.train import MovingAverage
from kfcomm.train.procedure import report


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 0.999))
def test_it_is_the_weighted_mean_of_all_values(values: list[float], decay: float) -> None:
    average = MovingAverage(decay)
    for value in values:
        average.update(value)
    weights = [decay**age for age in reversed(range(len(values)))]
    truth = sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)
    assert average.value == pytest.approx(truth, rel=1e-6, abs=1e-6)


def test_it_begins_with_nothing_and_wants_a_decay_below_1() -> None:
    assert MovingAverage(0.9).value is None
    for decay in (1.0, -0.1, float("nan")):
        with pytest.raises(ConfigError, match="decay"):
            MovingAverage(decay)


def test_figures_go_to_the_meter_and_to_the_timeline() -> None:
    told: list[Any] = []
    observer = SimpleNamespace(counter=lambda *args: told.append(args))
    engine = SimpleNamespace(meter=SimpleNamespace(gauges={"old": 1.0}), observers=(observer,))
    report(SimpleNamespace(_session=SimpleNamespace(engine=engine)), {"noise_scale": 5.0, "x": 2.0}, {"x": "s"})
    assert engine.meter.gauges == {"old": 1.0, "noise_scale": 5.0, "x": 2.0}
    assert told == [("noise_scale", "", 5.0), ("x", "s", 2.0)]
    report(SimpleNamespace(_session=SimpleNamespace(engine=SimpleNamespace(meter=None, observers=None))), {"x": 2.0})
