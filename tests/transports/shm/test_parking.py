"""No wake-up is lost: two sides that rest whenever they can, stepped through every kind of interleaving.

The timers of the hubs never fire here, and nothing is ever in flight for them, so that each rests at once.
"""

import contextlib
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.transports import loop_driver
from kfcomm.transports.shm.sender import WINDOW_NBYTES
from tests.transports.shm.pairs import MIB, Pair, Process, Threads, linked, parked, turns
from tests.transports.streams import Owner, chunk, noise

SIZES = (0, 100, 4096, 5000, 200_000, MIB)
BIG = memoryview(noise(MIB))


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(loop_driver, "LINGER_S", -1.0)
    monkeypatch.setattr(loop_driver, "SPIN_S", -1.0)


class Heard:
    """An ``Inbound`` that answers chunks, and keeps some of what it is lent until ``let_go``."""

    def __init__(self, reactor):
        self.reactor = reactor
        self.frames = []
        self.ends = []
        self.loans = []
        self.keep = self.answer = False

    def receive(self, link, header, payload):
        self.frames.append((list(header), len(payload)))
        if header[0] != 1:
            return
        if self.keep and (loan := link.lend()) is not None:
            self.loans.append((link, loan))
        if self.answer:
            link.send([6, header[1], 1])
            self.reactor.call_soon(link.flush)

    def burst_end(self, link):
        pass

    def lost(self, link, error):
        self.ends.append(error)

    def let_go(self):
        for link, loan in self.loans:
            link.give_back(loan)
        self.loans.clear()


@contextlib.contextmanager
def stepped(choose, *, links=1, slabs=16):
    """Two sides with links between them, and what each hears; afterwards nothing is open any more."""
    threads = Threads(choose)
    here, there = (Process(loop, slabs=slabs) for loop in threads.sides)
    made = [Pair(here, there, notes=lambda: Heard(there.reactor)) for _ in range(links)]
    for side, process in enumerate((here, there)):
        threads.interleave(side, process.hub, "_fence")
        threads.interleave(side, process.reactor, "park")
        for name in ("_run", "_look_at_descriptors"):  # as if each had a turn of its own
            threads.interleave(side, process.reactor, name)
    for pair in made:
        threads.interleave(0, pair.link, "_fence")
        threads.interleave(1, pair.other, "_fence")
    try:
        yield threads, here, there, made
    finally:
        for pair in made:
            pair.link.abort()
            pair.other.abort()
        here.close()
        there.close()


actions = st.one_of(
    st.tuples(st.just("send"), st.integers(0, 1), st.sampled_from(SIZES)),
    st.tuples(st.just("define"), st.integers(0, 1), st.integers(1, 3000)),
    st.tuples(st.just("answers"), st.integers(0, 1), st.integers(1, 700)),
    st.tuples(st.just("keep"), st.integers(0, 1), st.booleans()),
    st.tuples(st.just("let go"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("step"), st.integers(0, 1), st.integers(1, 5)),
)


class Script:
    """Programs of both sides, and their expected results, for each link."""

    def __init__(self, threads, here, there, pairs):
        self.threads = threads
        self.here, self.there = here.reactor, there.reactor
        self.pairs = pairs
        self.sent, self.answered = [[] for _ in pairs], [[] for _ in pairs]

    def act(self, verb, which, number):
        near, far = self.threads.sides
        pair = self.pairs[which]
        match verb:
            case "send":
                self.sent[which].append(number)
                near.do(pair.link.send, chunk(len(self.sent[which])), BIG[:number])
                self.here.call_soon(pair.link.flush)
            case "define":
                near.do(pair.link.send, [4, 1, ["k" * number]])
                self.here.call_soon(pair.link.flush)
            case "answers":
                self.answered[which] += [number] * number
                for _ in range(number):
                    far.do(pair.other.send, [6, number, 0])
                self.there.call_soon(pair.other.flush)
            case "keep":
                pair.heard.keep, pair.heard.answer = bool(number), True
            case "let go":
                far.do(pair.heard.let_go)
            case "step":
                for _ in range(number):
                    self.threads.step(which)

    def check(self):
        for pair, chunks, answers in zip(self.pairs, self.sent, self.answered, strict=True):
            assert [size for header, size in pair.heard.frames if header[0] == 1] == chunks
            assert [header[1] for header, _ in pair.notes.frames if not header[2]] == answers


@given(st.lists(actions, max_size=40), st.booleans(), st.booleans(), st.lists(st.integers(0, 3), max_size=200))
def test_frames_arrive_though_both_sides_park(actions, closing, in_turns, choices):
    picks = iter(choices)
    with stepped(lambda: next(picks, 0), links=2, slabs=2) as (threads, here, there, pairs):
        near, far = threads.sides
        script = Script(threads, here, there, pairs)
        for action in actions:
            script.act(*action)
        threads.run(in_turns=in_turns)
        for pair in pairs:
            pair.heard.keep = False
            far.do(pair.heard.let_go)
        threads.run()
        if closing:
            for pair in pairs:
                near.do(pair.link.close)
            threads.run()
        script.check()
        for pair in pairs:
            assert pair.notes.ends == pair.heard.ends == [None] * closing
        assert not here.hub.is_awake
        assert not there.hub.is_awake
        near.do(here.hub.wake)  # what has come back meanwhile is looked at when there is a reason to look
        threads.run()
        assert here.arena.pieces_in_use == 0


def test_a_piece_that_comes_back_on_one_link_moves_what_waits_on_another():
    with stepped(lambda: 0, links=2, slabs=1) as (threads, here, _, (one, two)):
        near, far = threads.sides
        one.heard.keep = True
        near.do(one.link.send, chunk(0), BIG)
        near.do(one.link.flush)
        threads.run()
        near.do(two.link.send, chunk(1), BIG[:])  # not the view that the arena knows
        near.do(two.link.flush)
        threads.run()
        assert not two.heard.frames
        assert not here.hub.is_awake
        far.do(one.heard.let_go)
        threads.run()
        assert two.heard.frames == [(chunk(1), MIB)]


@pytest.mark.parametrize("in_turns", [False, True])
def test_answers_beyond_the_ring_all_arrive_when_the_sender_looks_again(in_turns):
    with stepped(lambda: 0) as (threads, _, there, (pair,)):
        _, far = threads.sides
        for index in range(2000):
            far.do(pair.other.send, [6, index, 0])
        far.do(pair.other.flush)
        threads.run_side(1)
        assert not there.hub.is_awake
        assert pair.other.queue
        threads.run(in_turns=in_turns)
        assert [header[1] for header, _ in pair.notes.frames] == list(range(2000))


@pytest.mark.parametrize("filling", [0, 1])
def test_a_goodbye_that_finds_no_room_is_said_later(filling):
    with stepped(lambda: 0) as (threads, here, _, (pair,)):
        near, _ = threads.sides
        count = 0
        while near.do(pair.link.send, chunk(count), BIG[:4000]) or not pair.link.queue:
            count += 1
        if not filling:  # exactly full, and nothing waits
            assert pair.link.withdraw(None)
        near.do(pair.link.close)
        threads.run_side(0)
        assert not here.hub.is_awake
        threads.run()
        assert len(pair.heard.frames) == count + filling
        assert pair.notes.ends == pair.heard.ends == [None]


@pytest.mark.parametrize("before", range(8))
def test_frame_sent_during_parking_wakes_peer(before):
    choices = iter([])
    with stepped(lambda: next(choices, 0)) as (threads, _, there, (pair,)):
        near, _ = threads.sides
        threads.run()
        near.call_soon(pair.link.send, chunk(1), BIG)
        near.call_soon(pair.link.flush)
        choices = iter([0] * before + [2])  # at one moment of the other side's going to rest
        threads.sides[1].do(there.hub.wake)
        threads.run_side(1)
        assert not near.ready
        threads.run()
        assert pair.heard.frames == [(chunk(1), MIB)]


# The same on a real loop, with the real socket


@pytest.mark.asyncio
async def test_hubs_rest_after_a_burst_and_wake_for_the_next(monkeypatch):
    async with linked() as pair:
        hubs_ = (pair.link._keeper, pair.other._keeper)
        for _ in range(3):
            await parked(*hubs_)
            before = len(pair.heard.frames)
            for index in range(50):
                pair.link.send(chunk(index), BIG[: 100_000 * (index % 3)])
            pair.link.flush()
            await pair.heard.until(lambda heard, before=before: len(heard.frames) == before + 50)
        await parked(*hubs_)
        assert pair.notes.bursts == 0


@pytest.mark.asyncio
async def test_a_hub_that_waits_for_something_looks_again_by_itself():
    async with linked() as pair:
        hub = pair.other._keeper
        await parked(hub)
        hub._is_waiting = lambda: True
        hub.wake()
        await parked(hub)
        assert hub._backstop is not None
        pair.link._wake = lambda: None  # a bell that is not heard
        pair.link.send(chunk(1))
        pair.link.flush()
        await pair.heard.until(lambda heard: heard.frames)
        hub._is_waiting = lambda: False


def rung(pair):
    """Whether the subscriber's bell has been rung."""
    try:
        return pair.other._keeper.bell._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"!"
    except BlockingIOError:
        return False


@pytest.mark.asyncio
async def test_a_bell_is_put_off_only_while_something_is_in_flight():
    async with linked() as pair:
        here, there, reactor = pair.link._keeper, pair.other._keeper, pair.link._reactor
        await parked(here, there)
        in_flight = True
        here._is_waiting = lambda: in_flight
        here.wake()
        pair.link.send(chunk(1))
        pair.link.flush()
        assert not rung(pair)  # the other side may be about to look
        looks = 0
        while not rung(pair):
            looks += 1
            reactor.progress()
        assert looks > 1
        assert here.is_awake  # it has not come to rest for that
        await pair.heard.until(lambda heard: heard.frames)

        await parked(there)
        here.wake()
        pair.link.send(chunk(2))
        pair.link.flush()
        assert not rung(pair)

        def over(link, header):
            nonlocal in_flight
            in_flight = False

        pair.notes.on_frame = over
        assert pair.other._out.put_encoded(b"\x93\x06\x01\x01")  # CREDIT, while its hub rests
        reactor.progress()
        assert rung(pair)  # nobody knows when this side has its next turn
        await pair.heard.until(lambda heard: len(heard.frames) == 2)

        await parked(there)
        here.wake()
        pair.link.send(chunk(3))
        pair.link.flush()
        assert rung(pair)
        await pair.heard.until(lambda heard: len(heard.frames) == 3)


@pytest.mark.asyncio
async def test_a_peer_that_writes_without_end_leaves_others_their_turn():
    async with linked() as pair:
        pair.heard.on_frame = lambda link, header: (pair.link.send(chunk(1)), pair.link.flush())
        pair.link.send(chunk(0))
        pair.link.flush()
        await turns()
        assert pair.heard.bursts > 1
        assert len(pair.heard.frames) < 64 * (pair.heard.bursts + 1)
        pair.heard.on_frame = lambda link, header: None


@pytest.mark.asyncio
async def test_more_than_a_window_goes_over_in_pieces():
    async with linked(slabs=4) as pair:
        owner = Owner()
        read = sum(pair.link.send(chunk(index), BIG[:], owner) for index in range(20))
        assert read == WINDOW_NBYTES // MIB
        pair.link.flush()
        await pair.heard.until(lambda heard: len(heard.frames) == 20)
        assert read + owner.times == 20
