"""Random programs with faults: the models of all ranks come out as if the void steps had not been."""

from __future__ import annotations

import pytest

from tests.search import guarded, guarded_elastic

pytest.importorskip("torch")


def test_faults_of_one_rank_leave_no_trace() -> None:
    assert guarded.search(1, faults=40)[1] >= 40


@pytest.mark.slow
def test_thousand_faults_leave_no_trace() -> None:
    assert guarded.search(7, faults=1000)[1] >= 1000


def test_faults_leave_no_trace_while_ranks_die_and_join() -> None:
    assert guarded_elastic.search(1, jobs=8)[1] > 8
