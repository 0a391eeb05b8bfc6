from hypothesis import assume, given
from hypothesis import strategies as st

from kfcomm.core import auth

TOKEN = b"a token of the job, long enough"


@given(st.binary(), st.binary(), st.binary())
def test_the_right_token_is_accepted(token: bytes, challenge: bytes, context: bytes) -> None:
    answer = auth.proof(token, challenge, context)
    assert len(answer) == auth.PROOF_NBYTES
    assert auth.is_valid(token, challenge, context, answer)


@given(st.binary(min_size=1, max_size=64), st.binary(min_size=1, max_size=64))
def test_another_token_is_refused(token: bytes, other: bytes) -> None:
    # HMAC pads keys with zero bytes, so that only keys that differ in more than those are different keys
    assume(token.rstrip(b"\0") != other.rstrip(b"\0"))
    assert not auth.is_valid(token, b"challenge", b"", auth.proof(other, b"challenge", b""))


@given(st.binary(min_size=2), st.integers(0, 100))
def test_challenge_and_context_do_not_run_into_each_other(text: bytes, cut: int) -> None:
    first, second = cut % len(text), (cut + 1) % len(text)
    one = auth.proof(TOKEN, text[:first], text[first:])
    assert not auth.is_valid(TOKEN, text[:second], text[second:], one)


@given(st.binary(max_size=64))
def test_anything_else_is_refused(garbage: bytes) -> None:
    assume(garbage != auth.proof(TOKEN, b"challenge", b"context"))
    assert not auth.is_valid(TOKEN, b"challenge", b"context", garbage)
