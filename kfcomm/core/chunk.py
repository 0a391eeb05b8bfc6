"""Division of a buffer into parts, one for each graph pair, and of parts into chunks.

Parts decide which graph reduces an element, so they depend on the number of elements, the shares of the graph
pairs and the key alone; chunks only decide how much travels at a time. All numbers are elements, never bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from zlib import crc32

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
    """Return ``(offset, length)`` of parts in proportion to ``shares``, each less than one element off.

    A part may be empty. Shares multiplied by one number give the same parts.
    """
    total = sum(shares)
    ends = [count * upto // total for upto in accumulate(shares)]
    return [(start, end - start) for start, end in zip([0, *ends], ends, strict=False)]


def num_chunks(count: int, chunk_elements: int) -> int:
    """Return the number of chunks of a part; an empty part travels as one chunk without payload."""
    return max(1, -(-count // chunk_elements))


def pair_of(key: str, num_pairs: int, shares: Sequence[int] = ()) -> int:
    """Return the pair of a buffer that travels whole: the same on every rank and run.

    Keys are spread evenly over the pairs, or in proportion to ``shares``, one for each pair.
    """
    if not shares:
        return crc32(key.encode()) % num_pairs
    return bisect_right(list(accumulate(shares)), crc32(key.encode()) % sum(shares))
