"""Agreements of a rank with all others of its epoch, one at a time: drives `core.membership` with time and news.

Invariants: the n-th agreement of a rank is the n-th of every other. After a timeout or a cancellation of its wait an
agreement is still under way: the next call resumes it, with the part that was given first.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from enum import IntEnum

from kfcomm.core.membership import MAX_PART_NBYTES, EpochDecision, Message, Value
from kfcomm.errors import CollectiveMismatch, CollectiveTimeout, ConfigError, KfcommError, Partitioned

CUT_OFF_AFTER_S = 1.0
"""So long ranks that are too few wait to be told, by launchers and refused connections, that others have ended."""
FENCED_WITHIN_S = 15.0
"""So long they wait for the end of those whom the store's word does not let go on, which have the launcher's grace."""
MAX_ALL_NBYTES = 1 << 15
"""Of all parts together: they travel in one frame."""

Tell = Callable[[int, Message], None]
Word = Callable[[Sequence[int], Sequence[int]], Awaitable[bool]]
"""Question to the store, as ``session.Network.has_word``."""


class AgreementCall(IntEnum):
    """Purpose of an agreement; all ranks have to call the same."""

    AGREE = 0
    SHRINK = 1


class Agreements:
    """Used on the session's loop; news may come from the thread that drives the engine.

    ``tell`` sends a message of the agreement with this number to all others.
    """

    def __init__(self, rank: int, size: int, tell: Tell) -> None:
        self._rank = rank
        self._size = size
        self._tell = tell
        self._number = 0
        self._given: AgreementCall | None = None
        self._decisions: dict[int, EpochDecision] = {}
        self._gone: set[int] = set()
        self._ended: set[int] = set()
        self._error: KfcommError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._turn = asyncio.Lock()

    # ---------------------------------------------------------------- news

    def on_message(self, rank: int, number: int, message: Message) -> None:
        """Take a message of another rank. Ranks are at most one agreement apart."""
        if self._number - 1 <= number <= self._number + 1:
            decision = self._decisions.get(number) or self._begin(number)
            self._say(number, decision.receive(rank, message))

    def lost(self, rank: int, *, has_ended: bool) -> None:
        """Count a rank as lost; ``has_ended``: its process has ended for certain, or it has left."""
        self._gone.add(rank)
        if has_ended:
            self._ended.add(rank)
        for number, decision in list(self._decisions.items()):
            self._say(number, decision.lost([rank], have_ended=has_ended))

    @property
    def strays(self) -> set[int]:
        """The lost ranks whose processes may still run."""
        return self._gone - self._ended

    def fail(self, error: KfcommError) -> None:
        """Take part in no further agreement."""
        self._error = self._error or error
        self._wake()

    def leave(self) -> None:
        """Announce the last decision, before the others hear that this rank has left."""
        for number in (self._number - 1, self._number):  # whoever entered the last one knows those before
            if number in self._decisions:
                self._say(number, self._decisions[number].leave())

    def _begin(self, number: int) -> EpochDecision:
        """Return the decision of that number; forget those that no rank can ask for any more."""
        self._decisions.pop(number - 3, None)
        self._decisions[number] = made = EpochDecision(self._rank, self._size, self._gone, self._ended)
        return made

    def _say(self, number: int, messages: Sequence[Message]) -> None:
        for message in messages:
            self._tell(number, message)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---------------------------------------------------------------- calls

    async def decide(
        self, call: AgreementCall, part: bytes, timeout_s: float, word: Word | None = None
    ) -> dict[int, bytes]:
        """Take part, and wait for the decision: return the parts of the surviving ranks, by rank.

        Args:
            call: what for.
            part: what this rank gives.
            timeout_s: how long to wait.
            word: asked whether the ranks that are given to it may go on, where the others cannot without being asked.

        Raises:
            ConfigError: the part is too long, or another call is still under way.
            CollectiveMismatch: others have called something else.
            CollectiveTimeout: ranks that live have not called.
            Partitioned: too few ranks are left, and the others may live.
            PeerLost: the others have given this rank up.
        """
        if len(part) >= MAX_PART_NBYTES or self._size * (len(part) + 8) > MAX_ALL_NBYTES:
            raise ConfigError(f"{self._size} ranks cannot agree on {len(part)} bytes of each: too many")
        async with self._turn:
            number = self._number
            decision = self._decisions.get(number) or self._begin(number)
            if self._given is None:
                self._given = call
                self._say(number, decision.enter(bytes([call]) + part))
            elif self._given is not call:
                former, this = self._given.name.lower(), call.name.lower()
                raise ConfigError(f"{former}() is still under way: call it again before {this}()")
            value = await self._wait(decision, call, timeout_s, word)
            self._number += 1
            self._given = None
        calls = {rank: AgreementCall(part[0]) for rank, part in value}
        if set(calls.values()) != {call}:
            said = ", ".join(f"rank {rank} called {one.name.lower()}()" for rank, one in calls.items())
            raise CollectiveMismatch(f"all ranks must make the same call: {said}", key=call.name.lower())
        return {rank: part[1:] for rank, part in value}

    async def _wait(self, decision: EpochDecision, call: AgreementCall, timeout_s: float, word: Word | None) -> Value:
        loop = asyncio.get_running_loop()
        until_s, cut_off_at_s, has_asked = loop.time() + timeout_s, math.inf, False
        while decision.value is None:
            if self._error is not None:
                raise self._error
            now_s = loop.time()
            if not decision.is_cut_off:
                cut_off_at_s = math.inf
            elif now_s >= cut_off_at_s:
                await self._ask(decision, word if not has_asked else None)
                has_asked, cut_off_at_s = True, loop.time() + FENCED_WITHIN_S
            else:
                cut_off_at_s = min(cut_off_at_s, now_s + CUT_OFF_AFTER_S)
            if now_s >= until_s:
                raise self._late(decision, call, timeout_s)
            self._waiter = loop.create_future()
            timer = loop.call_at(min(until_s, cut_off_at_s), self._wake)
            try:
                if decision.value is None:
                    await self._waiter
            finally:
                timer.cancel()
        return decision.value

    async def _ask(self, decision: EpochDecision, word: Word | None) -> None:
        """Ask the store whether these ranks may continue, if the other ranks may not without asking.

        Of two halves the store refuses the second, which raises.
        """
        left, strays = decision.living(), self.strays
        is_half = 2 * len(left) == self._size
        # Where ranks have ended, strays may know what was agreed with these: so their launchers end the strays first.
        may_ask = is_half or (self._ended and 2 * len(strays) <= self._size)
        if word is not None and may_ask and await word(left, () if is_half else sorted(strays)):
            if is_half:
                for rank in set(range(self._size)) - set(left):
                    self.lost(rank, has_ended=True)
        elif decision.is_cut_off:
            raise Partitioned(
                f"ranks {left} cannot go on: they are {len(left)} of {self._size}, and the others may have ended, "
                "or may continue without them; shrink() may succeed when more of them can be reached",
                members=left,
            )

    def _late(self, decision: EpochDecision, call: AgreementCall, timeout_s: float) -> CollectiveTimeout:
        missing = decision.missing
        arrived = tuple(rank for rank in decision.living() if rank not in missing)
        why = f"ranks {list(missing)} have not called it" if missing else "what the others say has not come"
        message = f"{call.name.lower()}() is not done after {timeout_s:g} s: {why}"
        return CollectiveTimeout(message, key=call.name.lower(), arrived=arrived, missing=missing)
