import tracemalloc

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.core.frame import (
    CHUNK_FRAME,
    CHUNK_HEADER,
    MAX_FIELD_NBYTES,
    MAX_HEADER_NBYTES,
    MAX_PAYLOAD_NBYTES,
    PREFIX,
    PREFIX_NBYTES,
    SCHEMA,
    Kind,
    decode_head,
    decode_header,
    decode_prefix,
    make_encoder,
)
from kfcomm.errors import LocalProtocolError, RemoteProtocolError

FIELDS = {
    int: st.integers(0, 2**63 - 1),
    bytes: st.binary(max_size=64),
    str: st.text(max_size=64),
    list: st.lists(st.one_of(st.integers(0, 2**32), st.text(max_size=8), st.binary(max_size=8)), max_size=5),
}


@st.composite
def headers(draw):
    kind = draw(st.sampled_from(sorted(SCHEMA)))
    return [int(kind), *(draw(FIELDS[field]) for field in SCHEMA[kind])]


def decode(head):
    header_nbytes, payload_nbytes = decode_prefix(head)
    assert PREFIX_NBYTES + header_nbytes == len(head)
    return list(decode_header(memoryview(head)[PREFIX_NBYTES:])), payload_nbytes


@given(st.lists(st.tuples(headers(), st.integers(0, MAX_PAYLOAD_NBYTES)), max_size=5))
def test_header_round_trip(frames):
    encode = make_encoder()
    for header, payload_nbytes in frames:
        assert decode(encode(header, payload_nbytes)) == (header, payload_nbytes)
        assert decode(encode(tuple(header))) == (header, 0)
        head = encode(header, payload_nbytes)
        among = memoryview(b"x" + head + b"y" * 40)
        fields, nbytes, offset = decode_head(among, 1, len(among))
        assert (list(fields), nbytes, offset) == (header, payload_nbytes, 1 + len(head))
        assert all(decode_head(among, 1, 1 + part) is None for part in range(len(head)))


@given(headers(), st.integers(0, 100))
def test_a_prefix_is_found_at_its_offset(header, offset):
    head = make_encoder()(header, 7)
    assert decode_prefix(b"\xff" * offset + head, offset) == (len(head) - PREFIX_NBYTES, 7)


def test_every_kind_has_a_row_in_the_schema():
    assert set(SCHEMA) == set(Kind)


@pytest.mark.parametrize(
    ("header", "payload_nbytes"),
    [((1, b"x" * MAX_HEADER_NBYTES), 0), ((7,), MAX_PAYLOAD_NBYTES + 1)],
    ids=["header", "payload"],
)
def test_a_frame_too_large_to_be_taken_is_not_sent(header, payload_nbytes):
    encode = make_encoder()
    with pytest.raises(LocalProtocolError, match="too large"):
        encode(header, payload_nbytes)
    assert decode(encode((7,))) == ([7], 0)  # the encoder is as before


@pytest.mark.parametrize("header_nbytes", [0, MAX_HEADER_NBYTES + 1, 2**32 - 1])
def test_a_header_out_of_bounds_is_refused_by_its_prefix(header_nbytes):
    with pytest.raises(RemoteProtocolError, match="header of"):
        decode_prefix(PREFIX.pack(header_nbytes, 0))


@pytest.mark.parametrize("payload_nbytes", [MAX_PAYLOAD_NBYTES + 1, 2**32 - 1])
def test_a_payload_out_of_bounds_is_refused_by_its_prefix(payload_nbytes):
    with pytest.raises(RemoteProtocolError, match="payload of"):
        decode_prefix(PREFIX.pack(1, payload_nbytes))


def test_the_largest_lengths_are_taken():
    assert decode_prefix(PREFIX.pack(MAX_HEADER_NBYTES, MAX_PAYLOAD_NBYTES)) == (MAX_HEADER_NBYTES, MAX_PAYLOAD_NBYTES)


@pytest.mark.parametrize(
    ("packed", "why"),
    [
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (msgpack.packb([Kind.BYE]) + b"\x00", "not msgpack"),
        (msgpack.packb([Kind.KEY, 1, b"", "x"])[:-1], "not msgpack"),
        (b"\x91" * 5000, "not msgpack"),
        (b"\x92\x20\xa2\xff\xff", "not msgpack"),
        (msgpack.packb([Kind.KEY, 1, b"g", "x" * (MAX_FIELD_NBYTES + 1), 0]), "not msgpack"),
        (msgpack.packb([Kind.KEY, 1, b"x" * (MAX_FIELD_NBYTES + 1), "n", 0]), "not msgpack"),
        (b"\xdd\xff\xff\xff\xff", "not msgpack"),
        (msgpack.packb({}), "not an array"),
        (msgpack.packb([]), "not an array"),
        (msgpack.packb([True]), "not an array"),
        (msgpack.packb(["BYE"]), "not an array"),
        (msgpack.packb([99]), "unknown frame kind 99"),
        (msgpack.packb([-1]), "unknown frame kind -1"),
        (msgpack.packb([Kind.BYE, 1]), "BYE has 1 fields, not 0"),
        (msgpack.packb([Kind.CREDIT, 1]), "CREDIT has 1 fields, not 2"),
        (msgpack.packb([Kind.CREDIT, 1, -1]), "CREDIT field 2 is not a valid int"),
        (msgpack.packb([Kind.CREDIT, True, 1]), "CREDIT field 1 is not a valid int"),
        (msgpack.packb([Kind.CREDIT, 1.0, 1]), "CREDIT field 1 is not a valid int"),
        (msgpack.packb([Kind.KEY, 1, "", "", 0]), "KEY field 2 is not a valid bytes"),
        (msgpack.packb([Kind.KEY, 1, b"", b"", 0]), "KEY field 3 is not a valid str"),
        (msgpack.packb([Kind.SIGNATURE, 1, {}]), "SIGNATURE field 2 is not a valid list"),
    ],
)
def test_a_header_that_fits_no_row_is_refused(packed, why):
    with pytest.raises(RemoteProtocolError, match=why):
        decode_header(packed)


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_fits_its_row(garbage):
    try:
        header = decode_header(garbage)
    except RemoteProtocolError:
        return
    assert [type(field) for field in header[1:]] == list(SCHEMA[header[0]])


@given(st.lists(st.integers(0, 255), min_size=7, max_size=7), st.integers(0, MAX_PAYLOAD_NBYTES))
def test_the_header_of_a_chunk_is_packed(fields, payload_nbytes):
    head = make_encoder()([Kind.CHUNK, *fields], payload_nbytes)
    assert head == CHUNK_FRAME.pack(CHUNK_HEADER.size, payload_nbytes, Kind.CHUNK, *fields)
    assert decode(head) == ([Kind.CHUNK, *fields], payload_nbytes)


def test_a_generation_has_room_in_the_header_of_a_chunk_and_beyond():
    encode = make_encoder()
    packed, larger = encode([Kind.CHUNK, 1, 2, 3, 4, 1, 5, 2**32 - 1]), encode([Kind.CHUNK, 1, 2, 3, 4, 1, 5, 2**32])
    assert len(packed) == CHUNK_FRAME.size
    assert len(larger) != CHUNK_FRAME.size
    assert decode(packed)[0][7] == 2**32 - 1
    assert decode(larger)[0][7] == 2**32


def test_a_question_names_its_generation():
    encode = make_encoder()
    assert decode(encode((Kind.ASK, 1, 2, 3, 4)))[0] == [Kind.ASK, 1, 2, 3, 4]
    with pytest.raises(RemoteProtocolError, match="ASK has 3 fields, not 4"):
        decode(encode((Kind.ASK, 1, 2, 3)))


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (CHUNK_FRAME.pack(CHUNK_HEADER.size, MAX_PAYLOAD_NBYTES + 1, Kind.CHUNK, 1, 1, 1, 1, 1, 1, 1), "payload of"),
        (CHUNK_FRAME.pack(0, 1, Kind.CHUNK, 1, 1, 1, 1, 1, 1, 1), "header of"),
        (CHUNK_FRAME.pack(CHUNK_HEADER.size - 1, 1, Kind.CHUNK, 1, 1, 1, 1, 1, 1, 1), "not msgpack"),
        (CHUNK_FRAME.pack(CHUNK_HEADER.size, 1, Kind.ASK, 1, 1, 1, 1, 1, 1, 1), "not msgpack"),
    ],
)
def test_a_packed_header_that_is_none_is_refused(head, why):
    with pytest.raises(RemoteProtocolError, match=why):
        decode_head(memoryview(head), 0, len(head))


@given(st.binary(min_size=PREFIX_NBYTES, max_size=PREFIX_NBYTES))
def test_a_garbage_prefix_is_refused_or_within_bounds(garbage):
    try:
        header_nbytes, payload_nbytes = decode_prefix(garbage)
    except RemoteProtocolError:
        return
    assert 0 < header_nbytes <= MAX_HEADER_NBYTES
    assert payload_nbytes <= MAX_PAYLOAD_NBYTES


@given(headers(), st.data())
def test_one_changed_byte_never_raises_anything_else(header, data):
    packed = bytearray(msgpack.packb(header))
    packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_header(packed)
    except RemoteProtocolError:
        return


@pytest.mark.parametrize("number", [1 << 63, (1 << 64) - 1])
def test_numbers_have_an_end(number: int) -> None:
    for header in ([Kind.OPEN, number], [Kind.POSTED, number, 0], [Kind.GOSSIP, 0, number, []]):
        with pytest.raises(RemoteProtocolError, match="is not a valid int"):
            decode_header(msgpack.packb(header))


@pytest.mark.parametrize("header", [[Kind.GOSSIP, 0, 0, [0] * 1025], [Kind.GOSSIP, 0, 0, [{}, {1: 2}]]])
def test_arrays_have_an_end_and_maps_do_not_occur(header: list) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_header(msgpack.packb(header))


def test_arrays_in_arrays_take_a_bounded_amount_of_memory() -> None:
    bomb = (b"\xdc\x04\x00" * (MAX_HEADER_NBYTES // 3))[:MAX_HEADER_NBYTES]
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            decode_header(bomb)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
