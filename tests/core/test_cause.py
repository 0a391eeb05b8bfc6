from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.core.cause import MAX_MESSAGE_CHARACTERS, Cause, CauseKind, error_of
from kfcomm.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    EpochChanged,
    InternalError,
    PeerLost,
)

ranks = st.integers(-1, 10**9)
causes = st.builds(
    Cause,
    kind=st.sampled_from(CauseKind),
    rank=ranks,
    message=st.text(max_size=40),
    arrived=st.lists(ranks, max_size=4).map(tuple),
    missing=st.lists(ranks, max_size=4).map(tuple),
)
junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(cause=causes)
def test_a_cause_arrives_as_it_was(cause):
    assert Cause.from_wire(msgpack.unpackb(msgpack.packb(cause.to_wire()))) == cause


def test_a_long_story_is_cut_at_either_end():
    long = Cause(CauseKind.TIMEOUT, 1, "x" * 5000)
    assert len(long.to_wire()[2]) == MAX_MESSAGE_CHARACTERS
    assert len(Cause.from_wire(["timeout", 1, "x" * 5000, [], []]).message) == MAX_MESSAGE_CHARACTERS


@pytest.mark.parametrize(
    "fields",
    [
        [],
        ["timeout", 1, "words", []],
        ["thunder", 1, "words", [], []],
        [["timeout"], 1, "words", [], []],
        ["timeout", "1", "words", [], []],
        ["timeout", True, "words", [], []],
        ["timeout", 1, b"words", [], []],
        ["timeout", 1, "words", [0, "1"], []],
        ["timeout", 1, "words", 7, []],
        ["timeout", 1, "words", [], [[0]]],
        {"kind": "timeout"},
        None,
    ],
)
def test_nonsense_becomes_a_cause_of_its_own(fields):
    cause = Cause.from_wire(fields)
    assert (cause.kind, cause.rank) == (CauseKind.INTERNAL, -1)
    assert "invalid reason" in cause.message


@given(fields=junk | st.lists(junk, min_size=5, max_size=5))
def test_no_nonsense_raises_and_none_is_told_at_length(fields):
    assert len(Cause.from_wire(fields).message) <= MAX_MESSAGE_CHARACTERS


def test_nonsense_of_any_depth_does_not_raise():
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    assert Cause.from_wire(deep).kind is CauseKind.INTERNAL


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (CauseKind.MISMATCH, CollectiveMismatch),
        (CauseKind.TIMEOUT, CollectiveTimeout),
        (CauseKind.CANCELLED, CollectiveAborted),
        (CauseKind.REFUSED, CollectiveAborted),
        (CauseKind.LOST, PeerLost),
        (CauseKind.EPOCH, EpochChanged),
        (CauseKind.LINK, CollectiveError),
        (CauseKind.INTERNAL, InternalError),
    ],
)
def test_every_kind_of_cause_has_its_error(kind, error):
    made = error_of(Cause(kind, 1, "why"), "x", "'x'")
    assert type(made) is error
    assert "why" in str(made)
