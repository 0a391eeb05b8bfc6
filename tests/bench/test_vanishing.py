"""A host vanishes, and the others have their result: the benchmark runs."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from bench.netlab import Netlab, even, vanishing

pytestmark = pytest.mark.slow


@pytest.mark.netns
def test_survivors_have_their_result(tmp_path: Path) -> None:
    with Netlab(even(vanishing.HOSTS), network="10.79.4.0/24") as lab:
        assert vanishing.once(lab, Random(1), tmp_path, 4000) > 0
