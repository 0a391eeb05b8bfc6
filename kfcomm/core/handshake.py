"""Handshake that opens every connection, as two sans-IO machines: `Dialler` and `Answerer`.

::

    dialler                                        answerer
    HELLO(protocol, epoch, rank, uid,      ──▶     refuses another protocol or epoch, and peers that
          purpose, nonce)                          ``accept`` rejects
                                           ◀──     CHALLENGE(nonce, proof over the dialler's nonce)
    PROOF(proof over the answerer's nonce) ──▶
                                           ◀──     WELCOME()

Either side may send REFUSED(why) instead of its next message. A proof is an HMAC with the
job's token (see ``auth``) over the whole exchange: the side that proves, the epoch, the purpose, both ranks and uids,
both nonces. So the two ends agree on each of them, and no proof serves another connection, direction or end. Two keys
are derived from the same context for the frames after the handshake, one for each direction (see ``auth.Seal``).

Invariants:

- Each side speaks only when it is its turn, so no byte follows the handshake before both sides are done.
- Nothing that the other side sends raises: it becomes a `HandshakeStep` whose outcome is REFUSED or BROKEN.
- Messages out of turn, and any after the end, make the handshake BROKEN.
- Only a holder of the token can derive the keys, and no two connections have the same.

The caller supplies time, randomness (the nonces) and sockets.

Wire format: fixed fields, nothing nested, no msgpack before authentication::

    +--------+------+----------------+---------------------------+
    | "kfcm" | kind | body nbytes    | body                      |
    | 4      | 1    | uint16, little | fixed fields, then a text |
    +--------+------+----------------+---------------------------+

The sender is unauthenticated. So the length of each message is bounded before its body is read, decoding takes
microseconds whatever the bytes are, and a message with an illegible text is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import msgpack

from kfcomm.common.version import PROTOCOL_VERSION
from kfcomm.core.auth import proof, proven
from kfcomm.errors import LocalProtocolError, RemoteProtocolError

MAGIC = b"kfcm"
NONCE_NBYTES = 32
PROOF_NBYTES = 32
MAX_UID_NBYTES = 256
MAX_REASON_NBYTES = 1000
NUM_PURPOSES = 64

_PREFIX = struct.Struct("<4sBH")
PREFIX_NBYTES = _PREFIX.size
_HELLO = struct.Struct(f"<HQIB{NONCE_NBYTES}s")


class Purpose(IntEnum):
    """Purposes of connections that kfcomm itself opens; other transports take other numbers below `NUM_PURPOSES`."""

    DATA = 0
    CONTROL = 1
    SHARED_MEMORY = 2
    """Data that does not travel on the connection."""
    CLOCK = 3
    """Questions about the answerer's clock."""
    OBSERVER = 63
    """Questions of an observer on the dialler's host."""


class Hello(NamedTuple):
    """Identity and purpose of the dialler. Its claims are proven once the handshake is done, not before."""

    protocol: int
    epoch: int
    rank: int
    purpose: int
    nonce: bytes
    uid: str


class Challenge(NamedTuple):
    """A nonce of the answerer, and its proof over that of the dialler."""

    nonce: bytes
    proof: bytes


class Proof(NamedTuple):
    """The dialler's proof over the nonce of the answerer."""

    proof: bytes


class Welcome(NamedTuple):
    """The answerer accepts: frames follow."""


class Refused(NamedTuple):
    """One side rejects the other."""

    why: str


Message: TypeAlias = Hello | Challenge | Proof | Welcome | Refused

_KINDS: tuple[type[Message], ...] = (Hello, Challenge, Proof, Welcome, Refused)
"""Messages in the order of their numbers, which begin with 1."""

_LENGTHS = {
    1: range(_HELLO.size + 1, _HELLO.size + MAX_UID_NBYTES + 1),
    2: range(NONCE_NBYTES + PROOF_NBYTES, NONCE_NBYTES + PROOF_NBYTES + 1),
    3: range(PROOF_NBYTES, PROOF_NBYTES + 1),
    4: range(1),
    5: range(MAX_REASON_NBYTES + 1),
}
"""Lengths of the bodies in bytes, by kind."""


def encode(message: Message) -> bytes:
    """Return the bytes of a message; a reason that is too long is cut, any other field that is too long an error."""
    kind = _KINDS.index(type(message)) + 1
    try:
        body = _body(message)
    except struct.error as error:
        raise LocalProtocolError(f"a number in {message!r} does not fit: {error}") from error
    if len(body) not in _LENGTHS[kind]:
        raise LocalProtocolError(f"{name_of(message)} with a body of {len(body)} bytes")
    return _PREFIX.pack(MAGIC, kind, len(body)) + body


def _body(message: Message) -> bytes:
    match message:
        case Hello(protocol, epoch, rank, purpose, nonce, uid):
            return _HELLO.pack(protocol, epoch, rank, purpose, nonce) + uid.encode()
        case Challenge(nonce, proof):
            return nonce + proof
        case Proof(proof):
            return proof
        case Refused(why):
            return why.encode()[:MAX_REASON_NBYTES]
    return b""


def decode_prefix(data: bytes | bytearray) -> tuple[int, int]:
    """Return the kind and nbytes of the body that follows, from exactly `PREFIX_NBYTES` bytes."""
    # Checked before the body is read: an unauthenticated peer can make this rank wait for no more than a message.
    magic, kind, nbytes = _PREFIX.unpack(data)
    if magic != MAGIC:
        raise RemoteProtocolError("expected a kfcomm handshake, got other bytes")
    if nbytes not in _LENGTHS.get(kind, ()):
        raise RemoteProtocolError(f"a handshake has no message of kind {kind} with {nbytes} bytes")
    return kind, nbytes


def decode(kind: int, body: bytes | bytearray) -> Message:
    """Return the message of a kind and length that `decode_prefix` has accepted."""
    body = bytes(body)
    match kind:
        case 1:
            protocol, epoch, rank, purpose, nonce = _HELLO.unpack_from(body)
            if purpose >= NUM_PURPOSES:
                raise RemoteProtocolError(f"HELLO with purpose {purpose}, outside 0..{NUM_PURPOSES - 1}")
            return Hello(protocol, epoch, rank, purpose, nonce, _text(body[_HELLO.size :]))
        case 2:
            return Challenge(body[:NONCE_NBYTES], body[NONCE_NBYTES:])
        case 3:
            return Proof(body)
        case 4:
            return Welcome()
    return Refused(body.decode(errors="replace"))


def _text(data: bytes) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = ""
    if not text.isprintable() or not text:
        raise RemoteProtocolError("HELLO with a uid that is not printable text")
    return text


def name_of(message: Message) -> str:
    """Return its name in the protocol."""
    return type(message).__name__.upper()


MAX_REASON_CHARS = 500


class Outcome(Enum):
    """State of a handshake after a message."""

    GOES_ON = auto()
    DONE = auto()
    REFUSED = auto()
    """One side rejects the other: wrong epoch, rank, uid or token."""
    BROKEN = auto()
    """The other side broke the protocol."""


class Side(Enum):
    """The side that gives a proof."""

    DIALLER = "dialler"
    ANSWERER = "answerer"


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of one end of a connection: 32 bytes for the frames that leave, and 32 for those that arrive."""

    outgoing: bytes = field(repr=False)
    incoming: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Identity:
    """A process as its peers know it: its rank in the epoch, and its own stable uid."""

    rank: int
    uid: str


@dataclass(frozen=True, slots=True)
class HandshakeStep:
    """Reaction to a message: a reply to send first, if any, and the state of the handshake."""

    outcome: Outcome
    reply: Message | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Transcript:
    """Everything that the two sides must agree on."""

    epoch: int
    purpose: int
    dialler: Identity
    answerer: Identity
    dialler_nonce: bytes
    answerer_nonce: bytes

    def context(self, about: str) -> bytes:
        ends = [self.dialler.rank, self.dialler.uid, self.answerer.rank, self.answerer.uid]
        said = [about, PROTOCOL_VERSION, self.epoch, self.purpose, *ends]
        packed: bytes = msgpack.packb([*said, self.dialler_nonce, self.answerer_nonce])
        return packed

    def key(self, token: bytes, sender: Side) -> bytes:
        return proof(token, self.dialler_nonce + self.answerer_nonce, self.context(f"frames of the {sender.value}"))


_Expects = dict[type[Message], Callable[[Any], HandshakeStep]]


class _Machine:
    """Common part of both sides: the messages expected next, each with its handler; none once it is over."""

    def __init__(self, expects: _Expects) -> None:
        self._expects = expects
        self.keys: Keys | None = None  # for the frames that follow; known when done

    def receive(self, message: Message) -> HandshakeStep:
        """Return the reaction to a message of the other side."""
        handler = self._expects.get(type(message))
        self._expects = {}  # set again by the handler: after an error, no message is accepted
        if handler is None:
            return HandshakeStep(Outcome.BROKEN, reason=f"{name_of(message)} is out of place in this handshake")
        return handler(message)

    def _on_refused(self, message: Refused) -> HandshakeStep:
        return HandshakeStep(Outcome.REFUSED, reason=f"the other side refuses: {_legible(message.why)}")


class Dialler(_Machine):
    """Side that opened the connection: send ``hello``, then feed it what arrives. Only ``peer`` may answer."""

    def __init__(self, me: Identity, peer: Identity, *, purpose: int, epoch: int, token: bytes, nonce: bytes) -> None:
        super().__init__({Challenge: self._on_challenge, Refused: self._on_refused})
        self._me, self._peer = me, peer
        self._token = token
        self.hello = Hello(PROTOCOL_VERSION, epoch, me.rank, purpose, _checked(nonce), me.uid)

    def _on_challenge(self, challenge: Challenge) -> HandshakeStep:
        mine, theirs = self.hello.nonce, challenge.nonce
        said = _Transcript(self.hello.epoch, self.hello.purpose, self._me, self._peer, mine, theirs)
        token = proven(self._token, mine, said.context(Side.ANSWERER.value), challenge.proof)
        if token is None:
            return _refuse(f"who answers is not rank {self._peer.rank} (uid {self._peer.uid}), or has another token")
        keys = Keys(said.key(token, Side.DIALLER), said.key(token, Side.ANSWERER))
        self._expects = {Welcome: partial(self._on_welcome, keys), Refused: self._on_refused}
        return HandshakeStep(Outcome.GOES_ON, Proof(proof(token, theirs, said.context(Side.DIALLER.value))))

    def _on_welcome(self, keys: Keys, _: Welcome) -> HandshakeStep:
        self.keys = keys
        return HandshakeStep(Outcome.DONE)


class Answerer(_Machine):
    """Side that accepted the connection: it speaks second, and may reject a peer for what ``accept`` returns."""

    def __init__(
        self, me: Identity, *, accept: Callable[[Hello], str | None], epoch: int, token: bytes, nonce: bytes
    ) -> None:
        super().__init__({Hello: self._on_hello})
        self._me, self._accept = me, accept
        self._epoch, self._token, self._nonce = epoch, token, _checked(nonce)
        self.hello: Hello | None = None  # of the peer; None until it is proven

    def _on_hello(self, hello: Hello) -> HandshakeStep:
        if hello.protocol != PROTOCOL_VERSION:
            return _refuse(f"protocol {hello.protocol} is not spoken here, only {PROTOCOL_VERSION}")
        if hello.epoch != self._epoch:
            return _refuse(f"epoch {hello.epoch} is not the epoch here, {self._epoch}")
        # Asked before any proof, so it must change nothing: the hello may be anybody's.
        unwanted = self._accept(hello)
        if unwanted is not None:
            return _refuse(unwanted)
        dialler = Identity(hello.rank, hello.uid)
        said = _Transcript(hello.epoch, hello.purpose, dialler, self._me, hello.nonce, self._nonce)
        self._expects = {Proof: partial(self._on_proof, hello, said), Refused: self._on_refused}
        mine = proof(self._token, hello.nonce, said.context(Side.ANSWERER.value))
        return HandshakeStep(Outcome.GOES_ON, Challenge(self._nonce, mine))

    def _on_proof(self, hello: Hello, said: _Transcript, theirs: Proof) -> HandshakeStep:
        token = proven(self._token, self._nonce, said.context(Side.DIALLER.value), theirs.proof)
        if token is None:
            return _refuse(f"wrong token, or another process was dialled than rank {self._me.rank}")
        self.hello = hello
        self.keys = Keys(said.key(token, Side.ANSWERER), said.key(token, Side.DIALLER))
        return HandshakeStep(Outcome.DONE, Welcome())


def _checked(nonce: bytes) -> bytes:
    if len(nonce) != NONCE_NBYTES:
        raise LocalProtocolError(f"a nonce has {NONCE_NBYTES} bytes, not {len(nonce)}")
    return nonce


def _refuse(reason: str) -> HandshakeStep:
    return HandshakeStep(Outcome.REFUSED, Refused(reason[:MAX_REASON_CHARS]), reason)


def _legible(text: str) -> str:
    """Return an unauthenticated peer's text, fit for a log or a terminal."""
    return "".join(sign if sign.isprintable() else "?" for sign in text[:MAX_REASON_CHARS])
