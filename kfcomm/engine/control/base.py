"""Control plane as its users see it: news of failures and leaving peers, and answers about posted collectives.

An engine moves data and holds a `ControlPlane`; the plane tells the engine what it hears by `ControlEvents`, and
asks `StatusSource` on behalf of the peers. None of this ever waits for an engine: a rank that computes for minutes
still answers, so that busy is not taken for dead.

Invariants, for the engine on each rank:

- Each abort is heard at most once, and exactly once by every rank that lives on; never by the rank that sent it.
- A rank is reported as lost at most once, and never after it was reported as leaving.
- All `ControlEvents`, and the answers to questions, come where the engine runs, in the order in which they
  arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kfcomm.core.gossip import CollectiveId
from kfcomm.core.membership import Message
from kfcomm.engine.control.clock import ClockSample
from kfcomm.transports.sockets import Connection

GOODBYE_S = 2.0
"""How long a closing rank waits for peers to close their side, too."""

GONE = "gone before it has answered"
"""What a rank does that has left, and does not reply."""

Answer = Callable[[int, list[bool], str], None]
"""``answer(rank, posted, activity)``: ``posted[i]`` is about the i-th op of the question."""
ToldClock = Callable[[ClockSample | None], None]
"""Told how a peer's clock relates to this process's; None if that could not be found out."""


class ControlEvents(Protocol):
    """Receiver of the news (the session). All calls come where the engine runs."""

    def adopt(self, connection: Connection, rank: int, purpose: int) -> None:
        """``rank`` has opened a connection for data and proven who it is; the connection is the engine's now."""

    def on_abort(self, group: bytes, key: str, seq: int, cause: list[Any]) -> None:
        """A collective failed elsewhere; ``cause`` is as in `kfcomm.core.cause.Cause.to_wire`."""

    def on_peer_lost(self, rank: int, reason: str) -> None:
        """``rank`` is gone without a goodbye. This rank itself, if the others have given it up."""

    def on_ended(self, rank: int) -> None:
        """The process of ``rank``, which is lost, is known to be gone. May come more than once."""

    def on_agreement(self, rank: int, number: int, message: Message) -> None:
        """``rank`` says this in its agreement of that number; it has no fault."""

    def on_leaving(self, rank: int) -> None:
        """``rank`` has closed its communicator in good order and posts nothing more.

        It stays until it has been asked, so ask once: ``query(ops, rank, ...)`` with the pending collectives that
        it may have posted, or with none. What it has not posted it never will.
        """


class StatusSource(Protocol):
    """State of a rank, for the others. Called on another thread at any time; must not wait for the engine."""

    def is_posted(self, group: bytes, key: str, seq: int) -> bool:
        """Whether this rank has posted that collective, now or earlier."""

    def activity(self) -> str:
        """Latest activity of this rank, and when, in words: ``posted 'grad/7' 1.2 s ago``."""


class ControlPlane(Protocol):
    """The control plane of one rank. All methods may be called from any thread; none but `leave` waits for peers."""

    def abort(self, group: bytes, key: str, seq: int, cause: Sequence[Any]) -> None:
        """Tell every other rank that this collective has failed, and why."""

    def suspect(self, rank: int, reason: str) -> None:
        """A data link to ``rank`` broke without a goodbye: find out whether it lives, and declare it lost if not."""

    def declare_lost(self, rank: int, reason: str, *, has_ended: bool = False) -> None:
        """``rank`` is gone: ``on_peer_lost`` here and on every other rank, unless that is known or it has left.

        ``has_ended``: its process is known to be gone; ``on_ended`` follows, also if it was lost before.
        """

    def agree(self, number: int, message: Message) -> None:
        """Tell every other rank what this one says in its agreement of that number."""

    def query(self, ops: Sequence[CollectiveId], target: int, answer: Answer) -> None:
        """Ask ``target``, or all other ranks (-1), which of these collectives they have posted.

        ``answer`` is called at most once per rank, and never for a rank that is lost or does not reply within about
        half a minute. If ``target`` has left and does not reply for so long, it is gone: it has posted nothing then.
        """

    def compare_clocks(self, rank: int, told: ToldClock) -> None:
        """Find out how the clock of ``rank`` relates to this one's; ``told`` is called once, on the engine's loop.

        It may never be called once this rank's plane is stopped.
        """

    async def leave(self, timeout_s: float) -> None:
        """Say that this rank posts nothing more, and stay until its answers are not needed any more.

        That is so once every other rank has asked what it wants to know, is leaving too, or is lost. Returns after
        ``timeout_s`` in any case.
        """

    def needed_by(self) -> list[int]:
        """For which ranks one that leaves has to stay."""

    def linger(self) -> None:
        """The epoch is over, and all that were not given up are in the next one: from now on this is told, and no more.

        Who was given up, lives, and has not heard of it comes here for its peers. If nobody listened, it would take
        them for dead.
        """

    def stop(self, goodbye_s: float = GOODBYE_S) -> None:
        """End, without waiting for others to be done; the plane of a rank that did not `leave` is lost.

        ``goodbye_s``: how long to wait for peers to close their side of the links; one that is stopped never does.
        """
