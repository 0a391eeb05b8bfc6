import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.core.handshake import (
    MAGIC,
    MAX_REASON_NBYTES,
    MAX_UID_NBYTES,
    NONCE_NBYTES,
    NUM_PURPOSES,
    PREFIX_NBYTES,
    Challenge,
    Hello,
    Proof,
    Purpose,
    Refused,
    Welcome,
    decode,
    decode_prefix,
    encode,
)
from kfcomm.errors import LocalProtocolError, RemoteProtocolError

NONCE = bytes(range(NONCE_NBYTES))
HELLO = Hello(8, 4, 3, Purpose.CLOCK, NONCE, "uid-0")
MESSAGES = [HELLO, Challenge(NONCE, NONCE[::-1]), Proof(NONCE), Welcome(), Refused("no"), Refused("")]


def read(data):
    kind, nbytes = decode_prefix(data[:PREFIX_NBYTES])
    body = data[PREFIX_NBYTES:]
    if len(body) != nbytes:
        raise RemoteProtocolError("not all of it")
    return decode(kind, body)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_arrives_as_it_was(message):
    assert read(encode(message)) == message


def test_the_bytes_of_a_hello_stay_what_they_are():
    assert (
        encode(HELLO) == MAGIC + b"\x01\x34\0" + b"\x08\0" + b"\x04" + bytes(7) + b"\x03\0\0\0\x03" + NONCE + b"uid-0"
    )


@given(st.binary(max_size=400))
def test_any_bytes_are_message_or_error(data):
    try:
        message = read(data.ljust(PREFIX_NBYTES, b"?"))
    except RemoteProtocolError:
        return
    assert read(encode(message)) == message


@given(st.sampled_from(MESSAGES), st.data())
def test_a_message_with_a_changed_byte_is_a_message_or_none(message, data):
    changed = bytearray(encode(message))
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        other = read(bytes(changed))
    except RemoteProtocolError:
        return
    assert other != message


@pytest.mark.parametrize(
    "data",
    [
        b"GET / H",
        MAGIC + b"\x00\0\0",
        MAGIC + b"\x06\0\0",
        MAGIC + b"\x04\x01\0",
        MAGIC + b"\x01\xff\xff",
        MAGIC + b"\x05\xe9\x03",
        b"\x16\x03\x01\x02\0\x01\0",
    ],
    ids=["http", "no kind", "another kind", "longer welcome", "long hello", "long refusal", "tls"],
)
def test_invalid_length_is_refused_before_body(data):
    with pytest.raises(RemoteProtocolError):
        decode_prefix(data)


@pytest.mark.parametrize("uid", ["", "x" * (MAX_UID_NBYTES + 1), "ä" * MAX_UID_NBYTES])
def test_a_uid_has_a_length(uid):
    with pytest.raises(LocalProtocolError, match="HELLO with a body"):
        encode(HELLO._replace(uid=uid))


@pytest.mark.parametrize("uid", [b"\xff\xfe", b"a\x1b[31m", b"a\n"])
def test_a_uid_is_legible(uid):
    kind, _ = decode_prefix(encode(HELLO)[:PREFIX_NBYTES])
    body = encode(HELLO)[PREFIX_NBYTES:].removesuffix(b"uid-0")
    with pytest.raises(RemoteProtocolError, match="not printable text"):
        decode(kind, body + uid)


def test_purpose_out_of_range_is_refused():
    data = bytearray(encode(HELLO))
    data[PREFIX_NBYTES + 14] = NUM_PURPOSES
    with pytest.raises(RemoteProtocolError, match=r"purpose 64, outside 0\.\.63"):
        read(bytes(data))


@pytest.mark.parametrize("message", [HELLO._replace(rank=1 << 32), HELLO._replace(epoch=-1)])
def test_numbers_have_bounds(message):
    with pytest.raises(LocalProtocolError, match="does not fit"):
        encode(message)


def test_a_long_reason_is_cut():
    assert read(encode(Refused("ä" * 4000))).why.startswith("ä" * (MAX_REASON_NBYTES // 2))
