"""Versions of drivers and backends, and lists of ranks, as people write them."""

from __future__ import annotations

from collections.abc import Sequence

MAX_SHOWN = 8


def driver_version(number: int) -> str:
    """A version as CUDA counts: 12040 is 12.4."""
    return f"{number // 1000}.{number % 1000 // 10}"


def backend_in_words(backend: str, number: int) -> str:
    """A backend and its version, as it counts: of ``nccl`` 22803 is NCCL 2.28.3, and 2804 is NCCL 2.8.4."""
    if backend != "nccl":
        return f"{backend} {number}"
    # before 2.9 the first part had two digits less behind it
    major, rest = divmod(number, 10_000 if number >= 10_000 else 1000)
    return f"NCCL {major}.{rest // 100}.{rest % 100}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0 and 2``, ``ranks 0, 1, 2, 3, 4, 5, 6, 7 and 56 more``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > MAX_SHOWN:
        return f"ranks {', '.join(map(str, ranks[:MAX_SHOWN]))} and {len(ranks) - MAX_SHOWN} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
