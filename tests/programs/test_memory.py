"""Random programs in worlds in memory, on both interfaces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfcomm import testing
from tests.programs.generator import program
from tests.programs.walker import Report, run_awaiting, run_blocking, worst

SEEDS = st.integers(0, 1 << 31)
EXAMPLES = 12
CALLS = 80
HANG_S = 60.0


def told(reports: list[Report | None]) -> str:
    return "\n".join(map(str, worst(report for report in reports if report is not None)))


@pytest.mark.asyncio
@pytest.mark.parametrize("links", ["memory", "shm"])
@settings(max_examples=EXAMPLES)
@given(seed=SEEDS, size=st.integers(1, 5), hosts=st.integers(1, 2))
async def test_the_asynchronous_interface(links: str, seed: int, size: int, hosts: int) -> None:
    made = program(seed, CALLS, size)
    async with testing.world(size, hosts=min(hosts, size), timeout=HANG_S, transport=links) as comms:
        reports = await testing.run_ranks(comms, lambda comm: run_awaiting(comm, made))
    assert not any(reports), told(reports)


@settings(max_examples=EXAMPLES)
@given(seed=SEEDS, size=st.integers(1, 5), hosts=st.integers(1, 2))
def test_the_blocking_interface(seed: int, size: int, hosts: int) -> None:
    made = program(seed, CALLS, size)
    with testing.sync_world(size, hosts=min(hosts, size), timeout=HANG_S) as comms:
        reports = testing.run_threads(comms, lambda comm: run_blocking(comm, made))
    assert not any(reports), told(reports)


@settings(max_examples=EXAMPLES)
@given(seed=SEEDS)
def test_a_world_of_one_that_is_joined(seed: int) -> None:
    """The caller does all the work itself, and no chunk arrives."""
    from kfcomm import sync

    with sync.init(device="none") as comm:
        report = run_blocking(comm, program(seed, CALLS, 1))
    assert not report, str(report)
