"""Urgent calls go first, on every link, with unchanged results."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfcomm import Communicator
from kfcomm.core import names
from kfcomm.engine.link_table import PeerSender
from kfcomm.errors import CollectiveAborted, ConfigError
from kfcomm.transports.memory import MemoryLink
from kfcomm.transports.shm.sender import ShmSender
from tests.collectives.calls import CALLS, X, verb_of
from tests.conformance.worlds import ends, everywhere, same_bits, turns, world

LARGE = np.ones(32 << 20, np.uint8)
"""Far more than any link has under way."""

MESSAGES: dict[str, Any] = {
    "send": (lambda comm, **how: comm.send(X, 1, **how), lambda comm, **how: comm.recv(0, **how)),
    "recv_any": (lambda comm, **how: comm.send(X, 1, **how), lambda comm, **how: comm.recv_any(**how)),
    "send_object": (lambda comm, **how: comm.send_object(1, 1, **how), lambda comm, **how: comm.recv_object(0, **how)),
}
BAD = [None, 1.0, "high", True, 1 << 15, -(1 << 15) - 1, np.int64(1 << 15), np.float32(1)]


def test_every_verb_is_tried() -> None:
    takes = {
        name
        for name, verb in inspect.getmembers(Communicator, inspect.isfunction)
        if "priority" in inspect.signature(verb).parameters and not name.startswith("_") and not name.endswith("_init")
    }
    tried = set(map(verb_of, CALLS))
    assert takes == tried | {"send", "send_object", "recv", "recv_any", "recv_object"}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The priorities of all chunks that were handed to links."""
    priorities: set[int] = set()

    def spy(kind: Any) -> None:
        original = kind.send

        def send(self: Any, header: Any, payload: Any = None, owner: Any = None, priority: int = 0) -> bool:
            if owner is not None:
                priorities.add(priority)
            return bool(original(self, header, payload, owner, priority))

        monkeypatch.setattr(kind, "send", send)

    for kind in (PeerSender, MemoryLink, ShmSender):
        spy(kind)
    return priorities


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", CALLS)
async def test_every_chunk_of_a_call_has_its_priority(verb: str, seen: set[int]) -> None:
    async with world(3) as comms:
        plain = await everywhere(comms, CALLS[verb])
        assert seen == {0}
        seen.clear()
        urgent = await everywhere(comms, lambda comm: CALLS[verb](comm, priority=np.int32(7)))
        assert seen == {7}
        assert repr(plain) == repr(urgent)


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", MESSAGES)
async def test_every_chunk_of_a_message_has_the_priority_of_its_sender_or_receiver(verb: str, seen: set[int]) -> None:
    send, receive = MESSAGES[verb]
    async with world(2) as comms:
        await asyncio.gather(send(comms[0], priority=3), receive(comms[1], priority=-4))
        assert seen == {3, -4}


@pytest.mark.asyncio
@pytest.mark.parametrize("bad", BAD, ids=repr)
async def test_a_priority_that_is_none(bad: Any) -> None:
    async with world(2, aborted=True) as comms:
        for verb, call in CALLS.items():
            handles = [call(comms[0])]
            with pytest.raises(ConfigError, match="whole number from -32768 to 32767"):
                call(comms[1], priority=bad)
            for error in await asyncio.gather(*handles, return_exceptions=True):
                assert isinstance(error, CollectiveAborted), verb
        for call in (one for pair in MESSAGES.values() for one in pair):
            with pytest.raises(ConfigError, match="whole number"):
                call(comms[0], priority=bad)
        assert await ends(comms, lambda comm: comm.barrier(priority=32767)) == [None, None]


@pytest.mark.asyncio
@pytest.mark.parametrize("links", ["memory"], indirect=True)  # whose turns can be counted
@pytest.mark.parametrize("strategy", ["ring", "clique", "star"])
@pytest.mark.parametrize("is_repeated", [False, True])
async def test_urgent_calls_overtake_calls_under_way(links: None, strategy: str, is_repeated: bool) -> None:
    async with world(3, strategy=strategy) as comms:
        for name, x in (("warm", X), ("large", LARGE), ("small", X)) if is_repeated else (("warm", X),):
            await everywhere(comms, lambda comm, name=name, x=x: comm.all_reduce(x, name, op="max"))
        done: list[str] = []

        def call(comm: Communicator, x: Any, name: str, priority: int) -> Any:
            handle = comm.all_reduce(x, name, op="max", priority=priority)
            handle.add_done_callback(lambda _: done.append(name))
            return handle

        large = [call(comm, LARGE, "large", 0) for comm in comms]
        await turns(3)
        assert not done
        small = [call(comm, X, "small", 1) for comm in comms]
        await asyncio.gather(*large, *small)
        assert done == ["small"] * 3 + ["large"] * 3


@pytest.mark.asyncio
@pytest.mark.parametrize("links", ["memory"], indirect=True)
async def test_links_have_low_latency_from_the_first_priority_on(links: None, monkeypatch: pytest.MonkeyPatch) -> None:
    low_latency: set[MemoryLink] = set()
    monkeypatch.setattr(MemoryLink, "set_low_latency", lambda link: low_latency.add(link))
    async with world(3, strategy="star") as comms:

        def open_links() -> set[Any]:
            return {link for comm in comms for link in comm._session.engine.links._links()}

        for _ in range(2):
            await everywhere(comms, lambda comm: comm.all_reduce(X))
        assert not low_latency
        await everywhere(comms, lambda comm: comm.all_reduce(X, priority=-1))
        assert low_latency == open_links()
        await asyncio.gather(comms[1].send(X, 2), comms[2].recv(1))
        assert low_latency == open_links()


@pytest.mark.asyncio
@pytest.mark.parametrize("links", ["memory"], indirect=True)
async def test_many_levels_leave_from_the_most_urgent_down(links: None) -> None:
    async with world(2, strategy="star") as comms:
        await everywhere(comms, lambda comm: comm.barrier())
        done: tuple[list[int], list[int]] = ([], [])
        handles = []
        for level in (3, -1, 7, 0, 5, -9, 2):
            for comm, mine in zip(comms, done, strict=True):
                handle = comm.all_reduce(X, f"level {level}", priority=level)
                handle.add_done_callback(lambda _, level=level, mine=mine: mine.append(level))
                handles.append(handle)
        await asyncio.gather(*handles)
        assert done == ([7, 5, 3, 2, 0, -1, -9],) * 2


@pytest.mark.asyncio
async def test_numbers_of_signatures_change_their_meaning_while_chunks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "MAX_SIGNATURES", 2)
    lengths = [(1 << 18) + 1000 * number for number in range(30)]
    async with world(2) as comms:
        await everywhere(comms, lambda comm: comm.barrier())
        handles = [
            comm.all_reduce(np.full(length, 1.0 + comm.rank), f"tensor/{length}", priority=length % 7 - 3)
            for length in lengths
            for comm in comms
        ]
        results = await asyncio.gather(*handles)
        assert all((result == 3.0).all() for result in results)


@pytest.mark.asyncio
@settings(max_examples=20)
@given(st.integers(2, 4), st.sampled_from(["ring", "clique", "binary_tree_star"]), st.integers(0, 99), st.data())
async def test_the_bits_are_the_same_whatever_the_priorities(
    size: int, strategy: str, seed: int, data: st.DataObject
) -> None:
    levels = data.draw(st.lists(st.lists(st.integers(-3, 3), min_size=size, max_size=size), min_size=1, max_size=12))
    rng = np.random.default_rng(seed)
    lengths = [int(10 ** rng.uniform(0, 5)) for _ in levels]
    inputs = [[rng.standard_normal(length).astype(np.float32) for _ in range(size)] for length in lengths]

    async def results(comms: Any, factor: int) -> list[Any]:
        handles = [
            comm.all_reduce(inputs[number][comm.rank], f"tensor/{number}", priority=of[comm.rank] * factor)
            for comm in comms
            for number, of in enumerate(levels)
        ]
        return await asyncio.gather(*handles)

    async with world(size, strategy=strategy) as comms:
        plain, mixed = await results(comms, 0), await results(comms, 1)
        assert all(same_bits(one, other) for one, other in zip(plain, mixed, strict=True))
