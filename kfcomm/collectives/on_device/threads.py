"""How other threads, those of a device above all, tell the engine's what has happened."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kfcomm.transports.reactor import Reactor


def tell(reactor: Reactor, callback: Callable[..., object], *arguments: Any) -> None:
    """Let the reactor call back, with these arguments; on any thread. What is told after its end is not heard."""
    with contextlib.suppress(RuntimeError):
        reactor.call_soon_threadsafe(callback, *arguments)
