"""Control plane as its users see it: news of failures and leaving peers, and answers about posted collectives.

An engine moves data and holds a `ControlPlane`. The plane reports news to the engine by `ControlEvents`, and asks
`StatusSource` on behalf of the peers. None of this ever waits for an engine: a rank that computes for minutes still
answers, so that it is not taken for dead.

Invariants, for the engine on each rank:

- Each abort is heard at most once, and exactly once by every surviving rank; never by the rank that sent it.
- A rank is reported as lost at most once, and never after it was reported as leaving.
- All `ControlEvents`, and the answers to questions, are delivered where the engine runs, in the order of their
  arrival.

The offset between the clocks of two processes is measured as by NTP. The asking side notes when it asked and when the
answer came; the answering side sends the times at which it got the question and answered. Of several rounds the one
with the shortest round trip counts: half of the round trip bounds the error, however it is divided between the two
directions (RFC 5905, section 8).

A question is one byte, an answer two signed 64-bit numbers of nanoseconds, little-endian. They travel on a connection
of their own, after the handshake of every connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import struct
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kfcomm.core.gossip import CollectiveId
from kfcomm.core.handshake import Hello, Identity, Purpose
from kfcomm.core.membership import Message
from kfcomm.errors import RemoteProtocolError
from kfcomm.transports.handshake import HANDSHAKE_TIMEOUT_S, HandshakeOptions, dial
from kfcomm.transports.reactor import Reactor
from kfcomm.transports.sockets import Address, Connection, StreamSocket, receive_exactly, send_all, told_as_lost

if TYPE_CHECKING:
    from kfcomm.rendezvous.identity import PeerInfo
    from kfcomm.transports.tls import Tls

ROUNDS = 16
MAX_ROUNDS = 256
"""An asker that goes on for longer is hung up on."""
QUESTION = b"?"
_ANSWER = struct.Struct("<qq")

ClockReader = Callable[[], int]
"""Returns nanoseconds of a clock that never goes back."""


class ClockSample(NamedTuple):
    """Relation of a peer's clock to this process's at one moment."""

    at_ns: int  # by this process's clock
    offset_ns: int  # the peer's clock less this one's
    round_trip_ns: int  # between question and answer

    @property
    def uncertainty_ns(self) -> int:
        """Bound of the error of the offset: half of the round trip."""
        return (self.round_trip_ns + 1) // 2


def sample_of(asked_ns: int, heard_ns: int, answered_ns: int, got_ns: int) -> ClockSample:
    """Evaluate one round: asked and got by this clock, heard and answered by the peer's.

    Raises:
        RemoteProtocolError: the peer took more time for its answer than there was.
    """
    round_trip_ns = (got_ns - asked_ns) - (answered_ns - heard_ns)
    if round_trip_ns < 0 or answered_ns < heard_ns:
        raise RemoteProtocolError("a clock answered with times that cannot be")
    offset_ns = ((heard_ns - asked_ns) + (answered_ns - got_ns)) // 2
    return ClockSample((asked_ns + got_ns) // 2, offset_ns, round_trip_ns)


async def measure_clock(
    sock: StreamSocket, *, clock: ClockReader = time.monotonic_ns, rounds: int = ROUNDS
) -> ClockSample:
    """Return the best of several rounds on a non-blocking connection to `answer_clock`. Costs ``rounds`` round trips.

    Raises:
        TransportError: the connection broke.
        RemoteProtocolError: the answers make no sense.
    """
    samples = [await _ask(sock, clock) for _ in range(rounds)]
    return min(samples, key=lambda sample: sample.round_trip_ns)


async def _ask(sock: StreamSocket, clock: ClockReader) -> ClockSample:
    with told_as_lost("while clocks were compared"):
        asked_ns = clock()
        await send_all(sock, QUESTION)
        answer = await receive_exactly(sock, _ANSWER.size)
        got_ns = clock()
    heard_ns, answered_ns = _ANSWER.unpack(answer)
    return sample_of(asked_ns, heard_ns, answered_ns, got_ns)


async def answer_clock(
    sock: StreamSocket, *, clock: ClockReader = time.monotonic_ns, timeout_s: float | None = None
) -> None:
    """Answer until the asker hangs up or the time is over, then close. Never raises for what the asker does."""
    with contextlib.closing(sock), contextlib.suppress(OSError, EOFError):  # TimeoutError is an OSError
        async with asyncio.timeout(timeout_s):
            for _ in range(MAX_ROUNDS):
                question = await receive_exactly(sock, 1)
                heard_ns = clock()
                if question != QUESTION:
                    return
                await send_all(sock, _ANSWER.pack(heard_ns, clock()))


def addresses_of(peer: PeerInfo, *, seen_from: PeerInfo) -> tuple[Address, ...]:
    """Addresses of a peer, as another process reaches it: by its Unix socket too if both are on one host."""
    tcp: Address = (peer.address, peer.port)
    if peer.unix is None or peer.host != seen_from.host:
        return (tcp,)
    return ("@" + peer.unix.lstrip("\0@"), tcp)


class World(NamedTuple):
    """Members of a world, and what they share."""

    rank: int
    peers: Sequence[PeerInfo]  # by rank, this one included
    token: bytes  # secret of the job
    epoch: int
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S  # on either side
    lost_after_s: float = math.inf  # a peer silent for so long is lost; infinite for never
    launcher_word_s: float = 0.0  # bound for the launcher's report of how a process ended
    tls: Tls | None = None  # of TCP connections
    # called now and then, to prove to others (the launcher) that this process runs
    show_life: Callable[[], None] | None = None

    def identity(self, rank: int) -> Identity:
        """Identity that ``rank`` has to prove."""
        return Identity(rank, self.peers[rank].uid)

    async def dial(self, rank: int, addresses: Sequence[Address], purpose: int, timeout_s: float) -> Connection:
        """A connection to ``rank`` on which both sides have proven who they are.

        Raises:
            DialRefused: see `kfcomm.transports.handshake.dial`.
        """
        return await dial(addresses, self.identity(rank), purpose, self.handshake(timeout_s))

    def handshake(self, timeout_s: float) -> HandshakeOptions:
        """Handshakes of this rank."""
        return HandshakeOptions(self.identity(self.rank), self.epoch, self.token, timeout_s, self.tls)

    async def reach(self, rank: int, purpose: Purpose = Purpose.CONTROL) -> Connection:
        """A connection to ``rank`` for its control thread, as `dial` makes it."""
        addresses = addresses_of(self.peers[rank], seen_from=self.peers[self.rank])
        return await self.dial(rank, addresses, purpose, self.handshake_timeout_s)

    def objection(self, hello: Hello) -> str | None:
        """Reason to refuse this dialler, or None."""
        if not 0 <= hello.rank < len(self.peers) or hello.rank == self.rank:
            return f"rank {hello.rank} is not a peer of rank {self.rank} in a world of {len(self.peers)}"
        if hello.uid != self.peers[hello.rank].uid:
            return f"rank {hello.rank} is another process"
        return None


GOODBYE_S = 2.0
"""How long a closing rank waits for peers to close their side, too."""

GONE = "gone before it has answered"
"""What a rank does that has left, and does not reply."""

Answer = Callable[[int, list[bool], str], None]
"""``answer(rank, posted, activity)``: ``posted[i]`` is about the i-th op of the question."""
ToldClock = Callable[[ClockSample | None], None]
"""Told how a peer's clock relates to this process's; None if that could not be found out."""
ToldAnswer = Callable[[bytes | None], None]
"""Told a rank's answer to an observer: empty if none came, None if the rank is gone."""


class ControlEvents(Protocol):
    """Receiver of the news (the session). All calls come where the engine runs."""

    def adopt(self, connection: Connection, rank: int, purpose: int) -> None:
        """``rank`` has opened an authenticated data connection, which the engine owns from now on."""

    def on_abort(self, group: bytes, key: str, seq: int, cause: list[Any]) -> None:
        """A collective failed elsewhere; ``cause`` is as in `kfcomm.core.cause.Cause.to_wire`."""

    def on_peer_lost(self, rank: int, reason: str) -> None:
        """``rank`` is gone without a goodbye; this rank itself, if the others have given it up."""

    def on_ended(self, rank: int) -> None:
        """The process of ``rank``, which is lost, is known to be gone. May come more than once."""

    def on_agreement(self, rank: int, number: int, message: Message) -> None:
        """``rank`` says this in its agreement of that number, in good order."""

    def on_leaving(self, rank: int) -> None:
        """``rank`` has closed its communicator in good order and posts nothing more.

        It stays until it has been asked, so ask once: ``query(ops, rank, ...)`` with the pending collectives that
        it may have posted, or with none. What it has not posted it never will.
        """


class StatusSource(Protocol):
    """State of a rank, for the others. Called on the control thread at any time; must not wait for the engine."""

    def is_posted(self, group: bytes, key: str, seq: int) -> bool:
        """Whether this rank has posted that collective, now or earlier."""

    def activity(self) -> str:
        """Latest activity of this rank, and when, in words: ``posted 'grad/7' 1.2 s ago``."""

    def answer_observer(self, question: bytes) -> bytes:
        """Answer of this rank to an observer on another host; called on a thread of its own."""


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

    def observe(self, rank: int, question: bytes, told: ToldAnswer) -> None:
        """Ask ``rank`` for an observer (``answer_observer`` there); ``told`` is called once, on any thread.

        Within some seconds, or never once this rank's plane is stopped.
        """

    async def leave(self, timeout_s: float) -> None:
        """Announce that this rank posts nothing more, and stay until its answers are not needed any more.

        That is so once every other rank has asked what it wants to know, is leaving too, or is lost. Returns after
        ``timeout_s`` in any case.
        """

    def needed_by(self) -> list[int]:
        """Ranks that still need a leaving rank."""

    def linger(self) -> None:
        """Answer, from now on, only that the epoch is over and that every surviving rank is in the next one.

        A live rank that was given up, and does not know it, looks here for its peers. Without an answer it would take
        them for dead.
        """

    def stop(self, goodbye_s: float = GOODBYE_S) -> None:
        """End, without waiting for other ranks; the plane of a rank that did not `leave` counts as lost.

        ``goodbye_s``: bound of the wait for peers to close their side of the links; a stopped (SIGSTOP) peer never
        does.
        """


_LOG = logging.getLogger("kfcomm.control")


class Upcalls:
    """Calls ``events`` where the engine runs; all methods may be called from any thread, and none raises.

    A connection on its way to the engine has an owner at every moment; if the engine never takes it, it is closed.
    """

    def __init__(self, reactor: Reactor, events: ControlEvents) -> None:
        self.events = events
        self._reactor = reactor
        self._closed = False
        self._offered: dict[Connection, tuple[int, int]] = {}

    def adopt(self, connection: Connection, rank: int, purpose: int) -> None:
        """Hand a data connection over; it is closed if it is not taken."""
        self._offered[connection] = (rank, purpose)
        if not self.post(self._take, connection):
            self._close_offered()

    def report(self, message: str, error: BaseException | None) -> None:
        """A defect: it is logged, and the engine hears of it as of an error in a callback of its own."""
        _LOG.error("%s", message, exc_info=error)
        self.post(self._reactor.call_exception_handler, {"message": message, "exception": error})

    def post(self, callback: Callable[..., object], *arguments: object) -> bool:
        """Call back where the engine runs; return False if it runs no more, or after ``silence``."""
        if self._closed:
            return False
        try:
            self._reactor.call_soon_threadsafe(self._call, callback, arguments)
        except RuntimeError:  # it is closed: the engine is gone and has nothing more to hear
            return False
        return True

    def close(self) -> None:
        """Stop calling, and close connections that the engine has not taken yet."""
        self._closed = True
        self._close_offered()

    def _call(self, callback: Callable[..., object], arguments: tuple[object, ...]) -> None:
        if not self._closed:
            callback(*arguments)

    def _take(self, connection: Connection) -> None:
        offered = self._offered.pop(connection, None)
        if offered is not None:
            self.events.adopt(connection, *offered)

    def _close_offered(self) -> None:
        for connection in list(self._offered):
            if self._offered.pop(connection, None) is not None:  # else the engine took it just now
                connection.close()
