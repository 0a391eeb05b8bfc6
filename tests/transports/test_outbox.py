"""Order of frames in send queues, and frames that the kernel took in part."""

from collections import deque
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.core.frame import PREFIX_NBYTES, Kind, decode_header, decode_prefix, make_encoder
from kfcomm.transports.outbox import FRONT, FrameOrder, Outbox, StreamOptions

CHUNK, ASK, KEY, SIGNATURE, BYE, LEFT = (
    int(kind) for kind in (Kind.CHUNK, Kind.ASK, Kind.KEY, Kind.SIGNATURE, Kind.BYE, Kind.LEFT)
)

priorities = st.one_of(st.just(0), st.integers(-2, 2), st.integers(-(2**15), 2**15 - 1))
numbers = st.integers(0, 2)
order_steps = st.lists(
    st.one_of(
        st.tuples(st.just("chunk"), numbers, priorities),
        st.tuples(st.just("ask"), numbers),
        st.tuples(st.just("define"), numbers),
        st.tuples(st.just("bye")),
        st.tuples(st.just("left")),
        st.tuples(st.just("take"), st.integers(1, 8)),
        st.tuples(st.just("take and put back"), st.integers(1, 8)),
        st.tuples(st.just("drop"), st.integers(0, 1)),
    ),
    max_size=60,
)


class Model:
    """Frames as ``(level, place, serial, owner)``: those of one level leave by place."""

    def __init__(self):
        self.frames = []
        self.places = count()
        self.defined = set()

    def add(self, serial, header, priority, owner):
        level = priority
        if header[0] != CHUNK:
            level = FRONT
            if header[0] in (BYE, LEFT) or (header[0] == SIGNATURE and header[1] in self.defined):
                self.frames = [(FRONT, next(self.places), *frame[2:]) for frame in self.sorted()]
            if header[0] == SIGNATURE:
                self.defined.add(header[1])
        self.frames.append((level, next(self.places), serial, owner))

    def sorted(self):
        return sorted(self.frames, key=lambda frame: (-frame[0], frame[1]))

    def take(self):
        first = self.sorted()[0]
        self.frames.remove(first)
        return first[2]

    def drop(self, owner):
        dropped = [frame for frame in self.sorted() if frame[3] is owner]
        self.frames = [frame for frame in self.frames if frame[3] is not owner]
        return [frame[2] for frame in dropped]


def put(order, serial, header, priority, owner=None):
    order.add((serial, None, 0, owner, header, order.make_way(header, priority)))


def taken(order):
    frame = order.take()
    return None if frame is None else frame[0]


@given(order_steps)
def test_frames_leave_by_urgency_and_in_order_within_it(script):
    order, model, owners = FrameOrder(), Model(), (object(), object())
    for serial, (verb, *arguments) in enumerate(script):
        match verb:
            case "chunk" | "ask" | "define" | "bye":
                kind = {"chunk": CHUNK, "ask": ASK, "define": SIGNATURE, "bye": BYE, "left": LEFT}[verb]
                header = (kind, *arguments[:1])
                priority = arguments[1] if verb == "chunk" else 0
                owner = owners[arguments[0] % 2] if verb == "chunk" else None
                put(order, serial, header, priority, owner)
                model.add(serial, header, priority, owner)
            case "take":
                for _ in range(min(arguments[0], len(model.frames))):
                    assert taken(order) == model.take()
            case "take and put back":
                frames = [order.take() for _ in range(min(arguments[0], len(model.frames)))]
                for frame in reversed(frames):
                    order.put_back(frame)
            case "drop":
                owner = owners[arguments[0]]
                assert [frame[0] for frame in order.drop(owner)] == model.drop(owner)
        assert len(order) == len(model.frames)
        assert [frame[0] for frame in order] == [frame[2] for frame in model.sorted()]
    while model.frames:
        assert taken(order) == model.take()
    assert order.take() is None


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("define"), numbers, st.integers(0, 9)),
            st.tuples(st.just("chunk"), numbers, priorities),
            st.tuples(st.just("take"), st.integers(1, 5)),
        ),
        max_size=60,
    )
)
def test_every_chunk_meets_the_meaning_that_its_number_had_when_it_was_queued(script):
    order, here, there = FrameOrder(), {}, {}

    def take():
        what = taken(order)
        if what[0] == "define":
            there[what[1]] = what[2]
        else:
            assert there[what[1]] == what[2]

    for verb, *arguments in script:
        match verb:
            case "define":
                number, meaning = arguments
                here[number] = meaning
                put(order, ("define", number, meaning), (SIGNATURE, number, []), 0)
            case "chunk" if arguments[0] in here:
                number, priority = arguments
                put(order, ("chunk", number, here[number]), (CHUNK, number), priority)
            case "take":
                for _ in range(min(arguments[0], len(order))):
                    take()
    while order:
        take()


def test_a_name_that_is_told_holds_nothing_up():
    order = FrameOrder()
    put(order, "bulk", (CHUNK,), 0)
    put(order, "name", (KEY, 1, b"", "k"), 0)
    put(order, "first use of its number", (SIGNATURE, 1, []), 0)
    put(order, "urgent", (CHUNK,), 1)
    assert [taken(order) for _ in range(4)] == ["name", "first use of its number", "urgent", "bulk"]


def test_a_bye_is_the_last():
    order = FrameOrder()
    for priority in (0, 5, -5):
        put(order, priority, (CHUNK,), priority)
    put(order, "bye", (BYE,), 0)
    assert [taken(order) for _ in range(4)] == [5, 0, -5, "bye"]


class Owner:
    def __init__(self, name):
        self.name = name

    def sent(self):
        raise AssertionError("an outbox does not notify owners")

    def __repr__(self):
        return f"Owner({self.name})"


class Sender:
    """An outbox, what the kernel took from it, and what should have been taken, in order.

    What is cut leads what waits; the rest is by priority. ``expected`` has what was begun; `move` fills it.
    """

    def __init__(self, **sizes):
        options = StreamOptions(**({"gather_nbytes": 1000, "gather_frames": 4, "small_nbytes": 20} | sizes))
        self.outbox = Outbox(options)
        self.encode = make_encoder()
        self.wire = bytearray()
        self.done = deque()
        self.expected = []
        self.waiting = []

    def put(self, index, payload, owner=None, priority=0):
        header = (int(Kind.CHUNK), index, 0, 0, 0, 0, 0, 0)
        view = None if payload is None else memoryview(payload)
        self.outbox.put(header, self.encode(header, len(payload or b"")), view, owner, priority)
        self.waiting.append((-priority, index, bytes(payload or b""), owner))

    def move(self, share=1.0):
        batch, buffers, nbytes = self.outbox.gather()
        data = b"".join(buffers)
        assert len(data) == nbytes
        moved = int(nbytes * share)
        self.wire += data[:moved]
        finished = self.outbox.advance(batch, moved, self.done)
        begun = finished + (moved > sum(frame[2] for frame in batch[:finished]))
        fresh = begun - (batch[0][4] is None and begun > 0)  # the first may have been cut, and is expected already
        self.waiting.sort(key=lambda frame: frame[:2])
        self.expected += [frame[1:] for frame in self.waiting[:fresh]]
        del self.waiting[:fresh]
        return finished, len(batch)

    def withdraw(self, owner):
        dropped = [header[1] for header in self.outbox.withdraw(owner)]
        self.waiting.sort(key=lambda frame: frame[:2])
        assert dropped == [frame[1] for frame in self.waiting if frame[3] is owner]
        self.waiting = [frame for frame in self.waiting if frame[3] is not owner]
        return dropped

    def received(self):
        frames, at = [], 0
        while at < len(self.wire):
            header_nbytes, payload_nbytes = decode_prefix(self.wire, at)
            body = at + PREFIX_NBYTES + header_nbytes
            header = decode_header(self.wire[at + PREFIX_NBYTES : body])
            at = body + payload_nbytes
            assert at <= len(self.wire)
            frames.append((header[1], bytes(self.wire[body:at])))
        return frames


shares = st.one_of(st.just(1.0), st.just(0.0), st.floats(0, 1))
payloads = st.one_of(st.none(), st.integers(0, 30), st.integers(0, 3000))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), payloads, st.integers(0, 2), st.sampled_from([0, 0, 0, -7, 1, 2])),
        st.tuples(st.just("move"), shares),
        st.tuples(st.just("withdraw"), st.integers(0, 2)),
    ),
    max_size=40,
)


@given(steps, st.integers(1, 5), st.integers(1, 5000), st.integers(0, 50))
def test_frames_arrive_whole_and_by_urgency(script, frames, nbytes, small):
    sender = Sender(gather_nbytes=nbytes, gather_frames=frames, small_nbytes=small)
    owners = [Owner(0), Owner(1), None]
    memory = {}
    for index, (verb, *arguments) in enumerate(script):
        match verb:
            case "put":
                length, which, priority = arguments
                payload = None if length is None else bytearray([index % 256]) * length
                owner = None if payload is None else owners[which]
                memory.setdefault(owner, []).append(payload)
                sender.put(index, payload, owner, priority)
            case "move" if sender.outbox:
                sender.move(arguments[0])
            case "withdraw" if owners[arguments[0]] is not None:
                owner = owners[arguments[0]]
                sender.withdraw(owner)
                for payload in memory.pop(owner, []):
                    if payload:
                        payload[:] = b"\xee" * len(payload)
                        payload.clear()  # raises BufferError while anybody holds a view
    while sender.outbox:
        sender.move()
    assert sender.received() == [frame[:2] for frame in sender.expected]
    assert not sender.waiting
    assert len(sender.outbox) == sender.outbox.nbytes == 0


def test_owners_are_done_when_their_payload_is_taken_to_the_last_byte():
    sender = Sender()
    one, other = Owner(1), Owner(2)
    sender.put(1, b"x" * 100, one)
    sender.put(2, b"y" * 100, other)
    assert sender.move(0.99) == (1, 2)
    assert list(sender.done) == [one]
    assert sender.move() == (1, 1)
    assert list(sender.done) == [one, other]


def test_a_withdrawn_owner_is_not_done():
    sender = Sender()
    one, other = Owner(1), Owner(2)
    for index in range(6):
        sender.put(index, b"x" * 100, one if index % 2 else other)
    sender.move(0.1)
    assert sender.withdraw(one) == [1, 3, 5]
    assert sender.withdraw(other) == [2, 4]  # the first is cut: it goes on from a copy
    assert len(sender.outbox) == 1
    sender.move()
    assert sender.received() == [(0, b"x" * 100)]
    assert not sender.done


@pytest.mark.parametrize("cut_in", ["head", "payload"])
def test_cut_frame_survives_calls_without_progress(cut_in):
    sender = Sender()
    owner = Owner(1)
    sender.put(0, b"x" * 100, owner)
    sender.move(0.05 if cut_in == "head" else 0.5)
    sender.move(0.0)
    assert sender.withdraw(owner) == []
    sender.move()
    assert sender.received() == [(0, b"x" * 100)]


def test_clearing_names_every_owner_once_per_payload():
    sender = Sender()
    one, other = Owner(1), Owner(2)
    for owner in (one, other, one):
        sender.put(0, b"x" * 600, owner)
    sender.put(3, None)
    sender.move(0.1)
    sender.outbox.clear(sender.done)
    assert list(sender.done) == [one, other, one]
    assert not sender.outbox


def test_small_frames_share_one_buffer():
    sender = Sender(gather_frames=100)
    for index in range(10):
        sender.put(index, b"x" * 20, Owner(index))
    _, buffers, _ = sender.outbox.gather()
    assert len(buffers) == 1
