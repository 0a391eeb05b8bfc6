import array
import asyncio
import contextlib
import os
import socket
from pathlib import Path

import pytest

from kfcomm.core.handshake import Keys
from kfcomm.errors import KfcommError, RemoteProtocolError, TransportError
from kfcomm.transports.base import LinkRefused, Surroundings
from kfcomm.transports.loop_driver import LoopDriver
from kfcomm.transports.reactor import Reactor
from kfcomm.transports.shm import endpoint, segment
from kfcomm.transports.shm.endpoint import OwnMemory, ShmEndpoint, accept, offer
from kfcomm.transports.shm.heap import Heaps
from kfcomm.transports.shm.ring import SHARED_NBYTES
from kfcomm.transports.shm.segment import SKEW_NBYTES, Arena, create
from kfcomm.transports.shm.slots import SlotMemory, nbytes_of_regions
from kfcomm.transports.sockets import Connection
from tests.leaks import descriptors
from tests.transports.shm.pairs import MIB, NoSlots, turns
from tests.transports.streams import Notes, chunk, noise


class Inbound(Notes):
    """Notes of one process; its link, once a peer has opened one."""

    def __init__(self):
        super().__init__()
        self.is_waiting = int  # nothing
        self.slots = NoSlots()
        self.links = []

    def tell_waits(self, begins):
        """Nothing is ever in flight here."""

    def opened(self, link):
        self.links.append(link)
        self._heard.set()


BOTH = (0, 1)
BELL = b"\0none"
"""Address of a bell that does not exist."""


class SilentBell:
    """Bell of a process that rings no other."""

    address = BELL

    def ring(self, address):
        pass


def over(sock):
    """The connection of this socket after its handshake; shared memory needs no keys."""
    return Connection(sock, Keys(b"", b""))


@contextlib.asynccontextmanager
async def two():
    """Two processes' endpoints, their inbounds, and connected sockets; afterwards nothing is open."""
    loop = asyncio.get_running_loop()
    inbounds = Inbound(), Inbound()
    reactors = Reactor(), Reactor()
    drivers = [LoopDriver(reactor, loop, looks=1) for reactor in reactors]
    endpoints = [
        ShmEndpoint(Surroundings(loop, reactor, inbound, rank, BOTH, 2))
        for rank, (reactor, inbound) in enumerate(zip(reactors, inbounds, strict=True))
    ]
    socks = socket.socketpair()
    for sock in socks:
        sock.setblocking(False)
    try:
        yield endpoints, inbounds, socks
    finally:
        for one in endpoints:
            await one.close()
        for sock in socks:
            sock.close()
        await turns(3)
        for driver in drivers:
            driver.close()


@contextlib.contextmanager
def pair():
    one, other = socket.socketpair()
    one.setblocking(False)
    other.setblocking(False)
    with one, other:
        yield one, other


@contextlib.contextmanager
def slots():
    made = SlotMemory.make(BOTH, Heaps(0))
    yield made
    made.close()


@contextlib.contextmanager
def arena():
    made = Arena(1)
    yield made
    made.close()


async def carries(link, heard):
    """Send a payload over the link, and check that it arrives whole."""
    payload = noise(MIB)
    link.send(chunk(1), memoryview(payload))
    link.flush()
    await heard.until(lambda heard: heard.frames)
    assert heard.frames == [(chunk(1), bytes(payload))]


@pytest.mark.asyncio
async def test_a_link_comes_about_and_works():
    async with two() as ((here, there), (notes, heard), (near, far)):
        there.adopt(over(far), 0)
        link = await here.connect(over(near), 1)
        await carries(link, heard)
        assert (link.peer, heard.links[0].peer) == (1, 0)
        assert repr(link) == "<ShmSender to rank 1, open>"
        link.close()
        assert repr(link) == "<ShmSender to rank 1, closing>"
        await notes.until(lambda notes: notes.ends)
        await heard.until(lambda heard: heard.ends)
        assert notes.ends == heard.ends == [None]
        assert repr(heard.links[0]) == "<ShmReceiver to rank 0, closed>"


def in_dev_shm():
    """Return the files below /dev/shm that this process has open or mapped."""
    names = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            names.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return {name for name in names if name.startswith("/dev/shm")}


@pytest.mark.asyncio
async def test_shared_memory_has_no_name():
    before = in_dev_shm()
    async with two() as ((here, there), _, (near, far)):
        there.adopt(over(far), 0)
        await here.connect(over(near), 1)
        assert in_dev_shm() == before
        opened = [target for target in descriptors() if "memfd" in target]
        assert opened
        assert all("(deleted)" in target for target in opened)
        assert here.descriptors()
        assert there.descriptors() == there.hub.descriptors()


@pytest.mark.asyncio
async def test_late_links_end_with_endpoint():
    async with two() as ((here, there), (notes, heard), (near, far)):
        there.adopt(over(far), 0)
        link = await here.connect(over(near), 1)
        await heard.until(lambda heard: heard.links)
        await there.close()
        await here.close()
        await notes.until(lambda notes: notes.ends)
        await heard.until(lambda heard: heard.ends)
        assert link.is_closing
        assert not here.descriptors()
        assert here.hub.descriptors() == there.hub.descriptors() == []


@pytest.mark.asyncio
async def test_link_ends_whose_other_end_was_closed_before_it_began():
    async with two() as ((here, there), (notes, heard), (near, far)):
        there.adopt(over(far), 0)
        await here.connect(over(near), 1)
        await there.close()
        await notes.until(lambda notes: notes.ends)
        assert isinstance(notes.ends[0], TransportError)
        assert not heard.links


# A process that cannot


@pytest.mark.asyncio
@pytest.mark.parametrize("unable", [0, 1])
async def test_reason_of_refusal_reaches_other_side(unable, monkeypatch):
    async with two() as ((here, there), (_, heard), (near, far)):
        answers = iter([None] * unable + ["not on this host"] * 2)  # the side that connects asks first
        monkeypatch.setattr(endpoint, "why_unsupported", lambda: next(answers))
        there.adopt(over(far), 0)
        with pytest.raises(LinkRefused, match="not on this host"):
            await here.connect(over(near), 1)
        assert near.fileno() < 0
        while far.fileno() >= 0:  # noqa: ASYNC110  its task tells nobody
            await asyncio.sleep(0)
        assert not heard.links


@pytest.mark.asyncio
@pytest.mark.parametrize("which", ["kfcomm-arena", "kfcomm-link"])
async def test_a_system_that_gives_no_memory(which, monkeypatch):
    make = segment.make

    def failing(name, nbytes):
        if name == which:
            raise OSError(12, "Cannot allocate memory")
        return make(name, nbytes)

    monkeypatch.setattr(segment, "make", failing)
    async with two() as ((here, _), _, (near, _)):
        with pytest.raises(LinkRefused, match="Cannot allocate memory"):
            await here.connect(over(near), 1)
        assert near.fileno() < 0


@pytest.mark.asyncio
async def test_sockets_that_pass_no_descriptors():
    async with two() as ((here, _), _, _):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            sock = socket.create_connection(listener.getsockname())
            sock.setblocking(False)
            other, _ = listener.accept()
            other.close()  # a TCP socket takes the message, and drops the descriptors
            with pytest.raises(KfcommError):
                await here.connect(over(sock), 1)
            assert sock.fileno() < 0


# A peer that is no peer


def memory(nbytes, sealed=True):
    if sealed:
        return create("kfcomm-link", nbytes)[0]
    descriptor = os.memfd_create("kfcomm-link", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    return descriptor


def message(*, magic=endpoint._MAGIC, shared=SHARED_NBYTES, arena=MIB, max_lent=4):
    return endpoint._OFFER.pack(magic, shared, arena, max_lent) + BELL


SLOTS = 2 * nbytes_of_regions(2)

OFFERS = [
    ("garbage", b"GET / HTTP/1.1\r\n\r\n", ()),
    ("a short offer", message()[:20], (SHARED_NBYTES, MIB, SLOTS)),
    ("no bell", message()[: -len(BELL)], (SHARED_NBYTES, MIB, SLOTS)),
    ("a bell with a path", message()[: -len(BELL)] + b"/tmp/bell", (SHARED_NBYTES, MIB, SLOTS)),
    ("no descriptors", message(), ()),
    ("one descriptor", message(), (SHARED_NBYTES,)),
    ("two descriptors", message(), (SHARED_NBYTES, MIB)),
    ("another magic", message(magic=b"kfcomm 9"), (SHARED_NBYTES, MIB, SLOTS)),
    ("a segment of another size", message(shared=4096), (4096, MIB, SLOTS)),
    ("a segment smaller than said", message(), (4096, MIB, SLOTS)),
    ("an arena smaller than said", message(arena=2 * MIB), (SHARED_NBYTES, MIB, SLOTS)),
    ("no arena", message(arena=0), (SHARED_NBYTES, MIB, SLOTS)),
    ("a huge arena", message(arena=1 << 60), (SHARED_NBYTES, MIB, SLOTS)),
    ("slots for fewer ranks", message(), (SHARED_NBYTES, MIB, nbytes_of_regions(1))),
    ("slots that may shrink", message(), (SHARED_NBYTES, MIB, -SLOTS)),
    ("segments that may shrink", message(), (-SHARED_NBYTES, -MIB, -SLOTS)),
    ("an arena that may shrink", message(), (SHARED_NBYTES, -MIB, SLOTS)),
]


@pytest.mark.asyncio
@pytest.mark.parametrize(("data", "sizes"), [pytest.param(*rest, id=name) for name, *rest in OFFERS])
async def test_invalid_offer_is_refused_and_leaves_nothing(data, sizes):
    with pair() as (sock, peer):
        passed = [memory(abs(nbytes), sealed=nbytes > 0) for nbytes in sizes]
        socket.send_fds(peer, [data], passed)
        before = descriptors()
        with pytest.raises(RemoteProtocolError):
            await accept(sock, 60.0, BOTH, Heaps(1), SilentBell())
        assert descriptors() == before
        assert peer.recv(1000).startswith(b"n")
        for descriptor in passed:
            os.close(descriptor)


@pytest.mark.asyncio
@pytest.mark.parametrize("has_heap", [False, True])
async def test_descriptors_beyond_those_of_an_offer_are_dropped(has_heap):
    with pair() as (sock, peer):
        passed = [memory(SHARED_NBYTES), memory(MIB), memory(SLOTS)]
        if has_heap:
            passed += [memory(4096), memory(4096)]
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))
        peer.sendmsg([message()], [rights])
        before = sum(descriptors().values())
        peer.send(b"y")
        mapped = await accept(sock, 60.0, BOTH, Heaps(1), SilentBell())
        assert sum(descriptors().values()) == before
        mapped.slots.close()
        assert (mapped.heap is not None) == has_heap
        if mapped.heap is not None:
            mapped.heap.close()
        assert (len(mapped.arena), mapped.max_lent) == (MIB - 2 * SKEW_NBYTES, 4)
        assert peer.recv(10) == b"y" + BELL
        for descriptor in passed:
            os.close(descriptor)


CLOSED = "the peer closed the connection"


@pytest.mark.asyncio
@pytest.mark.parametrize("answer", [b"n", b"nnot me", b"x", b"\xff\xfe", b""])
async def test_a_refusal_is_told_as_one(answer):
    with pair() as (sock, peer), arena() as mine, slots() as shown:
        peer.send(answer)
        peer.shutdown(socket.SHUT_WR)
        with pytest.raises(LinkRefused) as caught:
            await offer(sock, OwnMemory(mine, 4, shown, None, BELL))
        assert str(caught.value) == {b"nnot me": "not me", b"\xff\xfe": "\ufffd"}.get(answer, CLOSED)


@pytest.mark.asyncio
async def test_a_peer_that_is_gone_does_not_count_as_a_refusal():
    with pair() as (sock, peer), arena() as mine, slots() as shown:
        peer.close()
        with pytest.raises(TransportError) as caught:
            await offer(sock, OwnMemory(mine, 4, shown, None, BELL))
        assert not isinstance(caught.value, LinkRefused)


@pytest.mark.asyncio
async def test_a_peer_that_goes_before_its_offer():
    with pair() as (sock, peer):
        peer.close()
        with pytest.raises(KfcommError):
            await accept(sock, 60.0, BOTH, Heaps(1), SilentBell())


@pytest.mark.asyncio
async def test_a_peer_that_goes_after_its_offer_leaves_a_link_that_ends():
    async with two() as ((_, there), (_, heard), (near, far)):
        with arena() as mine, slots() as shown:
            offering = asyncio.ensure_future(offer(near, OwnMemory(mine, 4, shown, None, BELL)))
            await asyncio.sleep(0)
            there.adopt(over(far), 0)
            await heard.until(lambda heard: heard.links)
            await offering
            there.forget(0)
            await heard.until(lambda heard: heard.ends)
            assert "rank 0 is lost" in str(heard.ends[0])


@pytest.mark.asyncio
async def test_peer_that_gives_up_after_its_offer_leaves_no_link():
    async with two() as ((_, there), (_, heard), (near, far)):
        with arena() as mine, slots() as shown:
            offering = asyncio.ensure_future(offer(near, OwnMemory(mine, 4, shown, None, BELL)))
            await asyncio.sleep(0)
            there.adopt(over(far), 0)
            offering.cancel()
            await asyncio.gather(offering, return_exceptions=True)
            near.close()
            while far.fileno() >= 0:  # noqa: ASYNC110  its task tells nobody
                await asyncio.sleep(0)
            assert not heard.links
            assert not there.hub._links


@pytest.mark.asyncio
async def test_link_has_no_descriptor_and_its_end_is_heard_by_the_bell():
    async with two() as ((here, there), (notes, heard), (near, far)):
        there.adopt(over(far), 0)
        link = await here.connect(over(near), 1)
        await heard.until(lambda heard: heard.links)
        assert near.fileno() == far.fileno() == -1
        assert link.descriptors() == heard.links[0].descriptors() == ()
        link.abort()
        await heard.until(lambda heard: heard.ends)
        assert "without a goodbye" in str(heard.ends[0])
        assert notes.ends == [None]


@pytest.mark.asyncio
async def test_a_connection_without_an_offer_is_given_up():
    with pair() as (sock, peer):
        with pytest.raises(TransportError, match="no word about shared memory within 0 s"):
            await accept(sock, 0.0, BOTH, Heaps(1), SilentBell())
        assert peer.recv(1000).startswith(b"nno word")


@pytest.mark.asyncio
async def test_offer_waits_for_busy_peer(monkeypatch):
    monkeypatch.setattr(endpoint, "OFFER_WITHIN_S", 0.0)
    with pair() as (sock, peer), arena() as mine, slots() as shown:
        offering = asyncio.ensure_future(offer(sock, OwnMemory(mine, 4, shown, None, BELL)))
        await turns(50)
        assert not offering.done()
        peer.send(b"y" + BELL)
        assert (await offering)[1] == BELL


@pytest.mark.asyncio
async def test_offers_under_way_end_with_endpoint():
    async with two() as ((here, there), _, (near, far)):
        there.adopt(over(far), 0)
        await there.close()
        assert far.fileno() < 0
        connecting = asyncio.ensure_future(here.connect(over(near), 1))
        await asyncio.sleep(0)
        connecting.cancel()
        with pytest.raises((asyncio.CancelledError, KfcommError)):
            await connecting
        assert near.fileno() < 0
    async with two() as ((_, there), _, (_, far)):
        there.adopt(over(far), 0)
        await turns(3)  # its task has begun to wait
        await there.close()
        assert far.fileno() < 0


@pytest.mark.asyncio
async def test_link_after_handover_gets_new_memory():
    async with two() as ((here, there), (_, heard), (near, far)):
        there.adopt(over(far), 0)
        await here.connect(over(near), 1)
        handed = here._arena.descriptor
        reactor = Reactor()
        following = ShmEndpoint(Surroundings(asyncio.get_running_loop(), reactor, Inbound(), 0, BOTH, 2, former=here))
        assert following.descriptors() == [handed]
        near, far = socket.socketpair()
        for sock in (near, far):
            sock.setblocking(False)
        there.adopt(over(far), 0)
        link = await here.connect(over(near), 1)
        await carries(link, heard)
        await following.close()
        reactor.close()


@pytest.mark.asyncio
async def test_the_more_peers_the_more_memory_and_the_less_is_lent():
    loop = asyncio.get_running_loop()
    for peers in (0, 1, 3, 7, 31, 32, 63):
        reactor = Reactor()
        made = ShmEndpoint(Surroundings(loop, reactor, Inbound(), 0, tuple(range(peers + 1)), peers + 1))
        assert endpoint.MIN_SLABS <= made._num_slabs <= endpoint.MAX_SLABS
        assert 2 * made._max_lent * peers <= made._num_slabs
        await made.close()
        reactor.close()
