"""Unauthenticated connections at the ports of a working job: the benchmark runs, and a rank joins."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import unauthenticated

pytestmark = pytest.mark.slow


def test_a_job_works_on_beside_unauthenticated_peers_and_a_rank_joins(tmp_path: Path) -> None:
    found = unauthenticated.measure(50, 10, 0.5, tmp_path)
    assert found["ports"] >= 4
    assert found["came"] == 60 * found["ports"]
    assert min(found["before_s"], found["coming_s"], found["there_s"]) > 0
    assert found["joined_s"] > 0
