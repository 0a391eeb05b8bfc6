import asyncio

import pytest

from kfcomm.errors import LocalProtocolError
from kfcomm.rendezvous.board import MAX_KEYS, MAX_VALUE_NBYTES, Board, Closed, Exit, Why

FOREVER_S = 1e9


def test_the_first_claim_stands() -> None:
    board = Board()
    assert board.claim("a", b"1") == b"1"
    assert board.claim("a", b"2") == b"1"


@pytest.mark.asyncio
async def test_a_wait_ends_when_the_value_is_set() -> None:
    board = Board()
    waiting = asyncio.create_task(board.get("folder/a", FOREVER_S))
    await asyncio.sleep(0)
    board.set("folder/b", b"another")
    board.set("folder/a", b"1")
    assert await waiting == b"1"


@pytest.mark.asyncio
async def test_a_wait_without_time_gives_what_there_is() -> None:
    board = Board()
    assert await board.get("a", 0) is None
    board.set("world/1", b"1")
    assert await board.collect("world", 2, None, 0) == {"1": b"1"}


@pytest.mark.asyncio
async def test_collect_waits_for_the_number_or_for_the_exception() -> None:
    board = Board()
    enough = asyncio.create_task(board.collect("world", 2, "fault", FOREVER_S))
    await asyncio.sleep(0)
    board.set("world/0", b"0")
    board.set("world/1", b"1")
    assert await enough == {"0": b"0", "1": b"1"}
    broken = asyncio.create_task(board.collect("world", 9, "fault", FOREVER_S))
    await asyncio.sleep(0)
    board.set("world/fault", b"why")
    assert (await broken)["fault"] == b"why"


@pytest.mark.asyncio
async def test_exits_are_told_in_order_and_the_first_report_stands() -> None:
    board = Board()
    waiting = asyncio.create_task(board.exits_since(0, FOREVER_S))
    await asyncio.sleep(0)
    board.report_exit(Exit(3, -9))
    assert await waiting == [Exit(3, -9)]
    board.report_exit(Exit(3, 0))
    board.report_exit(Exit(1, 0))
    assert await board.exits_since(1, FOREVER_S) == [Exit(1, 0)]


@pytest.mark.asyncio
async def test_closing_ends_every_wait_and_refuses_the_rest() -> None:
    board = Board()
    waits = [
        asyncio.create_task(board.get("a", FOREVER_S)),
        asyncio.create_task(board.exits_since(0, FOREVER_S)),
    ]
    await asyncio.sleep(0)
    board.close()
    for wait in waits:
        with pytest.raises(Closed):
            await wait
    with pytest.raises(Closed):
        board.set("a", b"")
    with pytest.raises(Closed):
        board.report_exit(Exit(0, 0))


@pytest.mark.asyncio
async def test_a_cancelled_wait_leaves_nothing() -> None:
    board = Board()
    for _ in range(3):
        waiting = asyncio.create_task(board.get("a", FOREVER_S))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
    assert not board._waiters


@pytest.mark.parametrize("key", ["", "x" * 257, "a\nb", "\0exits"])
def test_keys_are_bounded(key: str) -> None:
    with pytest.raises(LocalProtocolError, match="key"):
        Board().set(key, b"")


def test_values_and_their_sum_are_bounded() -> None:
    board = Board()
    with pytest.raises(LocalProtocolError, match="bytes"):
        board.set("a", b"x" * (MAX_VALUE_NBYTES + 1))
    for number in range(128):
        board.set(str(number), b"x" * MAX_VALUE_NBYTES)
    with pytest.raises(LocalProtocolError, match="full"):
        board.set("one more", b"x")
    board.set("0", b"")
    board.set("one more", b"x")


def test_the_number_of_keys_is_bounded() -> None:
    board = Board()
    for number in range(MAX_KEYS):
        board.set(str(number), b"")
    with pytest.raises(LocalProtocolError, match="full"):
        board.set("one more", b"")


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (Exit(1, 3), "the process of rank 1 ended (exit code 3)"),
        (Exit(1, -9, Why.ELSEWHERE), "the process of rank 1 ended (SIGKILL)"),
        (Exit(1, -63), "the process of rank 1 ended (signal 63)"),
        (Exit(1, 1, Why.SILENT), "the launcher of rank 1 is not heard of any more"),
    ],
)
def test_an_end_in_words(end: Exit, text: str) -> None:
    assert end.describe() == text
