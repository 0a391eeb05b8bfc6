from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kfcomm.core.signature import num_chunks, pair_of, share_out, split


@given(count=st.integers(0, 10**12), parts=st.integers(1, 300))
def test_parts_follow_each_other_and_differ_by_one_at_most(count, parts):
    bounds = split(count, parts)
    assert len(bounds) == parts
    assert [offset for offset, _ in bounds] == [sum(length for _, length in bounds[:part]) for part in range(parts)]
    lengths = [length for _, length in bounds]
    assert sum(lengths) == count
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


@given(count=st.integers(0, 10**12), shares=st.lists(st.integers(1, 10**6), min_size=1, max_size=40))
def test_shares_are_kept_to_the_element(count, shares):
    bounds = share_out(count, shares)
    assert len(bounds) == len(shares)
    assert [offset for offset, _ in bounds] == [
        sum(length for _, length in bounds[:part]) for part in range(len(shares))
    ]
    assert sum(length for _, length in bounds) == count
    for (_, length), share in zip(bounds, shares, strict=True):
        assert length >= 0
        assert abs(length * sum(shares) - count * share) < sum(shares)
    assert share_out(count, [3 * share for share in shares]) == bounds


def test_a_small_share_of_few_elements_is_none():
    assert share_out(3, [1, 100, 1]) == [(0, 0), (0, 2), (2, 1)]
    assert share_out(0, [2, 3]) == [(0, 0), (0, 0)]


@given(count=st.integers(0, 10**9), chunk=st.integers(1, 10**6))
def test_chunks_cover_a_part_and_none_is_empty_unless_all_is(count, chunk):
    number = num_chunks(count, chunk)
    assert number >= 1
    assert number * chunk >= count
    assert count == 0 or (number - 1) * chunk < count


def test_keys_are_spread_over_the_pairs_and_always_alike():
    assert [pair_of(f"grad/{number}", 4) for number in range(6)] == [1, 3, 1, 3, 0, 2]
    seen = Counter(pair_of(f"layer{number}.weight", 8) for number in range(4000))
    assert set(seen) == set(range(8))
    assert max(seen.values()) < 700


def test_keys_are_spread_in_proportion_to_shares():
    seen = Counter(pair_of(f"layer{number}.weight", 3, (1, 4, 3)) for number in range(8000))
    assert [round(seen[pair] / 1000) for pair in range(3)] == [1, 4, 3]
    assert [pair_of(f"grad/{number}", 4, (1, 1, 1, 1)) for number in range(6)] == [1, 3, 1, 3, 0, 2]


def test_names_of_any_script_have_a_pair():
    assert 0 <= pair_of("Schicht-größe/層", 3) < 3
