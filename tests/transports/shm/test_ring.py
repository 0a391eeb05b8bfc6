import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.errors import RemoteProtocolError
from kfcomm.transports.shm.ring import ALIGN_NBYTES, HEAD_NBYTES, RECORD, SLACK_NBYTES, RingReader, RingWriter

NBYTES = 1 << 12
TAIL, HEAD = 0, 1
MAX = (1 << 64) - 1
ALL = NBYTES


class Ring:
    def __init__(self, nbytes=NBYTES):
        self.memory = memoryview(bytearray(nbytes + SLACK_NBYTES))
        self.control = memoryview(bytearray(16)).cast("Q")
        self.writer = RingWriter(self.memory, self.control, tail=TAIL, head=HEAD)
        self.reader = RingReader(self.memory, self.control, tail=TAIL, head=HEAD)

    def read(self):
        """Return the next record, or None."""
        had_news, taken = self.control[TAIL] != self.reader.head, self.records(1)
        assert had_news == bool(taken)
        return (taken[0][0][1], taken[0][0][2], taken[0][0][3:], taken[0][1]) if taken else None

    def records(self, limit):
        """Up to so many records, each with a copy of its payload."""
        taken = []

        def take(record, payload):
            taken.append((record, None if payload is None else bytes(payload)))
            self.reader.is_open = len(taken) < limit

        self.reader.is_open = True
        self.reader.take_chunk = lambda header, payload: take((0, 0, len(payload), *header), payload)
        self.reader.read(ALL, take)
        return taken


def header(number):
    return (1, number, MAX - number, 0, 1, 2, 3, number % 7)


payloads = st.one_of(st.none(), st.integers(0, 300), st.integers(0, 1900))


@given(st.lists(st.one_of(st.tuples(st.just("put"), payloads), st.tuples(st.just("read"), st.integers(1, 20)))))
def test_records_are_read_in_order_in_any_interleaving(script):
    ring = Ring()
    expected, found = [], []
    for number, (verb, size) in enumerate(script):
        if verb == "read":
            for _ in range(size):
                record = ring.read()
                if record is None:
                    break
                found.append(record)
            continue
        if size is None:
            place, nbytes, payload = number + 1, 5 * number, None
        else:
            place, nbytes, payload = 0, size, random.Random(number).randbytes(size)
        has_room = ring.writer.has_room_for_place
        was_put = ring.writer.put(header(number), place, nbytes, payload)
        assert size is not None or was_put == has_room
        if was_put:
            expected.append((place, nbytes, header(number), payload))
        else:
            assert len(found) < len(expected)
        assert ring.writer.is_empty == (len(found) == len(expected))
    while record := ring.read():
        found.append(record)
    assert found == expected
    assert ring.writer.is_empty
    # whatever its state, an empty ring takes what is no larger than half of it
    assert ring.writer.put(header(0), 0, NBYTES // 2 - HEAD_NBYTES, bytes(NBYTES // 2 - HEAD_NBYTES))


@pytest.mark.parametrize("nbytes", [0, 1, 32, 33, 100, 1000])
def test_a_full_ring_says_so_and_takes_more_when_it_was_read(nbytes):
    ring = Ring()
    payload = bytes(nbytes)
    for _ in range(200):
        count = 0
        while ring.writer.put(header(count), 0, nbytes, payload):
            count += 1
        assert count >= (NBYTES - HEAD_NBYTES - nbytes) // (HEAD_NBYTES + nbytes + ALIGN_NBYTES) > 0
        assert [ring.read() for _ in range(count)] == [(0, nbytes, header(index), payload) for index in range(count)]
        assert ring.read() is None


def test_a_record_is_done_with_when_it_was_taken_whoever_stops_or_fails():
    ring = Ring()
    for number in range(6):
        ring.writer.put(header(number), 1, 0, None)
    freed = []
    ring.reader.read(2 * 128 + 1, lambda record, payload: freed.append(ring.control[HEAD]))
    assert freed == [0, 128, 256]
    assert ring.control[HEAD] == 3 * 128
    ring.reader.read(ALL, lambda record, payload: setattr(ring.reader, "is_open", False))
    assert ring.control[HEAD] == 4 * 128
    with pytest.raises(ZeroDivisionError):
        ring.reader.read(ALL, lambda record, payload: 1 / 0)
    assert [record[4] for record, _ in ring.records(2)] == [5]
    assert ring.control[HEAD] == 6 * 128
    assert ring.writer.is_empty
    assert ring.records(2) == []


def test_an_encoded_header_is_a_record_of_kind_0():
    ring = Ring()
    assert ring.writer.put_encoded(b"encoded")
    assert ring.read() == (0, 7, (0,) * 8, b"encoded")


# What the other side must not do

words = st.one_of(
    st.integers(0, MAX), st.integers(0, 3 * NBYTES), st.sampled_from([0, 1, 63, 64, 96, 128, NBYTES, MAX])
)


def drain(ring, limit=200):
    """Read until there is nothing more; whether the reader refused to go on. Nothing else may come of it."""
    for _ in range(limit):
        try:
            taken = ring.records(1)
        except RemoteProtocolError:
            return True
        if not taken:
            return False
        record, payload = taken[0]
        assert payload is None or len(payload) <= NBYTES
        assert record[1] or len(payload) == record[2]
    raise AssertionError("more records than there can be")


@given(st.binary(max_size=NBYTES), words, st.integers(0, 30))
def test_a_reader_of_noise_reads_within_bounds_or_refuses(data, tail, records):
    ring = Ring()
    for _ in range(records):
        ring.writer.put(header(0), 0, 10, bytes(10))
    ring.memory[: len(data)] = data
    ring.control[TAIL] = tail
    drain(ring)


@given(st.integers(0, 40), st.lists(st.tuples(st.integers(0, NBYTES // 8 - 1), words), min_size=1, max_size=5))
def test_a_reader_of_single_wrong_words_reads_within_bounds_or_refuses(records, wrong):
    ring = Ring()
    for _ in range(records):
        ring.writer.put(header(0), 0, 10, bytes(10))
    for place, word in wrong:
        struct.pack_into("@Q", ring.memory, 8 * place, word)
    drain(ring)


@pytest.mark.parametrize("tail", [1, 63, 100, NBYTES + 64, MAX, MAX - 63, 1 << 63])
def test_a_tail_that_makes_no_sense_is_refused(tail):
    ring = Ring()
    ring.control[TAIL] = tail
    assert drain(ring)


def test_a_tail_that_goes_back_is_refused():
    ring = Ring()
    for _ in range(4):
        ring.writer.put(header(0), 0, 10, bytes(10))
    assert not drain(ring)
    ring.control[TAIL] = 64
    assert drain(ring)


@pytest.mark.parametrize("size", [1, 64, 95, 100, 256, NBYTES, 2 * NBYTES, MAX, MAX - 63])
def test_a_size_that_makes_no_sense_is_refused(size):
    ring = Ring()
    ring.writer.put(header(0), 0, 10, bytes(10))
    struct.pack_into("@Q", ring.memory, 0, size)
    assert drain(ring)


@pytest.mark.parametrize("nbytes", [33, 128, NBYTES, MAX])
def test_a_payload_longer_than_its_record_is_refused(nbytes):
    ring = Ring()
    ring.writer.put(header(0), 0, 10, bytes(10))
    struct.pack_into("@Q", ring.memory, 16, nbytes)
    assert drain(ring)


def test_a_record_beyond_the_end_of_the_ring_is_refused():
    ring = Ring()
    while ring.writer.put(header(0), 1, 0, None):
        pass
    assert not drain(ring)
    for _ in range(3):
        ring.writer.put(header(0), 1, 0, None)
    assert not drain(ring)
    last = NBYTES - 128
    ring.reader.head = last
    ring.control[TAIL] = last + 256
    RECORD.pack_into(ring.memory, last, 256, 1, 0, *header(0))
    assert drain(ring)


def test_a_ring_that_goes_to_its_start_where_nothing_was_written_is_refused():
    ring = Ring()
    ring.control[TAIL] = 64
    assert drain(ring)
    ring = Ring()
    ring.control[TAIL] = NBYTES
    assert drain(ring)


@given(words, st.integers(0, 20))
def test_a_writer_whose_reader_counts_wrong_refuses_or_writes_within_bounds(head, records):
    ring = Ring()
    written = sum(ring.writer.put(header(0), 0, 10, bytes(10)) for _ in range(records))
    ring.control[HEAD] = head
    try:
        while ring.writer.put(header(0), 0, 10, bytes(10)):
            written += 1
    except RemoteProtocolError:
        assert not 0 <= head <= written * 128
    else:
        assert head <= written * 128
    assert written * 128 <= NBYTES + head
