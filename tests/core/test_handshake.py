import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.core.frame import PROTOCOL_VERSION, Kind, decode_header, make_encoder
from kfcomm.core.handshake import (
    MAX_REASON_CHARS,
    MAX_UID_NBYTES,
    NONCE_NBYTES,
    Answerer,
    Dialler,
    Hello,
    Identity,
    Outcome,
    Purpose,
)
from kfcomm.errors import LocalProtocolError

TOKEN = b"t" * 32
ONE, TWO = b"1" * NONCE_NBYTES, b"2" * NONCE_NBYTES
ME, PEER = Identity(0, "uid-0"), Identity(1, "uid-1")


def dialler(*, me=ME, peer=PEER, purpose=Purpose.DATA, epoch=4, token=TOKEN, nonce=ONE):
    return Dialler(me, peer, purpose=purpose, epoch=epoch, token=token, nonce=nonce)


def answerer(*, me=PEER, accept=lambda hello: None, epoch=4, token=TOKEN, nonce=TWO, credit=(1 << 20, 64)):
    return Answerer(me, accept=accept, epoch=epoch, token=token, nonce=nonce, credit=credit)


def over_the_wire(header):
    return decode_header(make_encoder()(header)[8:])


def talk(one, other):
    """Both sides' last steps, after all has been said."""
    steps = {one: None, other: None}
    speaker, listener, header = one, other, one.hello
    while header is not None:
        steps[listener] = listener.receive(over_the_wire(header))
        header = steps[listener].reply
        speaker, listener = listener, speaker
    return steps[one], steps[other]


identities = st.builds(Identity, st.integers(0, 2**32), st.text(max_size=MAX_UID_NBYTES // 4))
nonces = st.binary(min_size=NONCE_NBYTES, max_size=NONCE_NBYTES)


@given(identities, identities, st.sampled_from(Purpose), st.integers(0, 2**63), st.binary(), nonces, nonces)
def test_two_that_agree_come_together(me, peer, purpose, epoch, token, one_nonce, other_nonce):
    heard = []
    one = dialler(me=me, peer=peer, purpose=purpose, epoch=epoch, token=token, nonce=one_nonce)
    other = answerer(me=peer, epoch=epoch, token=token, nonce=other_nonce, accept=heard.append, credit=(5, 6))
    last, last_of_other = talk(one, other)
    assert last.outcome is last_of_other.outcome is Outcome.DONE
    assert one.credit == (5, 6)
    assert other.hello == Hello(epoch, me.rank, me.uid, purpose)
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
    assert one.credit == (0, 0)
    assert other.hello is None


def test_another_protocol_is_refused():
    step = answerer().receive([Kind.HELLO, PROTOCOL_VERSION + 1, 4, 0, "uid-0", 0, ONE])
    assert step.outcome is Outcome.REFUSED
    assert step.reply[0] == Kind.REFUSED
    assert f"protocol {PROTOCOL_VERSION + 1}" in step.reason


@pytest.mark.parametrize(
    ("uid", "purpose", "nonce"),
    [("u", 0, ONE[1:]), ("u", max(Purpose) + 1, ONE), ("ü" * (MAX_UID_NBYTES // 2 + 1), 0, ONE)],
    ids=["nonce", "purpose", "uid"],
)
def test_an_impossible_hello_is_broken_and_gets_no_reply(uid, purpose, nonce):
    step = answerer().receive([Kind.HELLO, PROTOCOL_VERSION, 4, 0, uid, purpose, nonce])
    assert step.outcome is Outcome.BROKEN
    assert step.reply is None


def test_a_challenge_with_a_short_nonce_is_broken():
    assert dialler().receive([Kind.CHALLENGE, b"", b"x" * 32]).outcome is Outcome.BROKEN


def test_the_wrong_proof_is_refused():
    other = answerer()
    other.receive(dialler().hello)
    step = other.receive([Kind.PROOF, b"x" * 32])
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
    oracle = challenge_of(answerer(nonce=TWO), dialler(nonce=challenge[1]))
    assert victim.receive([Kind.PROOF, oracle[2]]).outcome is Outcome.REFUSED


@given(st.sampled_from([Kind.HELLO, Kind.CHALLENGE, Kind.PROOF, Kind.WELCOME, Kind.BYE]), st.booleans())
def test_a_message_out_of_turn_is_broken(kind, dials):
    machine = dialler() if dials else answerer()
    expected = Kind.CHALLENGE if dials else Kind.HELLO
    if kind == expected:
        kind = Kind.CREDIT
    step = machine.receive([int(kind)])
    assert step.outcome is Outcome.BROKEN
    assert kind.name in step.reason


def test_after_the_end_nothing_is_taken():
    one, other = dialler(), answerer()
    talk(one, other)
    assert one.receive([Kind.WELCOME, 1, 1]).outcome is Outcome.BROKEN
    assert other.receive(one.hello).outcome is Outcome.BROKEN


@pytest.mark.parametrize("asked", [False, True])
def test_a_refusal_ends_either_side_at_any_time(asked):
    one, other = dialler(), answerer()
    challenge = challenge_of(other, one)
    if asked:
        one.receive(challenge)
    for machine in (one, other):
        step = machine.receive([Kind.REFUSED, "full \x1b[31mup\n" + "x" * 4000])
        assert step.outcome is Outcome.REFUSED
        assert step.reply is None
        assert "full ?[31mup?" in step.reason
        assert len(step.reason) < MAX_REASON_CHARS + 100


def test_a_long_reason_is_cut_before_it_is_sent():
    step = answerer(accept=lambda hello: "x" * 100_000).receive(dialler().hello)
    assert len(msgpack.packb(step.reply)) < 1000


@pytest.mark.parametrize("make", [dialler, answerer])
def test_a_short_nonce_is_a_misuse(make):
    with pytest.raises(LocalProtocolError, match="nonce"):
        make(nonce=b"short")
