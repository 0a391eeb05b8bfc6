"""What a collective is, as a value that ranks compare: if two differ, so would their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Signature(NamedTuple):
    """Everything that must be the same on every rank. Fields that do not apply are empty, or -1 for ranks."""

    verb: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    op: str = ""
    root: int = -1
    strategy: str = ""
    generation: int = 0
    graphs: bytes = b""
    chunk_elements: int = 0
    counts: tuple[Any, ...] = ()


def from_wire(fields: list[Any]) -> tuple[Any, ...]:
    """Fields that a peer sent, as a value to compare with a ``Signature``. It may be anything."""
    return tuple(_frozen(field) for field in fields)


def describe(signature: Sequence[Any]) -> str:
    """A signature in words, bounded: it may come from a peer."""
    if len(signature) != len(Signature._fields):
        return f"something else: {signature!r:.200}"
    verb, dtype, shape, op, root, strategy, generation, _, chunk_elements, counts = signature
    words = [f"{verb}"]
    if dtype:
        words.append(f"of {dtype} {shape}")
    if op:
        words.append(f"op {op}")
    if root != -1:
        words.append(f"root {root}")
    words.append(f"strategy {strategy} (generation {generation})")
    if counts:
        words.append(f"counts {counts}")
    if dtype:
        words.append(f"chunks of {chunk_elements}")
    return ", ".join(words)[:400]


def _frozen(value: Any) -> Any:
    return tuple(_frozen(one) for one in value) if type(value) is list else value
