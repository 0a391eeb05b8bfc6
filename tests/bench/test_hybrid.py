"""Factors beside all_reduce for VGG-16's dense layers: what is foretold and wanted, and that a small case is so."""

from __future__ import annotations

import pytest

from bench.netlab.factoring import HYBRID, TOLD, WHOLE
from bench.netlab.hosts import even
from bench.netlab.hybrid import figure, formula_nbytes, measured, table, verdict
from bench.netlab.lab import Netlab


def test_bytes_sent_follow_the_formula() -> None:
    """By hand: 4 bytes, 7 others, 32 samples, the sums of both sides; and 2 · 7/8 of all weights."""
    assert formula_nbytes(HYBRID, 8, 32, 1) == 4 * 7 * 32 * (4096 + 25088 + 4096 + 4096 + 1000 + 4096)
    assert formula_nbytes(WHOLE, 8, 32, 1) == 4 * 1.75 * (4096 * 25088 + 4096 * 4096 + 1000 * 4096)
    # of both sides an eighth: the factors of the smallest layer would be more than its gradient
    assert formula_nbytes(HYBRID, 8, 32, 8) < formula_nbytes(TOLD, 8, 32, 8)


@pytest.mark.parametrize(
    ("whole_s", "sent_nbytes", "reached"), [(3.0, 1010, True), (2.9, 1010, False), (3.0, 1030, False)]
)
def test_outcome_reaches_ratio_and_bytes(whole_s: float, sent_nbytes: int, reached: bool) -> None:
    found = {}
    for way, end_s in ((HYBRID, 2.0), (WHOLE, whole_s), (TOLD, 0.5)):
        one = {"start_s": 0.0, "end_s": end_s, "cpu_s": 1.0, "sent_nbytes": sent_nbytes}
        found[way] = figure(way, [[one, {**one, "start_s": 0.1, "end_s": end_s - 0.1}]], 1000.0)
    assert verdict(found)["reached"] is reached
    assert len({len(line) for line in table(found).splitlines()}) == 1


@pytest.mark.slow
@pytest.mark.netns
def test_a_small_case_sends_what_the_formula_says() -> None:
    with Netlab(even(3, 1e9), network="10.80.2.0/24") as lab:
        found = measured(lab, 1, 4, 16)
    assert verdict(found)["beyond"] < 0.05
    assert found[HYBRID].sent_nbytes < found[WHOLE].sent_nbytes / 3
