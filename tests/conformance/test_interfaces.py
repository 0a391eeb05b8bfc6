"""Every verb by every interface, over every link, from host and device memory, by every strategy, against NumPy.

Not each with each: every two values of two of these meet in some case. Among the pairs with a strategy are those of the
slots of shared memory, which small calls of a repeated name take by ``direct``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from kfcomm import strategies
from kfcomm.testing import run_ranks, run_threads
from tests.conformance import interfaces
from tests.conformance.interfaces import SIZE, FakeDevices
from tests.conformance.pairwise import covering, pairs_of
from tests.conformance.verb_table import VERBS, Row, inputs

USES = 4
"""Of each name. The second use compiles its plan, and the later ones go through a slot where there is one."""

AWAITED = {
    "awaited": interfaces.each_awaited,
    "persistent": interfaces.started_awaited,
    "elastic": interfaces.elastic_awaited,
}
BLOCKING = {
    "blocking": interfaces.each_blocking,
    "blocking persistent": interfaces.started_blocking,
    "blocking elastic": interfaces.elastic_blocking,
}


class Setup(NamedTuple):
    """One case. ``length``: elements of each rank's part; the largest array travels in two chunks."""

    interface: str
    link: str
    memory: str
    strategy: str
    length: int


FACTORS: dict[str, Sequence[Any]] = {
    "interface": [*AWAITED, *BLOCKING],
    "link": ["memory", "tcp", "unix", "shm"],
    "memory": ["host", "device"],
    "strategy": strategies.names(),
    "length": [5, 3000, 45_000],
}


def _is_possible(case: tuple[Any, ...]) -> bool:
    """Fake devices exist only among ranks that share a process: of these, blocking ones have links in memory only."""
    setup = Setup(*case)
    links = ("memory", "shm") if setup.interface in AWAITED else ("memory",)
    return setup.memory == "host" or setup.link in links


SLOTS = [Setup(interface, "shm", "host", "direct", 5) for interface in FACTORS["interface"]]
SETUPS = list(dict.fromkeys([*SLOTS, *(Setup(*case) for case in covering(FACTORS, _is_possible))]))


@pytest.fixture(scope="module", autouse=True)
def links() -> Iterator[None]:
    """In place of that of the other tests here: each case says which links it has."""
    return


def test_every_pair_of_two_factors_is_covered() -> None:
    covered = set().union(*map(pairs_of, SETUPS))
    links_of_devices = {(1, link, 2, "device") for link in ("tcp", "unix")}
    wanted = {
        (i, one, j, other)
        for i, first in enumerate(FACTORS.values())
        for j, second in enumerate(FACTORS.values())
        if i < j
        for one in first
        for other in second
    }
    assert wanted - covered == links_of_devices


def _title(setup: Setup) -> str:
    return "-".join(map(str, setup))


def _rows(setup: Setup) -> list[Row]:
    return [row for row in VERBS if row.is_plain or setup.memory == "host"]


def _gifts(row: Row, rank: int, setup: Setup, devices: FakeDevices | None) -> list[Any]:
    """Arguments of a rank at each use."""
    found = []
    for use in range(USES):
        given = row.give(inputs(SIZE, setup.length, use)[rank], rank)
        found.append(devices.by_rank[rank].array(given) if devices is not None and row.parameter else given)
    return found


def _check(row: Row, setup: Setup, results: list[list[Any]]) -> None:
    for use in range(USES):
        wanted = row.expected(inputs(SIZE, setup.length, use))
        for rank, want in enumerate(wanted):
            np.testing.assert_equal(results[rank][use], want, f"{row.name}, use {use}, on rank {rank}")


@pytest.mark.asyncio
@pytest.mark.parametrize("setup", [one for one in SETUPS if one.interface in AWAITED], ids=_title)
async def test_awaited_verbs_give_what_numpy_says(setup: Setup) -> None:
    devices = FakeDevices() if setup.memory == "device" else None
    form, is_elastic = AWAITED[setup.interface], setup.interface == "elastic"
    async with interfaces.awaited(setup.link, setup.strategy, devices, elastic=is_elastic) as comms:
        for row in _rows(setup):
            results = await run_ranks(
                comms, lambda comm, row=row: form(comm, row, _gifts(row, comm.rank, setup, devices))
            )
            _check(row, setup, results)
    if devices is not None:
        devices.check()


@pytest.mark.parametrize("setup", [one for one in SETUPS if one.interface in BLOCKING], ids=_title)
def test_blocking_verbs_give_what_numpy_says(setup: Setup) -> None:
    devices = FakeDevices() if setup.memory == "device" else None
    form, is_elastic = BLOCKING[setup.interface], setup.interface == "blocking elastic"
    with interfaces.blocking(setup.link, setup.strategy, devices, elastic=is_elastic) as comms:
        for row in _rows(setup):
            results = run_threads(comms, lambda comm, row=row: form(comm, row, _gifts(row, comm.rank, setup, devices)))
            _check(row, setup, results)
    if devices is not None:
        devices.check()
