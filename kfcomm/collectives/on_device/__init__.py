"""Collectives of memory on devices: they have names, deadlines and errors as all others, and paths of their own.

A *call* is such a collective on one rank. To the runtime it is a collective without chunks: it has a number and a
deadline, and fails on all ranks if it fails on one. A *path* carries it out: on the devices, or through host memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kfcomm.transports.reactor import Reactor


def tell(reactor: Reactor, callback: Callable[..., object], *arguments: Any) -> None:
    """Schedule a callback on the reactor, from any thread. After its end this does nothing."""
    with contextlib.suppress(RuntimeError):
        reactor.call_soon_threadsafe(callback, *arguments)
