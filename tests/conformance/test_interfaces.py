"""Every verb by every interface, over every link, from host and device memory, by every strategy, against NumPy.

Not each with each: every two values of two of these meet in some case. Among the pairs with a strategy are those of the
slots of shared memory, which small calls of a repeated name take by ``direct``.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from kfcomm import strategies
from kfcomm.testing import run_ranks, run_threads
from tests.conformance import interfaces
from tests.conformance.interfaces import ROUTES, Memory
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
    """One case.

    Attributes:
        set_by: ``init``, or ``call``: then each call has the strategy as an option, and another is in force.
        length: elements of each rank's part; the largest array travels in two chunks.
    """

    interface: str
    link: str
    memory: str
    strategy: str
    set_by: str
    length: int

    @property
    def in_force(self) -> str:
        """Strategy of the communicator."""
        if self.set_by == "init":
            return self.strategy
        return "star" if self.strategy == "ring" else "ring"


FACTORS: dict[str, Sequence[Any]] = {
    "interface": [*AWAITED, *BLOCKING],
    "link": ["memory", "tcp", "unix", "shm"],
    "memory": ["host", *ROUTES],
    "strategy": strategies.names(),
    "set_by": ["init", "call"],
    "length": [5, 3000, 45_000],
}


def _is_possible(case: tuple[Any, ...]) -> bool:
    """Fake devices exist only among ranks that share a process: of these, blocking ones have links in memory only."""
    setup = Setup(*case)
    return setup.memory == "host" or setup.link in (("memory", "shm") if setup.interface in AWAITED else ("memory",))


SLOTS = [Setup(one, "shm", "host", "direct", by, 5) for one in FACTORS["interface"] for by in FACTORS["set_by"]]
SETUPS = list(dict.fromkeys([*SLOTS, *(Setup(*case) for case in covering(FACTORS, _is_possible))]))


@pytest.fixture(scope="module", autouse=True)
def links() -> Iterator[None]:
    """In place of that of the other tests here: each case says which links it has."""
    return


def test_every_pair_of_two_factors_is_covered() -> None:
    covered = set().union(*map(pairs_of, SETUPS))
    links_of_devices = {(1, link, 2, route) for link in ("tcp", "unix") for route in ROUTES}
    wanted = {
        (i, one, j, other)
        for i, first in enumerate(FACTORS.values())
        for j, second in enumerate(FACTORS.values())
        if i < j
        for one in first
        for other in second
    }
    assert wanted - covered == links_of_devices


def _each_value_once() -> set[Setup]:
    """Few cases in which every value of every factor occurs: those of ``make test``."""
    missing = {(place, value) for place, values in enumerate(FACTORS.values()) for value in values}
    chosen = set()
    while missing:
        best = max(SETUPS, key=lambda setup: len(missing & set(enumerate(setup))))
        chosen.add(best)
        missing -= set(enumerate(best))
    return chosen


QUICK = _each_value_once()


def _of(interfaces_: Container[str]) -> list[Any]:
    return [
        pytest.param(one, id="-".join(map(str, one)), marks=pytest.mark.quick if one in QUICK else pytest.mark.slow)
        for one in SETUPS
        if one.interface in interfaces_
    ]


def _rows(setup: Setup) -> list[Row]:
    refused = {"wire_dtype", "weight"} if setup.memory == "some ranks" else set()
    return [row for row in VERBS if not refused & row.options.keys()]


def _gifts(row: Row, rank: int, setup: Setup, memory: Memory) -> list[Any]:
    """Arguments of a rank at each use."""
    given = [inputs(memory.size, setup.length, use)[rank] for use in range(USES)]
    made = [row.give(x, rank, memory.size) for x in given]
    return [memory.holding(one, rank) for one in made] if row.on_devices else made


def _check(row: Row, setup: Setup, memory: Memory, results: list[list[Any]]) -> None:
    for use in range(USES):
        wanted = row.expected(inputs(memory.size, setup.length, use))
        for rank, want in enumerate(wanted):
            got, where = results[rank][use], f"{row.name}, use {use}, on rank {rank}"
            np.testing.assert_equal(interfaces.on_host(got), want, where)
            if (
                row.on_devices and want is not None and row.verb != "scatter"
            ):  # whose result is on the host but at the root
                memory.check(got, rank)


@pytest.mark.asyncio
@pytest.mark.parametrize("setup", _of(AWAITED))
async def test_awaited_verbs_give_what_numpy_says(setup: Setup) -> None:
    memory = Memory(setup.memory)
    form, is_elastic = AWAITED[setup.interface], setup.interface == "elastic"
    async with interfaces.awaited(setup.link, setup.in_force, memory, elastic=is_elastic) as comms:
        for row in _rows(setup):
            results = await run_ranks(
                comms, lambda comm, row=row: form(comm, row, _gifts(row, comm.rank, setup, memory))
            )
            _check(row, setup, memory, results)
    memory.close()


@pytest.mark.parametrize("setup", _of(BLOCKING))
def test_blocking_verbs_give_what_numpy_says(setup: Setup) -> None:
    memory = Memory(setup.memory)
    form, is_elastic = BLOCKING[setup.interface], setup.interface == "blocking elastic"
    with interfaces.blocking(setup.link, setup.in_force, memory, elastic=is_elastic) as comms:
        for row in _rows(setup):
            results = run_threads(comms, lambda comm, row=row: form(comm, row, _gifts(row, comm.rank, setup, memory)))
            _check(row, setup, memory, results)
    memory.close()
