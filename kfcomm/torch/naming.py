"""Names for calls of ``torch.distributed``, which has none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kfcomm.common.arguments import checked_name

_names = threading.local()
"""Of this thread: the name, and how many calls have used it."""


@contextmanager
def named(name: str) -> Iterator[None]:
    """The collectives that this thread calls in the block have this name, on all ranks; others match by their order.

    ::

        with kfcomm.torch.named("grad/0"):
            work = dist.all_reduce(tensor, async_op=True)

    Ranks may call collectives with names in any order, and from any thread. Of several calls in one block the second is
    called ``grad/0#1``, and so on. Messages (``send``, ``recv``) go by their tags, in a block or not.

    Args:
        name: not empty; see "Name collectives".

    Raises:
        ConfigError: it cannot be a name.
    """
    given = checked_name(name)
    outer = getattr(_names, "current", None)
    _names.current = [given, 0]
    try:
        yield
    finally:
        _names.current = outer


def next_name() -> str | None:
    """The name of the call that this thread makes now; None if it has none."""
    current = getattr(_names, "current", None)
    if current is None:
        return None
    name, used = current
    current[1] = used + 1
    return f"{name}#{used}" if used else name
