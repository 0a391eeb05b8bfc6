"""Sends frames to one peer. It exists before its link is open, and keeps the frames queued until then.

When a link breaks, its sender is replaced too: the names that were defined on that link, and the credit that was spent
on it, are lost with the link.
"""

from __future__ import annotations

from collections.abc import Sequence

from kfcomm.core.frame import Header
from kfcomm.core.links import Outgoing
from kfcomm.transports.base import Link, Owner


class PeerSender:
    """Sends to ``state.peer``, now or as soon as there is a link: ``first`` before all else.

    Attributes:
        state: what the router knows of this end.
        link: the link, once it is open.
    """

    __slots__ = ("_backlog", "link", "state")

    def __init__(self, state: Outgoing, first: Sequence[Header]) -> None:
        self.state = state
        self.link: Link | None = None
        self._backlog: list[tuple[Header, memoryview | None, Owner | None, int]] = [
            (header, None, None, 0) for header in first
        ]

    def attach(self, link: Link) -> None:
        """The link is open: send what has waited."""
        self.link = link
        link.state = self.state
        backlog, self._backlog = self._backlog, []
        for header, payload, owner, priority in backlog:
            if link.send(header, payload, owner, priority) and owner is not None:
                owner.sent()
        link.flush()

    def send(
        self, header: Header, payload: memoryview | None = None, owner: Owner | None = None, priority: int = 0
    ) -> bool:
        """Send or queue a frame; see ``Link.send``."""
        if self.link is None:
            self._backlog.append((header, payload, owner, priority))
            return False
        return self.link.send(header, payload, owner, priority)

    def flush(self) -> None:
        """Move queued frames, if there is a link."""
        if self.link is not None:
            self.link.flush()

    def withdraw(self, owner: Owner) -> list[Header]:
        """Forget an owner's memory; the headers of its frames that were dropped."""
        if self.link is not None:
            return list(self.link.withdraw(owner))
        dropped = [header for header, _, other, _ in self._backlog if other is owner]
        self._backlog = [frame for frame in self._backlog if frame[2] is not owner]
        return dropped
