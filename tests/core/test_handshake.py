import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.core.frame import PROTOCOL_VERSION
from kfcomm.core.handshake import (
    MAX_REASON_CHARS,
    MAX_UID_NBYTES,
    NONCE_NBYTES,
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
from kfcomm.errors import LocalProtocolError

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
