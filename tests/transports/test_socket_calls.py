"""How many system calls a link makes for what it moves: figures that no noise can move."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import pytest

from kfcomm.transports.reactor import Reactor
from kfcomm.transports.stream import StreamLink
from tests.transports.streams import Notes, Owner, chunk, noise, sockets

FOREVER_S = 1e6


class Counted:
    """A socket that counts the calls which move bytes, and those of them that move none."""

    def __init__(self, sock):
        self._sock = sock
        self.calls = Counter()

    def __getattr__(self, name):
        return getattr(self._sock, name)

    def _counted(self, what, call, *args):
        self.calls[what] += 1
        try:
            return call(*args)
        except BlockingIOError:
            self.calls["in vain"] += 1
            raise

    def send(self, *args):
        return self._counted("send", self._sock.send, *args)

    def sendmsg(self, *args):
        return self._counted("send", self._sock.sendmsg, *args)

    def recv_into(self, *args):
        return self._counted("receive", self._sock.recv_into, *args)

    def recvmsg_into(self, *args):
        return self._counted("receive", self._sock.recvmsg_into, *args)


class Polls:
    """An epoll object that counts the system calls made with it."""

    def __init__(self, epoll):
        self._epoll = epoll
        self.calls = Counter()

    def __getattr__(self, name):
        return getattr(self._epoll, name)

    def poll(self, *args):
        found = self._epoll.poll(*args)
        self.calls["poll" if found else "poll in vain"] += 1
        return found

    def modify(self, *args):
        self.calls["modify"] += 1
        self._epoll.modify(*args)


class Ends:
    """Two links on one reactor, with their notes, and what was counted."""

    def __init__(self, reactor, kind):
        one, other = (Counted(sock) for sock in sockets(kind))
        self.reactor = reactor
        self.sent, self.received = one.calls, other.calls
        self.notes, self.heard = Notes(), Notes()
        self.link = StreamLink(one, reactor, self.notes, 1)
        self.other = StreamLink(other, reactor, self.heard, 0)
        self.polls = Polls(reactor._epoll)
        reactor._epoll = self.polls

    def hear(self, number):
        """Let the other end hear so many frames, as a caller does that rests when there is nothing."""
        while len(self.heard.frames) < number:
            self.reactor.wait(FOREVER_S)
            self.reactor.progress()


@pytest.fixture(params=["tcp", "unix"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    reactor = Reactor()
    made = Ends(reactor, request.param)
    yield made
    for link in (made.link, made.other):
        link.abort()
    reactor.progress()
    with contextlib.suppress(OSError):
        reactor.close()


@pytest.mark.parametrize("nbytes", [0, 32, 1024, 8192])
def test_a_small_frame_is_one_call_at_each_end_and_one_look(ends, nbytes):
    owner = Owner()
    for number in range(1, 4):
        ends.link.send(chunk(number), memoryview(noise(nbytes)), owner)
        ends.link.flush()
        assert owner.times == number
        ends.hear(number)
        assert ends.sent == {"send": number}
        assert ends.received == {"receive": number}
        assert ends.polls.calls == {"poll": number}


def test_small_frames_that_are_queued_together_are_one_call_at_each_end(ends):
    owner = Owner()
    for number in range(10):
        ends.link.send(chunk(number), memoryview(noise(1024)), owner)
    ends.link.send([6, 1, 1])
    ends.link.flush()
    assert owner.times == 10
    ends.hear(11)
    assert ends.sent == {"send": 1}
    assert ends.received == {"receive": 1}
    assert ends.polls.calls == {"poll": 1}


def test_next_head_is_read_with_end_of_payload(ends):
    """The first call finds a head, each other one takes the rest of a payload and the head of the next."""
    owner = Owner()
    for number in range(3):
        ends.link.send(chunk(number), memoryview(noise(30_000)), owner)
    ends.link.flush()
    assert owner.times == 3
    ends.hear(3)
    assert ends.sent == {"send": 1}
    assert ends.received == {"receive": 4}
    assert ends.polls.calls == {"poll": 1}


def test_small_frames_after_a_large_one_are_read_together(ends):
    """After a head and the rest of the large payload, a call takes several frames, whole or not."""
    for number, nbytes in enumerate([1 << 16, *[5000] * 9]):
        ends.link.send(chunk(number), memoryview(noise(nbytes)), Owner())
    ends.link.flush()
    ends.hear(10)
    assert [len(placement.view) for placement in ends.heard.placements] == [1 << 16]
    assert ends.received == {"receive": 5}
    assert ends.polls.calls == {"poll": 1}


def test_a_full_kernel_is_asked_once_and_watched_until_it_takes_more(ends):
    owner = Owner()
    payload = noise(32 << 20)
    ends.link.send(chunk(), memoryview(payload), owner)
    ends.link.flush()
    assert ends.sent == {"send": 1}
    ends.link.flush()  # nothing is asked again meanwhile
    assert ends.sent == {"send": 1}
    assert ends.polls.calls == {"modify": 1}
    ends.hear(1)
    assert ends.heard.frames == [(chunk(), bytes(payload))]
    assert ends.polls.calls["modify"] == 2
    assert not ends.polls.calls["poll in vain"]
    assert not ends.sent["in vain"]
    assert not ends.received["in vain"]
