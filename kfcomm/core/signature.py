"""Agreed parts of a call: its signature, which ranks compare, and the division of its data.

A buffer is divided into parts, one for each graph pair, and parts into chunks. Parts decide which graph reduces an
element, so they depend on the number of elements, the shares of the graph pairs and the key alone; chunks only decide
how much travels at a time. All numbers are elements, never bytes.
"""

from __future__ import annotations

import reprlib
from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

MAX_NESTING = 3
"""Deepest nesting of tuples in a signature; a peer may send any depth that fits its header."""


class Signature(NamedTuple):
    """Everything that must be the same on every rank. Fields that do not apply are empty, or -1 for ranks."""

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
    memory: str = ""  # of the arrays, if not the host's, and if it must be the same everywhere
    # Name, dtype and shape of each of several arrays that travel together; where that is too much for a frame,
    # ``counts`` holds their number and a digest.
    arrays: tuple[tuple[str, str, tuple[int, ...]], ...] = ()


Side: TypeAlias = tuple[str, Sequence[Any], int]
"""A rank in words, its signature, and the generation of its strategy."""

MAX_UNLIKE = 3
"""Arrays that a disagreement names."""

_ASKED = frozenset({"verb", "op", "root", "wire_dtype", "memory"})
"""Fields that a call asks for, independent of its arrays."""

_DERIVED = ("generation", "chunk_elements", "graphs", "strategy")
"""Fields that follow from others: named only if nothing else differs."""


def from_wire(fields: list[Any]) -> tuple[Any, ...]:
    """Return fields that a peer sent, which may be anything, as a value to compare with a ``Signature``."""
    return tuple(_frozen(field, MAX_NESTING) for field in fields)


def describe(signature: Sequence[Any], differing: Collection[str] = (), generation: int = 0) -> str:
    """Return a signature in words, some fields only if they differ; bounded, since it may come from a peer."""
    if len(signature) != len(Signature._fields):
        return f"something else: {reprlib.repr(signature)[:200]}"
    verb, dtype, shape, op, root, strategy, graphs, chunk_elements, counts, wire_dtype, memory, arrays = signature
    number = _number_of_arrays(arrays, counts)
    what = f"a list of {number}" if number else f"{dtype} {shape}"
    words = [f"{verb} of {what}" if dtype else f"{verb}"]
    if memory:
        words.append(f"in {memory} memory")
    if wire_dtype:
        words.append(f"sent as {wire_dtype}")
    if op:
        words.append(f"op {op}")
    if root != -1:
        words.append(f"root {root}")
    if not {"strategy", "graphs", "generation"}.isdisjoint(differing):
        words.append(f"strategy {strategy}")
    if "graphs" in differing:
        words.append(f"graphs {graphs.hex()[:8] if isinstance(graphs, bytes) else graphs}")
    if "generation" in differing:
        words.append(f"generation {generation}")
    if "chunk_elements" in differing:
        words.append(f"chunks of {chunk_elements}")
    if "counts" in differing and not number:
        words.append(f"counts {counts}")
    return ", ".join(words)[:400]


def disagreement(one: Side, other: Side) -> str:
    """Describe the differences between two ranks, to follow "... differs between ranks"."""
    differing = _differing(one, other)
    unlike = _unlike(one, other) if _ASKED.isdisjoint(differing) else []
    if unlike:
        rest = f"; and {len(unlike) - MAX_UNLIKE} more" if len(unlike) > MAX_UNLIKE else ""
        return ": " + "; ".join(unlike[:MAX_UNLIKE]) + rest
    sides = (f"{rank} has {describe(said, differing, generation)}" for rank, said, generation in (one, other))
    return f" ({', '.join(differing)}): " + "; ".join(sides)


def _differing(one: Side, other: Side) -> list[str]:
    """Return the names of fields that differ, except for consequences of other differences."""
    if len(one[1]) != len(other[1]):
        return ["everything"]
    names = [name for name, a, b in zip(Signature._fields, one[1], other[1], strict=False) if a != b]
    if one[2] != other[2]:
        names.append("generation")
    for name in _DERIVED:
        if name in names and len(names) > 1:
            names.remove(name)
    return names


def _unlike(one: Side, other: Side) -> list[str]:
    """Describe the arrays that differ, if both sides list theirs."""
    (rank, ours, _), (other_rank, theirs, _) = one, other
    first, second = _listed(ours), _listed(theirs)
    if not first or not second:
        return []
    found = []
    for name in sorted(first.keys() | second.keys()):
        a, b = first.get(name), second.get(name)
        if a is None or b is None:
            found.append(f"{name!r:.200} is given by {rank if b is None else other_rank} alone")
        elif a != b:
            found.append(f"{name!r:.200} is {a} on {rank} and {b} on {other_rank}")
    return found


def _listed(signature: Sequence[Any]) -> dict[str, str]:
    """Return dtype and shape of each array by name; empty if not listed, or malformed."""
    arrays = signature[-1] if len(signature) == len(Signature._fields) else ()
    if type(arrays) is not tuple or not all(type(one) is tuple and len(one) == len(_LISTED) for one in arrays):
        return {}
    return {str(name): f"{dtype} {shape}"[:100] for name, dtype, shape in arrays}


_LISTED = ("name", "dtype", "shape")


def _number_of_arrays(arrays: Any, counts: Any) -> int:
    """Return how many arrays travel together; 0 for a single one."""
    if type(arrays) is tuple and arrays:
        return len(arrays)
    is_digest = type(counts) is tuple and len(counts) == 2 and type(counts[1]) is bytes and type(counts[0]) is int
    return counts[0] if is_digest else 0


def _frozen(value: Any, nesting: int) -> Any:
    if type(value) is not list:
        return value
    if not nesting:
        raise ValueError("nested too deep")
    return tuple(_frozen(one, nesting - 1) for one in value)


WHOLE_BELOW = 4096
"""Buffers of fewer elements travel whole, along one pair picked by their key."""

SHOWN_WHOLE_NBYTES = 1 << 14
"""In a direct strategy, every rank folds a message up to this size as a whole, and its own part of a longer one."""


def split(count: int, parts: int) -> list[tuple[int, int]]:
    """Return ``(offset, length)`` of ``parts`` parts of ``count`` elements; the first are longer by one if need be."""
    base, longer = divmod(count, parts)
    bounds = []
    offset = 0
    for part in range(parts):
        length = base + (part < longer)
        bounds.append((offset, length))
        offset += length
    return bounds


def share_out(count: int, shares: Sequence[int]) -> list[tuple[int, int]]:
    """Return ``(offset, length)`` of parts, some maybe empty, in proportion to ``shares``."""
    # Ends are rounded, not lengths: each part is less than one element off, and they add up.
    total = sum(shares)
    ends = [count * upto // total for upto in accumulate(shares)]
    return [(start, end - start) for start, end in zip([0, *ends], ends, strict=False)]


def num_chunks(count: int, chunk_elements: int) -> int:
    """Return the number of chunks of a part; an empty part travels as one chunk without payload."""
    return max(1, -(-count // chunk_elements))


def pair_of(key: str, num_pairs: int, shares: Sequence[int] = ()) -> int:
    """Return the pair of a buffer that travels whole; keys spread over the pairs in proportion to ``shares``."""
    # By CRC, since ``hash`` of a text differs between processes.
    if not shares:
        return crc32(key.encode()) % num_pairs
    return bisect_right(list(accumulate(shares)), crc32(key.encode()) % sum(shares))
