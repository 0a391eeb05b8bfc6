from __future__ import annotations

import msgpack
import pytest

from kfcomm.core.signature import MAX_NESTING, Signature, describe, differing, from_wire

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


def test_words_hold_all_that_applies_and_no_more():
    assert describe(WHOLE, 4) == (
        "all_to_all of float32 (2, 3), op sum, root 1, strategy ring (generation 4, graphs abcdabcd), chunks of 128, "
        "counts ((1, 2), (3, 4))"
    )
    wired = Signature("broadcast", "float32", (2,), root=0, strategy="ring", wire_dtype="float16")
    assert describe(wired).startswith("broadcast of float32 (2,), sent as float16, root 0, strategy ring")
    on_device = Signature("broadcast", "float32", (2,), strategy="nccl", memory="device")
    assert describe(on_device).startswith("broadcast of float32 (2,), in device memory, strategy nccl")
    assert describe(Signature("barrier", strategy="star")) == "barrier, strategy star (generation 0)"


@pytest.mark.parametrize(
    "nonsense",
    [
        (),
        ("all_reduce",),
        tuple(range(10)),
        (None,) * 10,
        (b"x" * 60_000,) * 10,
        ("x" * 60_000, "y" * 60_000),
        tuple(range(11)),
        (None,) * 11,
        (b"x" * 60_000,) * 11,
        (1, 2, 3, 4, 5, 6, "graphs", 8, [{}], 10, 11),
    ],
)
def test_any_signature_has_words_and_they_are_few(nonsense):
    assert len(describe(nonsense)) <= 400


def test_what_differs_is_named():
    assert differing(WHOLE, WHOLE._replace(root=2, op="max")) == "op, root"
    assert differing(WHOLE, WHOLE) == "generation"  # which is no field, and all that is left to differ
    assert differing(WHOLE, ()) == "everything"
