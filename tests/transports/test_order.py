"""The order of frames, against a list that is sorted anew for every frame that leaves."""

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from kfcomm.core.frame import Kind
from kfcomm.transports.outbox import FRONT, Order

CHUNK, ASK, KEY, SIGNATURE, BYE, LEFT = (
    int(kind) for kind in (Kind.CHUNK, Kind.ASK, Kind.KEY, Kind.SIGNATURE, Kind.BYE, Kind.LEFT)
)

priorities = st.one_of(st.just(0), st.integers(-2, 2), st.integers(-(2**15), 2**15 - 1))
numbers = st.integers(0, 2)
steps = st.lists(
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


@given(steps)
def test_frames_leave_by_urgency_and_in_order_within_it(script):
    order, model, owners = Order(), Model(), (object(), object())
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
    order, here, there = Order(), {}, {}

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
    order = Order()
    put(order, "bulk", (CHUNK,), 0)
    put(order, "name", (KEY, 1, b"", "k"), 0)
    put(order, "first use of its number", (SIGNATURE, 1, []), 0)
    put(order, "urgent", (CHUNK,), 1)
    assert [taken(order) for _ in range(4)] == ["name", "first use of its number", "urgent", "bulk"]


def test_a_bye_is_the_last():
    order = Order()
    for priority in (0, 5, -5):
        put(order, priority, (CHUNK,), priority)
    put(order, "bye", (BYE,), 0)
    assert [taken(order) for _ in range(4)] == [5, 0, -5, "bye"]
