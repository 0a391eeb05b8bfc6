"""Names of hosts that do not resolve yet: those of pods do only once the pod has an address."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from kfcomm.errors import RendezvousError
from kfcomm.rendezvous.host import NameNotFound
from kfcomm.rendezvous.keyvalue import loop_now_s

T = TypeVar("T")

FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 1.0
"""Between two look-ups; doubled each time."""
SAID_AFTER_S = 1.0
"""Seconds of waiting after which this is reported once."""


async def once_resolved(look_up: Callable[[], T], timeout_s: float, say: Callable[[str], object]) -> T:
    """Return the result of ``look_up``, which runs in a thread and is repeated while it raises `NameNotFound`.

    A name that has failed once may have failed for good, such as a misspelt one: ``say`` gets one line early.

    Raises:
        RendezvousError: the name does not resolve within ``timeout_s`` seconds.
    """
    begun_s, pause_s, is_said = loop_now_s(), FIRST_PAUSE_S, False
    while True:
        try:
            return await asyncio.to_thread(look_up)
        except NameNotFound as error:
            waited_s = loop_now_s() - begun_s
            if waited_s >= timeout_s:
                raise RendezvousError(f"within {timeout_s:g} s: {error}") from error
            if waited_s >= SAID_AFTER_S and not is_said:
                is_said = True
                say(f"{error}; it is looked up for up to {timeout_s:g} s")
            await asyncio.sleep(min(pause_s, timeout_s - waited_s))
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
