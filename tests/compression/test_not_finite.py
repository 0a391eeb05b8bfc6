"""An infinity or NaN in a gradient is in the average of its step, and in no later one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kfcomm import testing
from kfcomm.compression import PowerSGD, TopK

SIZE, BAD, STEPS = 2, 2, 6
MAKERS: dict[str, Callable[[], Any]] = {
    "powersgd": lambda: PowerSGD(2),
    "powersgd, begun later": lambda: PowerSGD(2, begin_after=BAD + 1),
    "topk": lambda: TopK(0.05),
}


def gradients(rank: int, step: int, bad: Callable[[Any], None] | None) -> dict[str, Any]:
    random = np.random.default_rng(10 * step + rank)
    found = {"w": random.standard_normal((20, 30)), "b": random.standard_normal(5)}
    found["w"] = found["w"].astype(np.float32)
    if bad is not None and (rank, step) == (1, BAD):
        bad(found["w"])
    return found


def put(value: float, places: Any) -> Callable[[Any], None]:
    def change(x: Any) -> None:
        x[places] = value

    return change


def averages(make: Callable[[], Any], bad: Callable[[Any], None] | None, *, leaves_out: bool = False) -> list[Any]:
    """By rank, of each step."""

    def rank(comm: Any) -> list[Any]:
        compressor = make()
        steps = [step for step in range(STEPS) if not (leaves_out and step == BAD)]
        with np.errstate(all="ignore"):
            return [compressor.average(comm, gradients(comm.rank, step, bad)) for step in steps]

    with testing.sync_world(SIZE) as comms:
        return testing.run_threads(comms, rank)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(
    "bad",
    [
        put(np.inf, (3, 4)),
        put(-np.inf, (slice(None), 4)),
        put(np.nan, (3, 4)),
        put(np.nan, slice(None)),
        put(3e38, slice(None)),
    ],
    ids=["inf", "infinities", "nan", "all nan", "too large"],
)
def test_one_bad_step_is_one_bad_average(kind: str, bad: Callable[[Any], None]) -> None:
    first, second = averages(MAKERS[kind], bad)
    for step, (one, other) in enumerate(zip(first, second, strict=True)):
        assert all(one[name].tobytes() == other[name].tobytes() for name in one)
        assert np.isfinite(one["b"]).all()
        if step != BAD:
            assert np.isfinite(one["w"]).all(), step
            assert np.abs(one["w"]).max() < 1e30 or step > BAD
    given = gradients(1, BAD, bad)["w"]
    if not np.isfinite(given).all():
        assert not np.isfinite(first[BAD]["w"]).all()


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_power_sgd_goes_on_as_if_there_had_been_no_bad_step(value: float) -> None:
    found, _ = averages(MAKERS["powersgd"], put(value, (3, 4)))
    wanted, _ = averages(MAKERS["powersgd"], None, leaves_out=True)
    whole = sum(gradients(rank, BAD, put(value, (3, 4)))["w"] for rank in range(SIZE)) / SIZE
    np.testing.assert_array_equal(found[BAD]["w"], whole)
    del found[BAD]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one["w"], other["w"])
