"""Names and numbers of whatever subclass of ``str`` and ``int``: each means what it holds, the same on all ranks."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from datetime import timedelta
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from kfcomm.common.arguments import checked_name, plain_text, whole_number
from kfcomm.errors import CollectiveAborted, CollectiveMismatch, ConfigError
from tests.collectives.calls import CALLS, X
from tests.conformance.worlds import assert_kinds, ends, everywhere, turns, world

SIZE = 5
ROWS = [[1.0]] * SIZE


class Own(str):
    """A subclass that shows itself as something else."""

    __slots__ = ()

    def __str__(self) -> str:
        return "shown"

    def __format__(self, spec: str) -> str:
        return "formatted"


class Mixed(str, enum.Enum):  # noqa: UP042 - the kind whose text is its place in the class
    """As programs had them before ``StrEnum``."""

    K = "k"
    BLOB = "blob"
    GROUP = "pair"
    STAR = "star"
    SUM = "sum"


class Rank(enum.IntEnum):
    """Ranks by name."""

    FIRST = 0
    SECOND = 1
    THIRD = 2


class Flag(int):
    """Shows itself as something else."""

    def __index__(self) -> int:
        return 99


KINDS: tuple[Callable[[str], Any], ...] = (
    str,
    Own,
    np.str_,
    lambda text: enum.StrEnum("Name", {"ONE": text})["ONE"],
    lambda text: enum.Enum("Mixed", {"ONE": text}, type=str)["ONE"],
)


def of(comm: Any, text: str) -> Any:
    """A rank's own kind of the text."""
    return KINDS[comm.rank % len(KINDS)](text)


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", CALLS)
async def test_names_that_hold_the_same_meet(verb: str) -> None:
    """Also two calls in opposite orders, and a second use, which may go a shorter way."""
    async with world(SIZE) as comms:
        for _ in range(2):
            handles = []
            for comm in comms:
                names = ("k", "l") if comm.rank % 2 else ("l", "k")
                handles += [CALLS[verb](comm, of(comm, name)) for name in names]
            await asyncio.gather(*handles)
        await everywhere(comms, lambda comm: CALLS[verb](comm, "k"))


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", CALLS)
async def test_a_cancelled_call_ends_on_all_ranks_whatever_its_name_is_of(verb: str) -> None:
    async with world(SIZE) as comms:
        others = [CALLS[verb](comm, of(comm, "k")) for comm in comms[1:-1]]
        await turns()
        mine = CALLS[verb](comms[-1], of(comms[-1], "k"))
        assert mine.cancel()
        outcomes = await asyncio.gather(*others, CALLS[verb](comms[0], "k"), return_exceptions=True)
        assert_kinds(outcomes, *[CollectiveAborted] * (SIZE - 1))
        await everywhere(comms, lambda comm: CALLS[verb](comm, of(comm, "k")))


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", range(len(KINDS)))
async def test_a_mismatch_is_told_to_all_ranks(kind: int) -> None:
    async with world(SIZE) as comms:
        outcomes = await ends(comms, lambda comm: comm.all_reduce(X[: 2 + (comm.rank == 1)], KINDS[kind]("k")))
        assert_kinds(outcomes, *[CollectiveMismatch] * SIZE)
        assert all("'k'" in str(one) for one in outcomes)
        assert {one.key for one in outcomes} == {"k"}


@pytest.mark.asyncio
async def test_tags_that_hold_the_same_meet() -> None:
    async with world(SIZE) as comms:
        tags = [(of(one, "k"), of(comms[0], "k")) for one in comms[1:]]
        tags += [(Rank.THIRD, 2), (np.int64(2), Rank.THIRD), (np.uint8(2), np.int32(2))]
        for mine, other in tags:
            sent = comms[0].send(X, Rank.SECOND, mine)
            assert (await comms[1].recv(np.int64(0), other) == X).all()
            await sent
            sent = comms[0].send_object("x", np.int8(1), other)
            assert await comms[1].recv_object(Rank.FIRST, mine) == "x"
            await sent
        for tag in (True, 1.5, None, b"k"):
            with pytest.raises(ConfigError, match="expected a whole number or a string as tag"):
                comms[0].send(X, 1, tag)


@pytest.mark.asyncio
async def test_queues_and_blobs_by_names_that_hold_the_same() -> None:
    async with world(2) as comms:
        there, here = comms[0].queue(Mixed.K, 0, 1, capacity=np.int64(2)), comms[1].queue("k", np.int64(0), Rank.SECOND)
        await there.put(X)
        assert (await here.get() == X).all()
        assert comms[0].save(Mixed.BLOB, X, version=np.int64(7)) == 7
        assert (await comms[1].request("blob", Rank.FIRST, version=Flag(7)) == X).all()
        assert (await comms[1].request(np.str_("blob"), 0) == X).all()
        for capacity in (True, 0, 1.0):
            with pytest.raises(ConfigError, match="expected a capacity of at least 1 array"):
                comms[0].queue("q", 0, 1, capacity=capacity)


@pytest.mark.asyncio
async def test_groups_and_strategies_by_names_that_hold_the_same() -> None:
    async with world(SIZE) as comms:
        pair = [np.int64(0), Rank.SECOND, 2]
        groups = await everywhere(comms[:3], lambda comm: comm.group(pair, of(comm, "pair")))
        assert {group.name for group in groups} == {"pair"}
        assert {type(group.name) for group in groups} == {str}
        await everywhere(groups, lambda group: group.all_reduce(X, "k"))
        await everywhere(comms, lambda comm: comm.set_strategy(of(comm, "star")))
        await everywhere(comms, lambda comm: comm.set_strategy({of(comm, "else"): of(comm, "ring")}))
        assert {comm.strategy.name for comm in comms} == {"else: ring"}
        parts = await everywhere(
            comms, lambda comm: comm.split(of(comm, "left"), np.int64(-comm.rank), of(comm, "part"))
        )
        assert {part.name for part in parts} == {"part/left"}
        assert [part.rank for part in parts] == [4, 3, 2, 1, 0]
        parts = await everywhere(
            comms, lambda comm: comm.split([1, np.int64(1), True, Flag(1), Rank.SECOND][comm.rank])
        )
        assert [part.size for part in parts] == [SIZE] * SIZE


@pytest.mark.asyncio
async def test_strings_that_hold_the_same_are_the_same() -> None:
    async with world(SIZE) as comms:
        assert await everywhere(comms, lambda comm: comm.consensus({of(comm, "k"): of(comm, "v")})) == [True] * SIZE
        assert await everywhere(comms, lambda comm: comm.consensus(str(comm.rank))) == [False] * SIZE


@pytest.mark.asyncio
async def test_persistent_collectives_meet_calls_by_names_that_hold_the_same() -> None:
    async with world(SIZE) as comms:
        made = [comm.all_reduce_init(X, of(comm, "k"), priority=np.int64(1)) for comm in comms]
        assert {one.name for one in made} == {"k"}
        for _ in range(3):
            await asyncio.gather(*(one.start() for one in made[1:]), comms[0].all_reduce(X, Mixed.K))


@pytest.mark.asyncio
async def test_results_are_under_the_keys_that_were_given() -> None:
    async with world(SIZE) as comms:
        found = await everywhere(comms, lambda comm: comm.all_reduce_many({of(comm, "b"): X, of(comm, "a"): X[:1]}))
        for comm, one in zip(comms, found, strict=True):
            assert [plain_text(key) for key in one] == ["b", "a"]
            assert (one[of(comm, "b")] == SIZE * X).all()


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", ["reduce", "broadcast", "gather", "scatter", "broadcast_object", "gather_object"])
async def test_roots_are_whole_numbers_of_any_kind(verb: str) -> None:
    async with world(SIZE) as comms:
        for root in (1, np.int64(1), Rank.SECOND, np.uint8(1)):
            await everywhere(comms, lambda comm: getattr(comm, verb)(ROWS, root=root))  # noqa: B023
        for wrong in (True, np.True_, 1.0, "1", None, SIZE, -1):
            with pytest.raises(ConfigError, match=r"root .* is not a rank of this group \(0 to 4\)"):
                await getattr(comms[0], verb)(ROWS, root=wrong, name="wrong")
            assert_kinds(
                await ends(comms[1:], lambda comm: getattr(comm, verb)(ROWS, root=1, name="wrong")),
                *[CollectiveAborted] * (SIZE - 1),
            )


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", CALLS)
async def test_priorities_and_timeouts_are_numbers_of_any_kind(verb: str) -> None:
    async with world(SIZE, aborted="adasum" in verb) as comms:
        right = [{"priority": one} for one in (np.int64(3), Rank.THIRD, np.int8(-3))]
        right += [{"timeout": one} for one in (np.float32(60), Rank.THIRD * 30, timedelta(minutes=1), Fraction(60))]
        for more in right:
            await everywhere(comms, lambda comm: CALLS[verb](comm, "k", **more))  # noqa: B023
        wrong = [{"priority": one} for one in (True, 1.5, "1", 1 << 20)]
        wrong += [{"timeout": one} for one in (True, "60", -1)]
        for more in wrong:
            with pytest.raises(ConfigError, match=r"as priority|a timeout is"):
                await CALLS[verb](comms[0], "k", **more)
            outcomes = await ends(comms[1:], lambda comm: CALLS[verb](comm, "k"))
            assert_kinds(outcomes, *[CollectiveAborted] * (SIZE - 1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_is_checked_and_made_plain(kind: Callable[[str], Any]) -> None:
    assert type(checked_name(kind("k"))) is str
    assert checked_name(kind("k")) == "k"
    for text, why in (
        ("", "not empty"),
        ("a\0b", "without NUL"),
        ("x" * 1025, "1024 bytes"),
        ("\ud800", "valid Unicode"),
    ):
        with pytest.raises(ConfigError, match=why):
            checked_name(np.str_(text))
    for wrong in (b"k", 1, ["k"], np.array("k")):
        with pytest.raises(ConfigError, match=r"expected a name \(a string"):
            checked_name(wrong)  # type: ignore[call-overload]


def test_a_whole_number_is_made_plain_and_nothing_else_is_one() -> None:
    for given in (2, np.int64(2), np.uint8(2), Rank.THIRD):
        assert type(whole_number(given)) is int
        assert whole_number(given) == 2
    assert whole_number(Flag(7)) == 7
    assert [whole_number(one) for one in (True, np.True_, 2.0, "2", None, np.array(2), 2j)] == [None] * 7
