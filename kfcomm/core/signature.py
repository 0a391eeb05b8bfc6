"""What a collective is, as a value that ranks compare: if two differ, so would their results."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any, NamedTuple

MAX_NESTING = 3
"""Tuples in a signature are nested no deeper; a peer might send any depth that its header has room for."""


class Signature(NamedTuple):
    """Everything that must be the same on every rank. Fields that do not apply are empty, or -1 for ranks.

    ``memory`` says where the arrays are, if not in host memory, and if it must be the same everywhere.
    """

    verb: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    op: str = ""
    root: int = -1
    strategy: str = ""
    graphs: bytes = b""
    chunk_elements: int = 0
    counts: tuple[Any, ...] = ()
    wire_dtype: str = ""
    memory: str = ""


def from_wire(fields: list[Any]) -> tuple[Any, ...]:
    """Fields that a peer sent, as a value to compare with a ``Signature``. It may be anything.

    Raises:
        ValueError: nested too deep.
    """
    return tuple(_frozen(field, MAX_NESTING) for field in fields)


def describe(signature: Sequence[Any], generation: int = 0) -> str:
    """A signature in words, under a generation of its strategy; bounded: it may come from a peer."""
    if len(signature) != len(Signature._fields):
        return f"something else: {reprlib.repr(signature)[:200]}"
    verb, dtype, shape, op, root, strategy, graphs, chunk_elements, counts, wire_dtype, memory = signature
    words = [f"{verb} of {dtype} {shape}" if dtype else f"{verb}"]
    if memory:
        words.append(f"in {memory} memory")
    if wire_dtype:
        words.append(f"sent as {wire_dtype}")
    if op:
        words.append(f"op {op}")
    if root != -1:
        words.append(f"root {root}")
    digest = graphs.hex()[:8] if isinstance(graphs, bytes) else graphs
    words.append(f"strategy {strategy} (generation {generation}{digest and f', graphs {digest}'})")
    if dtype:
        words.append(f"chunks of {chunk_elements}")
    if counts:
        words.append(f"counts {counts}")
    return ", ".join(words)[:400]


def differing(one: Sequence[Any], other: Sequence[Any]) -> str:
    """The names of the fields in which two signatures differ; if in none, it is the generation of the strategy."""
    if len(one) != len(other):
        return "everything"
    return ", ".join(name for name, a, b in zip(Signature._fields, one, other, strict=False) if a != b) or "generation"


def _frozen(value: Any, nesting: int) -> Any:
    if type(value) is not list:
        return value
    if not nesting:
        raise ValueError("nested too deep")
    return tuple(_frozen(one, nesting - 1) for one in value)
