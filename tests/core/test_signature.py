"""Signatures, and the division of data into parts and chunks."""

from __future__ import annotations

from collections import Counter

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.core.signature import (
    MAX_NESTING,
    Signature,
    describe,
    disagreement,
    from_wire,
    num_chunks,
    pair_of,
    share_out,
    split,
)

WHOLE = Signature("all_to_all", "float32", (2, 3), "sum", 1, "ring", b"\xab\xcd" * 8, 128, ((1, 2), (3, 4)))


@pytest.mark.parametrize("signature", [Signature("barrier"), WHOLE, WHOLE._replace(shape=(), counts=())])
def test_a_signature_arrives_as_it_was(signature):
    arrived = from_wire(msgpack.unpackb(msgpack.packb(list(signature))))
    assert arrived == signature
    assert hash(arrived) == hash(signature)


def test_nesting_is_bounded():
    deep: list = []
    for _ in range(MAX_NESTING - 1):
        deep = [deep]
    from_wire([deep])
    with pytest.raises(ValueError, match="too deep"):
        from_wire([[deep]])
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ValueError, match="too deep"):
        from_wire([deep])


def test_words_hold_what_people_know_and_what_differs():
    assert describe(WHOLE) == "all_to_all of float32 (2, 3), op sum, root 1"
    assert describe(WHOLE, ("strategy",)) == "all_to_all of float32 (2, 3), op sum, root 1, strategy ring"
    assert describe(WHOLE, ("graphs",)).endswith("root 1, strategy ring, graphs abcdabcd")
    assert describe(WHOLE, ("generation",), 4).endswith("root 1, strategy ring, generation 4")
    assert describe(WHOLE, ("chunk_elements",)).endswith("root 1, chunks of 128")
    assert describe(WHOLE, ("counts",)).endswith("root 1, counts ((1, 2), (3, 4))")
    wired = Signature("broadcast", "float32", (2,), root=0, strategy="ring", wire_dtype="float16")
    assert describe(wired) == "broadcast of float32 (2,), sent as float16, root 0"
    on_device = Signature("broadcast", "float32", (2,), strategy="nccl", memory="device")
    assert describe(on_device) == "broadcast of float32 (2,), in device memory"
    assert describe(Signature("barrier", strategy="star")) == "barrier"
    several = Signature("all_reduce", "float32", (5,), "sum", arrays=(("a", "float32", (2,)), ("b", "float32", (3,))))
    assert describe(several) == "all_reduce of a list of 2, op sum"
    assert describe(several._replace(arrays=(), counts=(812, b"12345678")), ("counts",)) == (
        "all_reduce of a list of 812, op sum"
    )


@pytest.mark.parametrize(
    "nonsense",
    [
        (),
        ("all_reduce",),
        tuple(range(10)),
        (None,) * 10,
        (b"x" * 60_000,) * 10,
        ("x" * 60_000, "y" * 60_000),
        tuple(range(12)),
        (None,) * 12,
        (b"x" * 60_000,) * 12,
        (1, 2, 3, 4, 5, 6, "graphs", 8, [{}], 10, 11, 12),
    ],
)
def test_any_signature_has_words_and_they_are_few(nonsense):
    assert len(describe(nonsense)) <= 400


def said(one, other, generations=(0, 0)):
    return disagreement(("rank 0", one, generations[0]), ("rank 1", other, generations[1]))


def test_differing_fields_are_named():
    assert said(WHOLE, WHOLE._replace(root=2, op="max")).startswith(" (op, root): rank 0 has all_to_all of")
    assert said(WHOLE, WHOLE, (3, 4)) == (
        " (generation): rank 0 has all_to_all of float32 (2, 3), op sum, root 1, strategy ring, generation 3; "
        "rank 1 has all_to_all of float32 (2, 3), op sum, root 1, strategy ring, generation 4"
    )
    assert said(WHOLE, ()) == (
        " (everything): rank 0 has all_to_all of float32 (2, 3), op sum, root 1; rank 1 has something else: ()"
    )


def test_derived_differences_are_not_named():
    other = WHOLE._replace(dtype="float64", strategy="star", graphs=b"other", chunk_elements=64)
    assert said(WHOLE, other, (3, 4)).startswith(" (dtype): ")
    assert "star" not in said(WHOLE, other)
    assert said(WHOLE, WHOLE._replace(strategy="star", graphs=b"other"), (3, 4)).startswith(" (strategy): ")
    assert said(WHOLE, WHOLE._replace(graphs=b"other")).startswith(" (graphs): ")
    assert said(WHOLE, WHOLE._replace(chunk_elements=64)).startswith(" (chunk_elements): ")


MANY = Signature(
    "all_reduce", "float64", (9,), "sum", arrays=(("a", "float64", (2,)), ("b", "float64", (3,)), ("c", "int8", (4,)))
)


def test_of_several_arrays_those_that_differ_are_named_with_what_they_are():
    other = MANY._replace(shape=(10,), arrays=(*MANY.arrays[:1], ("b", "float64", (4,)), MANY.arrays[2]))
    assert said(MANY, other) == ": 'b' is float64 (3,) on rank 0 and float64 (4,) on rank 1"
    other = MANY._replace(arrays=(*MANY.arrays[:2], ("d", "int8", (4,))))
    assert said(MANY, other) == ": 'c' is given by rank 0 alone; 'd' is given by rank 1 alone"
    everything = tuple((name, "int8", ()) for name in "efghi")
    assert said(MANY, MANY._replace(arrays=everything)).endswith("'c' is given by rank 0 alone; and 5 more")


@pytest.mark.parametrize(
    "other",
    [
        MANY._replace(op="max"),
        MANY._replace(arrays=(), counts=(812, b"12345678")),
        MANY._replace(arrays=()),
        MANY._replace(arrays="nonsense"),
        MANY._replace(arrays=(1, 2)),
        MANY._replace(arrays=(("a", "b"),)),
        MANY._replace(arrays=MANY.arrays[::-1]),
        MANY[:-1],
    ],
)
def test_both_sides_are_shown_without_array_list(other):
    words = said(MANY, other)
    assert words.startswith(" (")
    assert "rank 0 has all_reduce of a list of 3" in words


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
