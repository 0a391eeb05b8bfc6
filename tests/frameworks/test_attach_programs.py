"""Random programs of an attached model give what one process gives: some of those that `attach_programs` searches."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.frameworks import attach_programs  # noqa: E402  it imports torch


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("seed", range(60))
def test_a_random_program(seed: int) -> None:
    assert attach_programs.difference(seed) is None, attach_programs.Settings.drawn(seed)
