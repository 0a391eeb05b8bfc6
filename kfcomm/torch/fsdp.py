"""FSDP2 over backend kfcomm: its buffers in memory that peers read where it is.

FSDP2 copies shards and gradients to a buffer for each call, which it asks of an object with one method to allocate and
one to call. Torch's objects can ask a group for memory, as ``set_allocate_memory_from_process_group_for_comm`` makes
them; those that do not yet do so after their first call, in which they are found in the calling frame: only then is
their group known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from kfcomm.torch.kept_works import above

FILE = "_fsdp_collectives.py"
"""Where torch's objects call."""
CALLERS = frozenset({"DefaultAllGather", "DefaultReduceScatter"})
MAX_FRAMES = 8
"""Between the method of the backend and the object: wrappers of torch."""


def allocate_for_caller(allocate: Callable[..., Any]) -> None:
    """Let the object of FSDP2 that called the caller, if there is one, allocate in this way from now on."""
    frame = above(2)
    for _ in range(MAX_FRAMES):
        if frame.f_code.co_filename.endswith(FILE):
            caller: Any = frame.f_locals.get("self")
            if type(caller).__name__ in CALLERS:
                caller.allocate = allocate
            return
        if frame.f_back is None:
            return
        frame = frame.f_back


def count_of(size: int | Sequence[int]) -> int:
    """The number of elements of a tensor: FSDP2 tells the dimensions, its objects for groups the number."""
    return size if isinstance(size, int) else prod(size)
