"""Signals in blocking calls, over each kind of link: nothing hangs, and the communicator works.

After Ctrl-C it may say that it is closed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.programs.interruptible import RAISED, UNNAMED
from tests.programs.interrupts import CLOSED, MISSED, Nursery, Targets, interrupted, nursery, verbs, world

pytestmark = pytest.mark.slow

TRANSPORTS = ("shm", "unix", "tcp")
SAMPLE = 40
"""Places of each verb."""
WORLDS = 12
"""How many may be used up. An interrupt that closes the communicator takes one; others take none."""
FEW, MANY = 6, 10
SIGNALS = 2


@pytest.fixture(scope="module")
def children() -> Iterator[Nursery]:
    with nursery() as made:
        yield made


def assert_right(children: Nursery, transport: str, size: int, targets: Targets) -> None:
    ends = []
    with closing(interrupted(children, transport, size, targets)) as results:
        for result in results:
            assert result.is_right, str(result)  # the first one: what hangs takes a minute to say so
            ends.append(result.end)
    # the places are those of calls that were made just before: most of them come again, of a few at least one
    assert ends.count(MISSED) <= (len(ends) / 2 if len(ends) >= MANY else len(ends) - 1)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_at_a_line(children: Nursery, transport: str) -> None:
    named = [verb for verb in verbs(2) if verb not in UNNAMED]
    assert_right(children, transport, 2, Targets(named, SAMPLE, WORLDS))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_exception_of_a_handler_at_any_line_keeps_the_communicator_open(children: Nursery, transport: str) -> None:
    named = [verb for verb in verbs(2) if verb not in UNNAMED]
    assert_right(children, transport, 2, Targets(named, SAMPLE // 2, 1, raises=tuple(RAISED)))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("verb", sorted(UNNAMED))
def test_at_a_line_of_what_has_no_name(children: Nursery, transport: str, verb: str) -> None:
    assert_right(children, transport, 2, Targets([verb], FEW, 2))


def test_at_a_line_in_a_world_of_one(children: Nursery) -> None:
    assert_right(children, "auto", 1, Targets(verbs(1), SAMPLE, WORLDS))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_at_the_line_where_a_call_waits(children: Nursery, transport: str) -> None:
    """The way to the I/O thread and back, which every blocking call goes, in full."""
    assert_right(children, transport, 2, Targets(["all_reduce", "wait", "persistent"], SAMPLE, WORLDS, below="sync/"))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("verb", ["all_reduce", "wait", "persistent", "all_gather concat"])
def test_a_signal_at_any_moment_of_many_calls(children: Nursery, transport: str, verb: str) -> None:
    for _ in range(SIGNALS):
        with world(children, transport, 2) as one:
            assert one.signalled(verb) == CLOSED


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("verb", ["barrier", "recv"])
def test_a_signal_while_the_other_rank_does_not_come(children: Nursery, transport: str, verb: str) -> None:
    for _ in range(SIGNALS):
        with world(children, transport, 2) as one:
            assert one.signalled(verb, alone=True) == CLOSED
