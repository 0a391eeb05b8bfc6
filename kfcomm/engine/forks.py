"""Open sessions of a process, and what a forked child does with those that it inherits.

A child keeps a dead parent's sockets alive, so peers of the parent would see no end of file: the child replaces every
inherited descriptor, without touching the loop that the parent still uses (their epoll is shared).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kfcomm.engine.session import Session
    from kfcomm.transports.base import DeviceSetup

sessions: weakref.WeakSet[Session] = weakref.WeakSet()
"""Those that are not closed, and those of former epochs whose links are not."""
_inherited: list[DeviceSetup] = []
"""In a forked child: kept for ever, since a library that frees what it has on a device fails in a child."""


def open_sessions() -> list[Session]:
    """The sessions of this process that are not closed, by rank."""
    return sorted((session for session in sessions if not session.is_closed), key=lambda session: session.rank)


def let_go(session: Session) -> None:
    """In a forked child: replace every descriptor of a session by one of /dev/null, and keep its devices alive."""
    descriptors = [
        *session.network.descriptors(),
        *session.engine.links.descriptors(),
        *session.engine.reactor.own_descriptors(),
        *(descriptor for service in session.services for descriptor in service.descriptors()),
    ]
    session.network.sever()
    _inherited.append(session.devices)
    with contextlib.suppress(OSError):
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.dup2(nothing, descriptor)
        os.close(nothing)


def _mend_uvloop() -> None:
    """Let a forked child exit: libuv joins its worker threads then, and crashes if the parent has left them behind.

    Asked for work, it starts others (https://github.com/libuv/libuv/issues/4443).
    """
    uvloop = sys.modules.get("uvloop")
    if uvloop is not None:
        loop = uvloop.new_event_loop()
        loop.run_until_complete(loop.getaddrinfo("127.0.0.1", 0))
        loop.close()


def _after_fork() -> None:
    if sessions:
        atexit.register(_mend_uvloop)
    for session in list(sessions):
        session.forked()
    sessions.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
