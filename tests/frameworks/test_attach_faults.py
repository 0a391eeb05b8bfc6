"""Random programs with faults: the models of all ranks come out as if the void steps had not been."""

from __future__ import annotations

import pytest

from tests.search import guarded, guarded_elastic

pytest.importorskip("torch")


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("seed", range(1, 41))
def test_faults_of_one_rank_leave_no_trace(seed: int) -> None:
    guarded.case(seed)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("seed", range(1, 9))
def test_faults_leave_no_trace_while_ranks_die_and_join(seed: int) -> None:
    guarded_elastic.case(seed)
