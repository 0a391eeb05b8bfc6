"""Text for versions of drivers and backends."""

from __future__ import annotations


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
