"""Rendezvous through another library's store: all ranks see all, and errors name what is missing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from kfcomm.errors import RendezvousError
from kfcomm.rendezvous.identity import PeerInfo
from kfcomm.rendezvous.meeting import ForeignRendezvous


class Store(dict[str, bytes]):
    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def find(self, key: str) -> bytes | None:
        return self.get(key)


def meeting(store: Store, rank: int, size: int = 3, timeout_s: float = 30.0) -> ForeignRendezvous:
    return ForeignRendezvous(store, "Ray", "group 'g'", "kfcomm/g/1", rank, size, timeout_s)


def info(rank: int) -> PeerInfo:
    return PeerInfo.here(rank=rank, address="127.0.0.1", port=1000 + rank)


def test_all_ranks_get_all_descriptions_by_rank_and_the_value_of_rank_0() -> None:
    store = Store()

    async def one(rank: int) -> tuple[bytes, Sequence[PeerInfo]]:
        mine = meeting(store, rank)
        shared = await asyncio.to_thread(mine.share, "kfcomm/g/token", lambda: f"made by {rank}")
        return shared, await mine.exchange(info(rank))

    async def meet() -> list[tuple[bytes, Sequence[PeerInfo]]]:
        return await asyncio.gather(*map(one, (2, 1, 0)))

    assert asyncio.run(meet()) == [(b"made by 0", [info(rank) for rank in range(3)])] * 3


def test_missing_ranks_are_reported_once_and_named_at_the_timeout(caplog: pytest.LogCaptureFixture) -> None:
    waiting = meeting(Store(), 1, timeout_s=0.1)
    waiting.stall_after_s = 0.0
    with (
        caplog.at_level(logging.WARNING, "kfcomm"),
        pytest.raises(
            RendezvousError, match=r"^after 0\.\d* s 2 of 3 ranks have not joined the group 'g': missing 0, 2$"
        ),
    ):
        asyncio.run(waiting.exchange(info(1)))
    assert [one.getMessage() for one in caplog.records] == [
        "rank 1 has waited for 0 s to join the group 'g': missing 0, 2"
    ]


@pytest.mark.parametrize("value", ["no hexadecimal number", "00"])
def test_a_value_that_no_rank_wrote_is_refused(value: str) -> None:
    store = Store()
    store.set("kfcomm/g/1/1", value)
    with pytest.raises(RendezvousError, match=r"^Ray's store has an entry of another version of kfcomm: "):
        asyncio.run(meeting(store, 0, size=2).exchange(info(0)))
