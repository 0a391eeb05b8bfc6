"""Collectives of memory on devices: named, with deadlines and errors as all others, carried out by another path.

A *call* is one of them on one rank. To the runtime it is a collective without chunks: it has a number, a deadline, and
fails everywhere if it fails anywhere. A *path* carries it out: whole on the devices, or through the host's memory.
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
