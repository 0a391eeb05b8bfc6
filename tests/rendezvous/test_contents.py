import asyncio

import pytest

from kfcomm.errors import LocalProtocolError
from kfcomm.rendezvous.contents import MAX_KEYS, Contents
from kfcomm.rendezvous.keyvalue import MAX_VALUE_NBYTES, Exit, StoreClosed, Why

FOREVER_S = 1e9


def test_the_first_claim_stands() -> None:
    contents = Contents()
    assert contents.claim("a", b"1") == b"1"
    assert contents.claim("a", b"2") == b"1"


@pytest.mark.asyncio
async def test_a_wait_ends_when_the_value_is_set() -> None:
    contents = Contents()
    waiting = asyncio.create_task(contents.get("folder/a", FOREVER_S))
    await asyncio.sleep(0)
    contents.set("folder/b", b"another")
    contents.set("folder/a", b"1")
    assert await waiting == b"1"


@pytest.mark.asyncio
async def test_a_wait_without_time_gives_what_there_is() -> None:
    contents = Contents()
    assert await contents.get("a", 0) is None
    contents.set("world/1", b"1")
    assert await contents.collect("world", 2, None, 0) == {"1": b"1"}


@pytest.mark.asyncio
async def test_collect_waits_for_the_number_or_for_the_exception() -> None:
    contents = Contents()
    enough = asyncio.create_task(contents.collect("world", 2, "fault", FOREVER_S))
    await asyncio.sleep(0)
    contents.set("world/0", b"0")
    contents.set("world/1", b"1")
    assert await enough == {"0": b"0", "1": b"1"}
    broken = asyncio.create_task(contents.collect("world", 9, "fault", FOREVER_S))
    await asyncio.sleep(0)
    contents.set("world/fault", b"why")
    assert (await broken)["fault"] == b"why"


@pytest.mark.asyncio
async def test_exits_are_told_in_order_and_the_first_report_stands() -> None:
    contents = Contents()
    waiting = asyncio.create_task(contents.exits_since(0, FOREVER_S))
    await asyncio.sleep(0)
    contents.report_exit(Exit(3, -9))
    assert await waiting == [Exit(3, -9)]
    contents.report_exit(Exit(3, 0))
    contents.report_exit(Exit(1, 0))
    assert await contents.exits_since(1, FOREVER_S) == [Exit(1, 0)]


@pytest.mark.asyncio
async def test_closing_ends_every_wait_and_refuses_the_rest() -> None:
    contents = Contents()
    waits = [
        asyncio.create_task(contents.get("a", FOREVER_S)),
        asyncio.create_task(contents.exits_since(0, FOREVER_S)),
    ]
    await asyncio.sleep(0)
    contents.close()
    for wait in waits:
        with pytest.raises(StoreClosed):
            await wait
    with pytest.raises(StoreClosed):
        contents.set("a", b"")
    with pytest.raises(StoreClosed):
        contents.report_exit(Exit(0, 0))


@pytest.mark.asyncio
async def test_a_cancelled_wait_leaves_nothing() -> None:
    contents = Contents()
    for _ in range(3):
        waiting = asyncio.create_task(contents.get("a", FOREVER_S))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
    assert not contents._waits._waiters


@pytest.mark.parametrize("key", ["", "x" * 257, "a\nb", "\0exits"])
def test_keys_are_bounded(key: str) -> None:
    with pytest.raises(LocalProtocolError, match="key"):
        Contents().set(key, b"")


def test_values_and_their_sum_are_bounded() -> None:
    contents = Contents()
    with pytest.raises(LocalProtocolError, match="bytes"):
        contents.set("a", b"x" * (MAX_VALUE_NBYTES + 1))
    for number in range(128):
        contents.set(str(number), b"x" * MAX_VALUE_NBYTES)
    with pytest.raises(LocalProtocolError, match="full"):
        contents.set("one more", b"x")
    contents.set("0", b"")
    contents.set("one more", b"x")


def test_the_number_of_keys_is_bounded() -> None:
    contents = Contents()
    for number in range(MAX_KEYS):
        contents.set(str(number), b"")
    with pytest.raises(LocalProtocolError, match="full"):
        contents.set("one more", b"")


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
