"""Metrics of a step, and the table in which they travel."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.adapt import Hyperparameters, Reading, StepMetrics
from kfcomm.adapt.metrics import MeetingTable
from kfcomm.adapt.policy import Request, sign_of
from kfcomm.strategies import build
from kfcomm.types import Layout

STAR = build("star", Layout.even(4))


def metrics(**changes: Any) -> StepMetrics:
    """Rank 2 computes for 3 seconds, the others for one; then the network takes a second."""
    given: dict[str, Any] = {
        "step": 7, "strategy": STAR, "seconds": (4.0,) * 4, "busy_s": (3.0, 3.0, 1.0, 3.0), "nbytes": (100,) * 4,
        "counts": (1,) * 4, "waited_s": (0.0, 0.0, 6.0, 0.5),
    }  # fmt: skip
    return StepMetrics(**{**given, **changes})


def test_waiting_for_a_late_rank_is_not_blamed_on_the_network() -> None:
    step = metrics()
    assert step.own_s == (1.0, 1.0, 3.0, 1.0)
    assert step.network_s == (1.0,) * 4
    assert step.throughputs == (100.0,) * 4
    assert step.throughput == 100.0
    assert step.speeds == (1.0, 1.0, 1 / 3, 1.0)
    assert step.slowest_peer == 2
    assert step.size == 4


def test_a_step_without_collectives_says_nothing_of_the_network() -> None:
    step = metrics(busy_s=(0.0,) * 4, nbytes=(0,) * 4, waited_s=(0.0,) * 4)
    assert all(map(math.isnan, step.throughputs))
    assert math.isnan(step.throughput)
    assert step.slowest_peer is None


def test_a_step_of_collectives_alone_says_nothing_of_the_ranks() -> None:
    assert all(map(math.isnan, metrics(busy_s=(3.9, 4.0, 3.95, 4.0)).speeds))
    assert metrics(busy_s=(3.0, 4.0, 3.0, 3.0)).speeds[1] == math.inf


floats = st.floats(0, 1e9)
values = st.none() | st.floats(width=64).map(lambda x: x + 0.0)  # a sum with zeros has no -0.0


@given(st.integers(1, 9), st.integers(0, 3), st.integers(0, 3) | st.integers(46, 99), st.data())
def test_meeting_table_round_trip(size: int, num_policies: int, num_columns: int, data: st.DataObject) -> None:
    total: Any = np.zeros(size * (num_policies + num_columns + -(-num_columns // 48) + 7))
    readings, signs, observed, news = [], [], [], []
    for rank in range(size):
        mine = [data.draw(floats) for _ in range(2)]
        waited_s = tuple(data.draw(floats) for _ in range(size))
        reading = Reading(*mine, data.draw(st.integers(0, 2**50)), data.draw(st.integers(0, 2**30)), waited_s)
        readings.append(reading)
        signs.append([data.draw(st.integers(0, 2**48 + 1)) for _ in range(num_policies)])
        observed.append(data.draw(st.lists(values, min_size=num_columns, max_size=num_columns)))
        news.append(data.draw(st.booleans()))
        total += MeetingTable.fill(rank, size, 5, reading, signs[-1], observed[-1], is_new=news[-1])
    table = MeetingTable.read(total, size, num_policies)
    given = Hyperparameters(batch_size=7)
    heard = table.metrics(STAR, given, {"a": (1.0,)})
    assert table.steps == (5,) * size
    found = [table.observed_of(column) for column in range(num_columns)]
    assert [list(map(repr, one)) for one in zip(*found, strict=True)] == [
        list(map(repr, one)) for one in observed if num_columns
    ]
    assert table.has_news == any(news)
    assert heard.hyperparameters is given
    assert heard.observed == {"a": (1.0,)}
    assert heard.step == 5
    assert heard.seconds == tuple(one.time_s for one in readings)
    assert heard.busy_s == tuple(one.busy_s for one in readings)
    assert heard.nbytes == tuple(one.nbytes for one in readings)
    assert heard.counts == tuple(one.count for one in readings)
    np.testing.assert_allclose(heard.waited_s, np.sum([one.waited_s for one in readings], axis=0))
    for policy in range(num_policies):
        assert table.signs_of(policy) == tuple(of_rank[policy] for of_rank in signs)


def test_the_mean_of_what_some_have_observed() -> None:
    step = metrics(observed={"loss": (1.0, None, 2.0, None), "noise": (None,) * 4})
    assert step.mean("loss") == 1.5
    assert math.isnan(step.mean("noise"))
    assert math.isnan(metrics(observed={"loss": (1.0, math.nan, 3.0, None)}).mean("loss"))
    assert math.isnan(step.mean("unheard of"))


def test_readings_add_up() -> None:
    one, other = Reading(1.0, 0.5, 10, 1, (0.1, 0.2)), Reading(4.0, 1.5, 30, 2, (0.4, 0.1))
    between = other.since(one)
    assert between == Reading(3.0, 1.0, 20, 1, (0.4 - 0.1, 0.0))
    assert Reading.nothing(2).plus(between) == between


@pytest.mark.asyncio
async def test_signs_tell_requests_apart() -> None:
    async def call() -> None:
        raise AssertionError

    one, other = Request("a", call), Request("b", call)
    signs = [sign_of(asked) for asked in ([], [one], [other], [one, other], [other, one], [one, one])]
    assert len(set(signs)) == len(signs)
    assert signs[0] == 0
    assert all(2 <= sign < 2**53 for sign in signs[1:])
    assert sign_of([Request("a", call)]) == signs[1]
