"""Objects: what msgpack carries arrives unchanged; anything else is refused on the rank that gives it."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfcomm.collectives.objects import fingerprint, packed, unpacked
from kfcomm.errors import CollectiveAborted, CollectiveError, ConfigError
from tests.conformance.worlds import assert_kinds, ends, everywhere, world

SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=5)
)
KEYS = st.text(max_size=5) | st.integers(-9, 9) | st.binary(max_size=5)
OBJECTS = st.recursive(
    SCALARS | st.binary(max_size=5), lambda some: st.lists(some) | st.dictionaries(KEYS, some), max_leaves=8
)


@settings(max_examples=50)
@given(OBJECTS)
def test_an_object_arrives_as_it_was(value: Any) -> None:
    assert unpacked(packed(value)) == value


REFUSED: list[tuple[Any, str]] = [
    ({(1, 2): 3}, r"this value, a dict with the key \(1, 2\), a tuple: give list\(x.items\(\)\)"),
    ({"a": [{frozenset("b"): 3}]}, r"value\['a'\]\[0\], a dict with the key .*, a frozenset: give list"),
    ([1, {"deep": {1, 2}}], r"value\[1\]\['deep'\], a set: give sorted\(x\) or list\(x\)"),
    ({"n": 2**64}, r"value\['n'\], an integer of more than 64 bits: give str\(x\)"),
    ([-(2**63) - 1], r"value\[0\], an integer of more than 64 bits"),
    ([np.ones(2)], r"value\[0\], a ndarray: give x.tolist\(\), or send the array by itself"),
    ([np.int64(2)], r"value\[0\], an int64: give x.item\(\)"),
    (1j, r"this value, a complex: give \[x.real, x.imag\]"),
    ([datetime.timedelta(1)], r"value\[0\], a timedelta: give what it is made of"),
    (object(), "this value, an object: give what it is made of"),
    ({np.int64(2): 1}, r"value.keys\(\), an int64: give x.item"),
]


@pytest.mark.parametrize(("value", "words"), REFUSED)
def test_unsupported_objects_are_refused_with_place_and_advice(value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"msgpack cannot carry {words}"):
        packed(value)


def test_an_object_that_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ConfigError, match="msgpack cannot carry this list"):
        packed(endless)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x81\x92\x01\x02\x03", b"\x01\x02"])
def test_bytes_of_a_peer_that_are_no_object_are_an_error_of_the_collective(data: bytes) -> None:
    with pytest.raises(CollectiveError, match="cannot be read"):
        unpacked(np.frombuffer(data, np.uint8))


ALIKE: list[tuple[Any, Any]] = [
    ("text", "text"),
    (b"data", b"data"),
    (None, None),
    ({"a": 1, "b": [2, "c"]}, {"b": [2, "c"], "a": 1}),
    ({(1, 2): {"x"}}, {(1, 2): {"x"}}),
    ({"w": np.ones(3), "b": [np.zeros(2)]}, {"b": [np.zeros(2)], "w": np.ones(3)}),
    ([1, 2], np.array([1, 2])),
    ([[1], [2]], np.array([[1], [2]])),
    ({"a", "b", "c"}, {"c", "b", "a"}),
    (["a", None], ("a", None)),
    ([], []),
]
UNLIKE: list[tuple[Any, Any]] = [
    ("text", b"text"),
    ("a", "b"),
    ("", None),
    ("", b""),
    ({"a": 1}, {"a": 1.0}),
    ({"a": 1}, {"b": 1}),
    ({"a": "b"}, {"b": "a"}),
    ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
    ({"w": np.ones(3)}, {"w": np.ones((3, 1))}),
    (["ab", "c"], ["a", "bc"]),
    ([["a"], "b"], ["a", ["b"]]),
    ({"a"}, ["a"]),
    ({}, []),
    ([np.ones(2), np.ones(2)], np.ones((2, 2))),
    (True, 1),
    ([[], False], None),
    ([[1], [2, 3]], [[1, 2], [3]]),
    ([1, [2]], [[1], 2]),
]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_fingerprints_of_the_same_are_the_same(one: Any, other: Any) -> None:
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize(("one", "other"), UNLIKE)
def test_fingerprints_of_others_are_not(one: Any, other: Any) -> None:
    assert fingerprint(one) != fingerprint(other)


@settings(max_examples=50)
@given(OBJECTS, OBJECTS)
def test_fingerprints_tell_any_two_apart(one: Any, other: Any) -> None:
    is_same = packed(one).tobytes() == packed(other).tobytes()
    assert is_same <= (fingerprint(one) == fingerprint(other))


@pytest.mark.asyncio
async def test_consensus_of_what_is_no_array() -> None:
    state = {"step": 7, "names": ["a", "b"], "weight": np.arange(6.0)}
    async with world(3) as comms:
        for odd in (state | {"step": 8}, state | {"weight": np.arange(6.0) + 1e-9}, "state", None):
            same = await everywhere(comms, lambda comm, odd=odd: comm.consensus(odd if comm.rank == 1 else state))
            assert same == [False] * 3
        for value in (state, "text", b"data", None):
            assert await everywhere(comms, lambda comm, value=value: comm.consensus(value, "c")) == [True] * 3
        outcomes = await ends(comms, lambda comm: comm.consensus({"a": object()} if comm.rank == 0 else state, "c"))
        assert_kinds(outcomes, ConfigError, CollectiveAborted, CollectiveAborted)


@pytest.mark.asyncio
async def test_a_handle_that_is_waited_for_says_to_await() -> None:
    async with world(1) as (comm,):
        handle, started = comm.all_reduce(np.ones(2)), comm.all_reduce_init(np.ones(2)).start()
        for one in (handle, comm.all_gather_object("x"), started):
            with pytest.raises(ConfigError, match="write await handle"):
                one.wait()
        await handle
        await started
