"""Proofs, seals on frames, and unauthenticated connections, which are bounded in all and per address."""

from __future__ import annotations

from collections import Counter

from hypothesis import assume, given
from hypothesis import strategies as st

from kfcomm.core import auth
from kfcomm.core.auth import CHECK_NBYTES, TAG_NBYTES, Seal, Unauthenticated, is_same, payload_seed

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


KEY, OTHER = bytes(32), bytes(31) + b"\1"
numbers = st.integers(0, 2**64 - 1)


@given(numbers, st.binary(max_size=8), st.binary(max_size=50))
def test_both_ends_make_the_same(number, prefix, rest):
    one, other = Seal(KEY), Seal(KEY)
    assert one.check(number, prefix) == other.check(number, prefix)
    assert is_same(one.tag(number, prefix, rest), other.tag(number, prefix, memoryview(rest)))
    assert (len(one.check(number, prefix)), len(one.tag(number, prefix, rest))) == (CHECK_NBYTES, TAG_NBYTES)


@given(st.lists(st.tuples(st.sampled_from([KEY, OTHER]), numbers, st.binary(max_size=20)), unique=True))
def test_another_key_number_or_frame_has_another_tag(frames):
    tags = {Seal(key).tag(number, b"12345678", rest) for key, number, rest in frames}
    assert len(tags) == len(frames)


def test_the_tag_is_of_the_whole_frame():
    seal = Seal(KEY)
    assert not is_same(seal.tag(0, b"12345678", b"9"), seal.tag(0, b"12345679", b"8"))


def test_seeds_are_secret_numbers_of_64_bits():
    assert payload_seed(KEY) != payload_seed(OTHER)
    assert 0 < payload_seed(KEY) < 1 << 64


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=100), st.integers(1, 8), st.integers(1, 8))
def test_limits_hold_and_oldest_connection_is_closed(steps: list[tuple[int, bool]], limit: int, of_one: int) -> None:
    unauthenticated: Unauthenticated[int] = Unauthenticated(limit, of_one)
    here: dict[int, int] = {}
    for number, (address, leaves) in enumerate(steps):
        evicted = unauthenticated.add(number, address)
        assert unauthenticated.is_flood == (evicted is not None)
        if evicted is not None:
            same = [who for who, where in here.items() if where == here[evicted]]
            assert evicted == same[0]
            assert len(here) == limit or len(same) == of_one
            if Counter(here.values())[address] < of_one:
                assert len(same) == max(Counter(here.values()).values())
            del here[evicted]
        here[number] = address
        if leaves:
            gone = next(iter(here))
            unauthenticated.remove(gone)
            unauthenticated.remove(gone)
            del here[gone]
        assert len(unauthenticated) == len(here) <= limit
        assert all(count <= of_one for count in Counter(here.values()).values())


def test_one_address_cannot_keep_others_out() -> None:
    unauthenticated: Unauthenticated[str] = Unauthenticated(4, 3)
    assert [unauthenticated.add(f"flood {number}", "there") for number in range(4)] == [None, None, None, "flood 0"]
    assert unauthenticated.add("mine", "here") is None
    assert unauthenticated.add("flood 4", "there") == "flood 1"
    assert unauthenticated.add("other", "elsewhere") == "flood 2"
