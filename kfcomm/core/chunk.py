"""How a buffer is cut: into parts, one for each graph pair, and parts into chunks.

Parts decide which graph reduces an element, so they depend on the number of elements and the key alone;
chunks only decide how much travels at a time. All numbers are elements, never bytes.
"""

from __future__ import annotations

from zlib import crc32

WHOLE_BELOW = 4096
"""Buffers of fewer elements are not shared out: they travel whole, along one pair picked by their key."""


def split(count: int, parts: int) -> list[tuple[int, int]]:
    """``(offset, length)`` of ``parts`` parts of ``count`` elements; the first ``count % parts`` are one longer."""
    base, longer = divmod(count, parts)
    bounds = []
    offset = 0
    for part in range(parts):
        length = base + (part < longer)
        bounds.append((offset, length))
        offset += length
    return bounds


def num_chunks(count: int, chunk_elements: int) -> int:
    """Number of chunks of a part; an empty one still travels, as one chunk without payload."""
    return max(1, -(-count // chunk_elements))


def pair_of(key: str, num_pairs: int) -> int:
    """Which pair a buffer that travels whole takes: spreads keys evenly, the same on every rank and run."""
    return crc32(key.encode()) % num_pairs
