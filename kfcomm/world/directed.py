"""Questions of a group's first rank to all others, which they answer whatever their programs do meanwhile.

The first rank asks, and each of the others answers. Where the question says so, they then wait to be told what to do
about it. Nothing here depends on the order of the program's calls. Each question has a number and tags of its own, so
that what comes too late is not taken for a part of another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from kfcomm.arrays import adapt
from kfcomm.collectives.handle import Handle, looked_at
from kfcomm.collectives.objects import packed, unpacked
from kfcomm.collectives.specs import CallOptions
from kfcomm.engine.closing import LEAVE_WITHIN_S, Drain
from kfcomm.errors import CollectiveAborted, InternalError, KfcommError

if TYPE_CHECKING:
    from kfcomm.collectives.group import Group
    from kfcomm.collectives.mailbox import Mailbox

QUESTION: Final = "kfcomm/auto"
ANSWER: Final = "kfcomm/auto/answer"
TOLD: Final = "kfcomm/auto/told"
END: Final = ""
FIRST: Final = 0
"""Rank that asks."""
_MOST_TIMES: Final = 3
"""An instruction whose link breaks goes again, so many times in all; a lost question or answer counts as late."""

Served = Callable[[int, str, Any], Awaitable[None]]
"""Called with number, kind and content of a question."""


class Directed:
    """One rank's end of these questions.

    Args:
        group: of the ranks.
        mailbox: of the group.
        served: answers a question, on all ranks but the first.
    """

    def __init__(self, group: Group, mailbox: Mailbox, served: Served) -> None:
        self._group = group
        self._mailbox = mailbox
        self._served = served
        self._number = 0
        self._telling: set[Handle[None]] = set()
        mailbox.serve(QUESTION, self._serve)

    # ---------------------------------------------------------------- of the first rank

    def begin(self, kind: str, content: Any) -> int:
        """Ask all others; return the number of the question."""
        self._number += 1
        for rank in self._others:
            self._send(rank, QUESTION, [self._number, kind, content])
        return self._number

    async def answers(self, number: int, within_s: float) -> list[Any]:
        """Wait for the answers to a question, by rank from 1 on.

        Raises:
            CollectiveTimeout: a rank has not answered in time.
            KfcommError: it cannot be reached.
        """
        clock = self._group.engine.reactor.time
        until_s = clock() + within_s
        found: list[Any] = []
        try:
            for rank in self._others:
                left = CallOptions(timeout=max(0.0, until_s - clock()))
                array, _ = await self._mailbox.recv(rank, f"{ANSWER}/{number}", left)
                found.append(unpacked(array))
        except KfcommError:
            for rank in self._others[len(found) :]:
                self._mailbox.drop(rank, f"{ANSWER}/{number}", "it is too late for this answer")
            raise
        return found

    def tell(self, number: int, what: str, content: Any = None) -> None:
        """Tell all others what to do about a question; ``END``: nothing more."""
        for rank in self._others:
            self._tell(rank, f"{TOLD}/{number}", [what, content], _MOST_TIMES)

    def _tell(self, rank: int, tag: str, what: Any, times: int) -> None:
        def over(done: Handle[None]) -> None:
            self._telling.discard(done)
            is_broken = not done.cancelled() and isinstance(done.exception(), CollectiveAborted)
            if is_broken and times > 1 and not self._mailbox.is_lost(rank):
                self._tell(rank, tag, what, times - 1)

        handle = self._send(rank, tag, what)
        self._telling.add(handle)
        handle.when_done(self._group.engine.reactor, over)

    @property
    def _others(self) -> Sequence[int]:
        return range(1, self._group.view.size)

    # ---------------------------------------------------------------- of the others

    def answer(self, number: int, content: Any) -> None:
        """Answer a question of the first rank."""
        self._send(FIRST, f"{ANSWER}/{number}", content)

    async def told(self, number: int) -> tuple[str, Any]:
        """Wait for what the first rank tells to do about a question.

        Raises:
            KfcommError: the first rank is lost, or has not told it within the group's timeout.
        """
        for left in reversed(range(_MOST_TIMES)):
            try:
                array, _ = await self._mailbox.recv(
                    FIRST, f"{TOLD}/{number}", CallOptions(timeout=self._group.timeout_s)
                )
                what, content = unpacked(array)
                return what, content
            except CollectiveAborted:  # the link broke: it is told again
                if not left:
                    raise
        raise InternalError("no time is left to be told")

    async def _serve(self, source: int, message: Handle[Any]) -> None:
        array, _ = await message
        number, kind, content = unpacked(array)
        if source == FIRST and number > self._number:  # else it was sent again in vain
            self._number = number
            await self._served(number, kind, content)

    # ---------------------------------------------------------------- of all

    def drains(self) -> list[Drain]:
        """Waits of a rank that closes, for its instructions to arrive."""
        if not self._telling:
            return []
        done: asyncio.Future[Any] = asyncio.gather(*self._telling, return_exceptions=True)
        return [Drain(done, LEAVE_WITHIN_S, lambda: "for ranks to hear which graphs are in force")]

    def _send(self, to: int, tag: str, what: Any) -> Handle[None]:
        handle = self._mailbox.send(adapt(packed(what)), to, tag)
        handle.when_done(self._group.engine.reactor, looked_at)
        return handle
