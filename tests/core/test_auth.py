from hypothesis import assume, given
from hypothesis import strategies as st

from kfcomm.core import auth

TOKEN = b"a token of the job, long enough"


@given(st.binary(), st.binary(), st.binary())
def test_the_right_token_is_accepted(token: bytes, challenge: bytes, context: bytes) -> None:
    answer = auth.proof(token, challenge, context)
    assert len(answer) == auth.PROOF_NBYTES
    assert auth.proven(token, challenge, context, answer) is not None


@given(st.binary(min_size=1, max_size=64), st.binary(min_size=1, max_size=64))
def test_another_token_is_refused(token: bytes, other: bytes) -> None:
    # HMAC pads keys with zero bytes, so that only keys that differ in more than those are different keys
    assume(token.rstrip(b"\0") != other.rstrip(b"\0"))
    assert auth.proven(token, b"challenge", b"", auth.proof(other, b"challenge", b"")) is None


@given(st.binary(min_size=2), st.integers(0, 100))
def test_challenge_and_context_do_not_run_into_each_other(text: bytes, cut: int) -> None:
    first, second = cut % len(text), (cut + 1) % len(text)
    one = auth.proof(TOKEN, text[:first], text[first:])
    assert auth.proven(TOKEN, text[:second], text[second:], one) is None


@given(st.binary(max_size=64))
def test_anything_else_is_refused(garbage: bytes) -> None:
    assume(garbage != auth.proof(TOKEN, b"challenge", b"context"))
    assert auth.proven(TOKEN, b"challenge", b"context", garbage) is None


def test_of_several_tokens_the_first_proves_and_all_are_accepted() -> None:
    old, new, other = b"old token", b"new token", b"another token"
    for proves, accepts, by in (
        (old, old + b"\0" + new, old),
        (old + b"\0" + new, new + b"\0" + old, old),
        (new + b"\0" + old, new, new),
        (old, new, None),
        (old, new + b"\0" + other, None),
    ):
        answer = auth.proof(proves, b"challenge", b"context")
        assert auth.proven(accepts, b"challenge", b"context", answer) == by
