"""Handshakes of two machines, and their messages as bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.common.version import PROTOCOL_VERSION
from kfcomm.core.handshake import (
    MAGIC,
    MAX_REASON_CHARS,
    MAX_REASON_NBYTES,
    MAX_UID_NBYTES,
    NONCE_NBYTES,
    NUM_PURPOSES,
    PREFIX_NBYTES,
    Answerer,
    Challenge,
    Dialler,
    Hello,
    Identity,
    Outcome,
    Proof,
    Purpose,
    Refused,
    Welcome,
    decode,
    decode_prefix,
    encode,
    name_of,
)
from kfcomm.errors import LocalProtocolError, RemoteProtocolError

TOKEN = b"t" * 32
ONE, TWO = b"1" * NONCE_NBYTES, b"2" * NONCE_NBYTES
ME, PEER = Identity(0, "uid-0"), Identity(1, "uid-1")


def dialler(*, me=ME, peer=PEER, purpose=Purpose.DATA, epoch=4, token=TOKEN, nonce=ONE):
    return Dialler(me, peer, purpose=purpose, epoch=epoch, token=token, nonce=nonce)


def answerer(*, me=PEER, accept=lambda hello: None, epoch=4, token=TOKEN, nonce=TWO):
    return Answerer(me, accept=accept, epoch=epoch, token=token, nonce=nonce)


def over_the_wire(message):
    data = encode(message)
    kind, nbytes = decode_prefix(data[:PREFIX_NBYTES])
    assert PREFIX_NBYTES + nbytes == len(data)
    return decode(kind, data[PREFIX_NBYTES:])


def talk(one, other):
    """Both sides' last steps, after all has been said."""
    steps = {one: None, other: None}
    speaker, listener, message = one, other, one.hello
    while message is not None:
        steps[listener] = listener.receive(over_the_wire(message))
        message = steps[listener].reply
        speaker, listener = listener, speaker
    return steps[one], steps[other]


uids = st.text("0aäß ", min_size=1, max_size=MAX_UID_NBYTES // 2)
identities = st.builds(Identity, st.integers(0, 2**32 - 1), uids)
nonces = st.binary(min_size=NONCE_NBYTES, max_size=NONCE_NBYTES)


@given(identities, identities, st.sampled_from(Purpose), st.integers(0, 2**63), st.binary(), nonces, nonces)
def test_two_that_agree_come_together(me, peer, purpose, epoch, token, one_nonce, other_nonce):
    heard = []
    one = dialler(me=me, peer=peer, purpose=purpose, epoch=epoch, token=token, nonce=one_nonce)
    other = answerer(me=peer, epoch=epoch, token=token, nonce=other_nonce, accept=heard.append)
    last, last_of_other = talk(one, other)
    assert last.outcome is last_of_other.outcome is Outcome.DONE
    assert other.hello == Hello(PROTOCOL_VERSION, epoch, me.rank, purpose, one_nonce, me.uid)
    assert (one.keys.outgoing, one.keys.incoming) == (other.keys.incoming, other.keys.outgoing)
    assert one.keys.outgoing != one.keys.incoming
    assert heard == [other.hello]


@pytest.mark.parametrize(
    ("differs", "differs_there", "why"),
    [
        ({"token": b"another"}, {}, "another token"),
        ({}, {"token": b"another"}, "another token"),
        ({"peer": Identity(2, "uid-1")}, {}, "not rank 2"),
        ({"peer": Identity(1, "uid-2")}, {}, "not rank 1"),
        ({"epoch": 5}, {}, "epoch 5 is not the epoch here, 4"),
        ({}, {"accept": lambda hello: f"no rank {hello.rank} here"}, "no rank 0 here"),
    ],
    ids=["token", "token there", "rank", "uid", "epoch", "unwanted"],
)
def test_two_that_disagree_refuse_and_both_know_why(differs, differs_there, why):
    one, other = dialler(**differs), answerer(**differs_there)
    last, last_of_other = talk(one, other)
    assert last.outcome is last_of_other.outcome is Outcome.REFUSED
    assert why in last.reason
    assert why in last_of_other.reason
    assert one.keys is other.keys is other.hello is None


def test_another_protocol_is_refused():
    step = answerer().receive(dialler().hello._replace(protocol=PROTOCOL_VERSION + 1))
    assert step.outcome is Outcome.REFUSED
    assert isinstance(step.reply, Refused)
    assert f"protocol {PROTOCOL_VERSION + 1}" in step.reason


def test_no_two_connections_have_the_same_keys():
    found = set()
    for nonce in (ONE, TWO):
        for there in (ONE, TWO):
            one = dialler(nonce=nonce)
            talk(one, answerer(nonce=there))
            found |= {one.keys.outgoing, one.keys.incoming}
    assert len(found) == 8


def test_the_wrong_proof_is_refused():
    other = answerer()
    other.receive(dialler().hello)
    step = other.receive(Proof(b"x" * 32))
    assert step.outcome is Outcome.REFUSED
    assert "wrong token" in step.reason
    assert other.hello is None


def challenge_of(other, one):
    return other.receive(one.hello).reply


def test_a_proof_is_worth_nothing_on_another_connection():
    recorded = dialler()
    old = recorded.receive(challenge_of(answerer(), recorded)).reply
    fresh = answerer(nonce=b"3" * NONCE_NBYTES)
    fresh.receive(recorded.hello)
    assert fresh.receive(old).outcome is Outcome.REFUSED


def test_the_answerers_proof_does_not_serve_as_the_diallers():
    # Who knows no token opens a second connection to have its challenge answered: the direction is in the proof.
    victim = answerer(nonce=ONE)
    challenge = challenge_of(victim, dialler(nonce=TWO))
    oracle = challenge_of(answerer(nonce=TWO), dialler(nonce=challenge.nonce))
    assert victim.receive(Proof(oracle.proof)).outcome is Outcome.REFUSED


MESSAGES = [dialler().hello, Challenge(ONE, bytes(32)), Proof(bytes(32)), Welcome()]


@pytest.mark.parametrize("message", MESSAGES, ids=name_of)
@pytest.mark.parametrize("dials", [True, False])
def test_a_message_out_of_turn_is_broken(message, dials):
    if isinstance(message, Challenge if dials else Hello):
        message = Welcome()
    step = (dialler() if dials else answerer()).receive(message)
    assert step.outcome is Outcome.BROKEN
    assert name_of(message) in step.reason


def test_after_the_end_nothing_is_taken():
    one, other = dialler(), answerer()
    talk(one, other)
    assert one.receive(Welcome()).outcome is Outcome.BROKEN
    assert other.receive(one.hello).outcome is Outcome.BROKEN


@pytest.mark.parametrize("asked", [False, True])
def test_a_refusal_ends_either_side_at_any_time(asked):
    one, other = dialler(), answerer()
    challenge = challenge_of(other, one)
    if asked:
        one.receive(challenge)
    for machine in (one, other):
        step = machine.receive(Refused("full \x1b[31mup\n" + "x" * 4000))
        assert step.outcome is Outcome.REFUSED
        assert step.reply is None
        assert "full ?[31mup?" in step.reason
        assert len(step.reason) < MAX_REASON_CHARS + 100


def test_a_long_reason_is_cut_before_it_is_sent():
    step = answerer(accept=lambda hello: "x" * 100_000).receive(dialler().hello)
    assert len(encode(step.reply)) < 1000


@pytest.mark.parametrize("make", [dialler, answerer])
def test_a_short_nonce_is_a_misuse(make):
    with pytest.raises(LocalProtocolError, match="nonce"):
        make(nonce=b"short")


NONCE = bytes(range(NONCE_NBYTES))
HELLO = Hello(8, 4, 3, Purpose.CLOCK, NONCE, "uid-0")
CODED = [HELLO, Challenge(NONCE, NONCE[::-1]), Proof(NONCE), Welcome(), Refused("no"), Refused("")]


def read(data):
    kind, nbytes = decode_prefix(data[:PREFIX_NBYTES])
    body = data[PREFIX_NBYTES:]
    if len(body) != nbytes:
        raise RemoteProtocolError("not all of it")
    return decode(kind, body)


@pytest.mark.parametrize("message", CODED)
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


@given(st.sampled_from(CODED), st.data())
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
