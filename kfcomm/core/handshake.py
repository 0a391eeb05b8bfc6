"""The handshake that opens every connection, as two machines without I/O: `Dialler` and `Answerer`.

::

    dialler                                        answerer
    HELLO(protocol, epoch, rank, uid,      ──▶     refuses another protocol or epoch, and whom ``accept``
          purpose, nonce)                          does not want
                                           ◀──     CHALLENGE(nonce, proof over the dialler's nonce)
    PROOF(proof over the answerer's nonce) ──▶
                                           ◀──     WELCOME(credit: bytes, headers)

Either side may say REFUSED(why) instead of its next message. A proof is an HMAC with the job's token (see
``auth``). Its context is all that was said: who proves, the epoch, the purpose, both ranks and uids, both nonces. So
the two ends agree on each of them, and no proof serves another connection, direction or end.

Invariants:

- Each side speaks only when it is its turn, so no byte follows the handshake before both sides are done.
- What the other side says is never raised: it becomes a `Step` whose outcome is REFUSED or BROKEN.
- Messages out of turn, and any after the end, make the handshake BROKEN.

Time, randomness (the nonces) and sockets are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from functools import partial

import msgpack

from kfcomm.core.auth import proof, proven
from kfcomm.core.frame import PROTOCOL_VERSION, Header, Kind
from kfcomm.errors import LocalProtocolError

NONCE_NBYTES = 32
MAX_UID_NBYTES = 256
MAX_REASON_CHARS = 500
MAX_HEADER_NBYTES = 1 << 12
"""No header of a handshake is longer; a stranger makes nobody hold more than this."""


class Purpose(IntEnum):
    """What a connection is for."""

    DATA = 0
    CONTROL = 1
    SHARED_MEMORY = 2
    """Data that does not travel on the connection."""
    CLOCK = 3
    """Questions about the answerer's clock."""


class Outcome(Enum):
    """How a handshake stands after a message."""

    GOES_ON = auto()
    DONE = auto()
    REFUSED = auto()
    """One side does not want the other: wrong epoch, rank, uid or token."""
    BROKEN = auto()
    """The other side does not follow the protocol."""


class Side(Enum):
    """Who gives a proof."""

    DIALLER = "dialler"
    ANSWERER = "answerer"


@dataclass(frozen=True, slots=True)
class Identity:
    """A process as its peers know it: its rank in the epoch, and its own stable uid."""

    rank: int
    uid: str


@dataclass(frozen=True, slots=True)
class Hello:
    """Who wants in, and what for. Its claims are proven once the handshake is done, not before."""

    epoch: int
    rank: int
    uid: str
    purpose: Purpose


@dataclass(frozen=True, slots=True)
class Step:
    """What follows from a message: a frame to send first, if any, and how the handshake stands."""

    outcome: Outcome
    reply: Header | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Transcript:
    """Everything the two sides must agree on."""

    epoch: int
    purpose: int
    dialler: Identity
    answerer: Identity
    dialler_nonce: bytes
    answerer_nonce: bytes

    def context(self, prover: Side) -> bytes:
        ends = [self.dialler.rank, self.dialler.uid, self.answerer.rank, self.answerer.uid]
        said = [prover.value, PROTOCOL_VERSION, self.epoch, self.purpose, *ends]
        packed: bytes = msgpack.packb([*said, self.dialler_nonce, self.answerer_nonce])
        return packed


_Expects = dict[int, Callable[[Header], Step]]


class _Machine:
    """What both sides share: the messages expected next, each with its handler; none once it is over."""

    def __init__(self, expects: _Expects) -> None:
        self._expects = expects

    def receive(self, header: Header) -> Step:
        """What follows from a message of the other side."""
        handler = self._expects.get(header[0])
        self._expects = {}
        if handler is None:
            return Step(Outcome.BROKEN, reason=f"{Kind(header[0]).name} is out of place in this handshake")
        return handler(header)

    def _on_refused(self, header: Header) -> Step:
        return Step(Outcome.REFUSED, reason=f"the other side refuses: {_legible(header[1])}")


class Dialler(_Machine):
    """The side that opened the connection. Send ``hello``, then feed it what arrives.

    Args:
        me: who dials.
        peer: who is meant to answer; a process that cannot prove to be it is turned down.
        purpose: what the connection is for.
        epoch: the epoch both must be in.
        token: secret of the job.
        nonce: 32 random bytes, used once.

    Attributes:
        hello: the first message.
        credit: payload bytes and headers that the answerer grants; known when done.
    """

    def __init__(
        self, me: Identity, peer: Identity, *, purpose: Purpose, epoch: int, token: bytes, nonce: bytes
    ) -> None:
        super().__init__({Kind.CHALLENGE: self._on_challenge, Kind.REFUSED: self._on_refused})
        self._me, self._peer = me, peer
        self._purpose, self._epoch = purpose, epoch
        self._token, self._nonce = token, _checked(nonce)
        self.hello: Header = (int(Kind.HELLO), PROTOCOL_VERSION, epoch, me.rank, me.uid, int(purpose), nonce)
        self.credit = (0, 0)

    def _on_challenge(self, header: Header) -> Step:
        _, nonce, their_proof = header
        if len(nonce) != NONCE_NBYTES:
            return Step(Outcome.BROKEN, reason=f"CHALLENGE with a nonce of {len(nonce)} bytes")
        said = _Transcript(self._epoch, self._purpose, self._me, self._peer, self._nonce, nonce)
        token = proven(self._token, self._nonce, said.context(Side.ANSWERER), their_proof)
        if token is None:
            return _refuse(f"who answers is not rank {self._peer.rank} (uid {self._peer.uid}), or has another token")
        self._expects = {Kind.WELCOME: self._on_welcome, Kind.REFUSED: self._on_refused}
        return Step(Outcome.GOES_ON, (int(Kind.PROOF), proof(token, nonce, said.context(Side.DIALLER))))

    def _on_welcome(self, header: Header) -> Step:
        self.credit = (header[1], header[2])
        return Step(Outcome.DONE)


class Answerer(_Machine):
    """The side that accepted the connection: it speaks second, and lets in only whom it wants.

    Args:
        me: who answers.
        accept: why the peer of this ``Hello`` is not wanted, or None. It is asked before any proof, so it must
            change nothing.
        epoch: the epoch both must be in.
        token: secret of the job.
        nonce: 32 random bytes, used once.
        credit: payload bytes and headers granted to the dialler.

    Attributes:
        hello: who dialled; None until it is proven.
    """

    def __init__(
        self,
        me: Identity,
        *,
        accept: Callable[[Hello], str | None],
        epoch: int,
        token: bytes,
        nonce: bytes,
        credit: tuple[int, int],
    ) -> None:
        super().__init__({Kind.HELLO: self._on_hello})
        self._me, self._accept = me, accept
        self._epoch, self._credit = epoch, credit
        self._token, self._nonce = token, _checked(nonce)
        self.hello: Hello | None = None

    def _on_hello(self, header: Header) -> Step:
        _, protocol, epoch, rank, uid, purpose, nonce = header
        if protocol != PROTOCOL_VERSION:
            return _refuse(f"protocol {protocol} is not spoken here, only {PROTOCOL_VERSION}")
        if len(nonce) != NONCE_NBYTES or len(uid.encode()) > MAX_UID_NBYTES or purpose not in set(Purpose):
            return Step(Outcome.BROKEN, reason="HELLO with a nonce, uid or purpose that cannot be")
        if epoch != self._epoch:
            return _refuse(f"epoch {epoch} is not the epoch here, {self._epoch}")
        hello = Hello(epoch, rank, uid, Purpose(purpose))
        unwanted = self._accept(hello)
        if unwanted is not None:
            return _refuse(unwanted)
        said = _Transcript(epoch, purpose, Identity(rank, uid), self._me, nonce, self._nonce)
        self._expects = {Kind.PROOF: partial(self._on_proof, hello, said), Kind.REFUSED: self._on_refused}
        mine = proof(self._token, nonce, said.context(Side.ANSWERER))
        return Step(Outcome.GOES_ON, (int(Kind.CHALLENGE), self._nonce, mine))

    def _on_proof(self, hello: Hello, said: _Transcript, header: Header) -> Step:
        if proven(self._token, self._nonce, said.context(Side.DIALLER), header[1]) is None:
            return _refuse(f"wrong token, or another process was dialled than rank {self._me.rank}")
        self.hello = hello
        return Step(Outcome.DONE, (int(Kind.WELCOME), *self._credit))


def _checked(nonce: bytes) -> bytes:
    if len(nonce) != NONCE_NBYTES:
        raise LocalProtocolError(f"a nonce has {NONCE_NBYTES} bytes, not {len(nonce)}")
    return nonce


def _refuse(reason: str) -> Step:
    return Step(Outcome.REFUSED, (int(Kind.REFUSED), reason[:MAX_REASON_CHARS]), reason)


def _legible(text: str) -> str:
    """A stranger's text, fit for a log or a terminal."""
    return "".join(sign if sign.isprintable() else "?" for sign in text[:MAX_REASON_CHARS])
