"""Between two blocking calls: nobody looks for news, nobody was told, and yet nothing waits for long."""

import pytest

from kfcomm.transports.shm import hub as hubs
from tests.support import run
from tests.transports.shm.pairs import Pair, linked, parked, processes
from tests.transports.streams import chunk


def called(hub):
    """What a blocking call does around its work."""
    hub.stand_in()
    hub.step_back()


async def in_a_lull(pair):
    """The hub of the receiver, which was called and is not looked after."""
    hub = pair.other._keeper
    await parked(hub)
    called(hub)
    assert hub.is_awake
    return hub


def test_a_rank_that_is_not_called_again_parks(monkeypatch):
    monkeypatch.setattr(hubs, "LULL_S", 0.0)

    async def main():
        async with linked() as pair:
            await parked(await in_a_lull(pair))

    run(main())


def test_a_lull_begins_anew_with_every_call(monkeypatch):
    monkeypatch.setattr(hubs, "LULL_S", 1e6)

    async def main():
        async with linked() as pair:
            hub = await in_a_lull(pair)
            called(hub)
            hub._after_lull()  # the first is over
            assert hub.is_awake
            hub.stand_in()
            hub._after_lull()
            hub.step_back()
            assert hub.is_awake
            hub._after_lull()
            assert not hub.is_awake

    run(main())


def test_a_peer_that_parks_rings_who_has_not_read(monkeypatch):
    monkeypatch.setattr(hubs, "LULL_S", 1e6)
    monkeypatch.setattr(hubs, "LINGER_S", -1.0)

    async def main():
        async with linked() as pair:
            await in_a_lull(pair)
            pair.link.send(chunk(0))
            pair.link.flush()
            assert not pair.link.owes_bell  # to one who says that it looks
            pair.link._keeper.wake()  # as whoever posts does
            await pair.heard.until(lambda heard: heard.frames)

    run(main())


@pytest.mark.parametrize("how", ["wake", "wait"])
def test_who_begins_to_wait_in_a_lull_looks(monkeypatch, how):
    monkeypatch.setattr(hubs, "LULL_S", 1e6)
    monkeypatch.setattr(hubs, "SPIN_S", 1e6)
    waits = []

    async def main():
        async with processes(is_waiting=lambda: bool(waits)) as (here, there):
            pair = Pair(here, there)
            await parked(there.hub)
            called(there.hub)
            waits.append(1)
            pair.link.send(chunk(0))
            if how == "wake":
                there.hub.wake()
            else:
                called(there.hub)
            await pair.heard.until(lambda heard: heard.frames)
            waits.clear()
            await pair.close()

    run(main())
