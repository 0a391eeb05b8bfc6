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
from kfcomm.errors import CollectiveError, EpochChanged, KfcommError, PeerLost

if TYPE_CHECKING:
    from kfcomm.collectives.group import Group
    from kfcomm.collectives.mailbox import Mailbox

QUESTION: Final = "kfcomm/auto"
ANSWER: Final = "kfcomm/auto/answer"
TOLD: Final = "kfcomm/auto/told"
AGAIN: Final = "kfcomm/auto/again"
END: Final = ""
FIRST: Final = 0
"""Rank that asks."""
AGAIN_AFTER_S: Final = 1.0
"""A rank that waits so long for an instruction asks for it again: a link may have broken that carried it."""
_MOST_KEPT: Final = 4
"""Latest questions whose instructions are kept for that."""

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
        self._telling: dict[tuple[int, int, int], Handle[None]] = {}  # by rank, question and place
        self._instructions: dict[int, list[Any]] = {}  # of the first rank, by question
        mailbox.serve(QUESTION, self._serve)
        mailbox.serve(AGAIN, self._tell_again)

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
        self._instructions.pop(number - _MOST_KEPT, None)
        for key in [key for key, one in self._telling.items() if key[1] <= number - _MOST_KEPT and one.done()]:
            del self._telling[key]
        known = self._instructions.setdefault(number, [])
        known.append([what, content])
        for rank in self._others:
            self._tell(rank, number, len(known) - 1)

    def _tell(self, rank: int, number: int, place: int) -> None:
        instruction = self._instructions[number][place]
        self._telling[rank, number, place] = self._send(rank, f"{TOLD}/{number}/{place}", instruction)

    async def _tell_again(self, rank: int, message: Handle[Any]) -> None:
        try:
            array, _ = await message
        except CollectiveError:  # likewise
            return
        number, place = unpacked(array)
        told = self._telling.get((rank, number, place))
        # One that is under way arrives, if late, and is done then: a second one would never be received.
        if told is not None and told.done() and (told.cancelled() or told.exception() is not None):
            self._tell(rank, number, place)

    @property
    def _others(self) -> Sequence[int]:
        return range(1, self._group.view.size)

    # ---------------------------------------------------------------- of the others

    def answer(self, number: int, content: Any) -> None:
        """Answer a question of the first rank."""
        self._send(FIRST, f"{ANSWER}/{number}", content)

    async def told(self, number: int, place: int) -> tuple[str, Any]:
        """Wait for an instruction about a question; ``place``: 0 for the first.

        Raises:
            KfcommError: the first rank is lost, or gives none within the group's timeout.
        """
        clock = self._group.engine.reactor.time
        until_s = clock() + self._group.timeout_s
        while True:
            left_s = min(AGAIN_AFTER_S, max(0.0, until_s - clock()))
            try:
                array, _ = await self._mailbox.recv(FIRST, f"{TOLD}/{number}/{place}", CallOptions(timeout=left_s))
            except (PeerLost, EpochChanged):
                raise
            except CollectiveError:  # it has not come, or its link broke
                if clock() >= until_s:
                    raise
                self._send(FIRST, AGAIN, [number, place])
            else:
                what, content = unpacked(array)
                return what, content

    async def _serve(self, source: int, message: Handle[Any]) -> None:
        try:
            array, _ = await message
        except CollectiveError:  # its link broke: the first rank asks again
            return
        number, kind, content = unpacked(array)
        if source == FIRST and number > self._number:  # else it was sent again in vain
            self._number = number
            await self._served(number, kind, content)

    # ---------------------------------------------------------------- of all

    def drains(self) -> list[Drain]:
        """Waits of a rank that closes, for its instructions to arrive."""
        telling = [one for one in self._telling.values() if not one.done()]
        if not telling:
            return []
        done: asyncio.Future[Any] = asyncio.gather(*telling, return_exceptions=True)
        return [Drain(done, LEAVE_WITHIN_S, lambda: "for ranks to hear which graphs are in force")]

    def _send(self, to: int, tag: str, what: Any) -> Handle[None]:
        handle = self._mailbox.send(adapt(packed(what)), to, tag)
        handle.when_done(self._group.engine.reactor, looked_at)
        return handle
