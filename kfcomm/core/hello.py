"""Wire format of the handshake: fixed fields, nothing nested, no msgpack before authentication.

::

    +--------+------+----------------+---------------------------+
    | "kfcm" | kind | body nbytes    | body                      |
    | 4      | 1    | uint16, little | fixed fields, then a text |
    +--------+------+----------------+---------------------------+

The sender is unauthenticated. So the length of each message is bounded before its body is read, decoding takes
microseconds whatever the bytes are, and a message with an illegible text is refused.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple, TypeAlias

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
    """Return the bytes of a message. A reason that is too long is cut.

    Raises:
        LocalProtocolError: a field does not fit.
    """
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
    """Return the kind and nbytes of the body that follows, from exactly `PREFIX_NBYTES` bytes.

    Raises:
        RemoteProtocolError: not the beginning of a handshake message.
    """
    magic, kind, nbytes = _PREFIX.unpack(data)
    if magic != MAGIC:
        raise RemoteProtocolError("expected a kfcomm handshake, got other bytes")
    if nbytes not in _LENGTHS.get(kind, ()):
        raise RemoteProtocolError(f"a handshake has no message of kind {kind} with {nbytes} bytes")
    return kind, nbytes


def decode(kind: int, body: bytes | bytearray) -> Message:
    """Return the message of a kind and length that `decode_prefix` has accepted.

    Raises:
        RemoteProtocolError: a field is out of range.
    """
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
