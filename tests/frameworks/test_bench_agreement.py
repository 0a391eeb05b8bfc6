"""``bench.agreement`` learns the same in NumPy and in torch by `kfcomm.torch.attach`."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

from bench.agreement import attached, plain
from bench.agreement.ways import CASES, SCALED, SMALL, WAYS

PRECISION = {SMALL: 0.005, "PairAveraging": 0.15}
"""Of the accuracy after each epoch, where it is not 0.08. How old the averaged model is depends on the machine's load:
ten runs at rest differed from each other by 0.07."""


@pytest.mark.parametrize("name", [name for name in WAYS if SCALED not in name])
def test_attached_model_learns_as_a_numpy_program_does(name: str) -> None:
    """One rank but for rounding; several, whose models differ, but for a few of the 360 images."""
    case, way = replace(CASES[0], epochs=3), replace(WAYS[name], ranks=2)
    in_numpy, in_torch = asyncio.run(plain.learn(case, way, 0)), attached.learn(case, way, 0)
    assert in_torch == pytest.approx(in_numpy, abs=PRECISION.get(name, 0.08))
    assert in_torch[-1] > 0.8
