"""``bench.agreement`` learns the same in NumPy and in torch by `kfcomm.torch.attach`."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

from bench.agreement import attached, plain
from bench.agreement.ways import CASES, SCALED, SMALL, WAYS

PRECISION = {SMALL: 0.005}
"""Of the accuracy after each epoch, where it is not 0.08."""
EPOCHS = {"PairAveraging": slice(2, None)}
"""Epochs that are compared, where they are not all. How old an averaged model is depends on the machine's load: in two
of 17 runs the accuracy after the second epoch fell below 0.81; that after the third differed by 0.025 at most."""


@pytest.mark.parametrize("name", [name for name in WAYS if SCALED not in name])
def test_attached_model_learns_as_a_numpy_program_does(name: str) -> None:
    """One rank but for rounding; several, whose models differ, but for a few of the 360 images."""
    case, way = replace(CASES[0], epochs=3), replace(WAYS[name], ranks=2)
    in_numpy, in_torch = asyncio.run(plain.learn(case, way, 0)), attached.learn(case, way, 0)
    epochs = EPOCHS.get(name, slice(None))
    assert in_torch[epochs] == pytest.approx(in_numpy[epochs], abs=PRECISION.get(name, 0.08))
    assert min(in_torch) > 0.5  # one in ten is chance
    assert in_torch[-1] > 0.8
