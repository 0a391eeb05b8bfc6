from hypothesis import given
from hypothesis import strategies as st

from kfcomm.core.auth import CHECK_NBYTES, TAG_NBYTES, Seal, is_same, payload_seed

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
