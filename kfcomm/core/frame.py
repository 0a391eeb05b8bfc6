"""Frames between peers: a fixed prefix, a msgpack header, a raw payload.

::

    +----------------+-----------------+---------------------+------------------+
    | header nbytes  | payload nbytes  | header              | payload          |
    | uint32, little | uint32, little  | msgpack array       | raw bytes        |
    +----------------+-----------------+---------------------+------------------+

This module codes prefixes and headers only; payloads bypass it. A header is an array: first the kind, then fields of
the types in ``SCHEMA``. The header of a CHUNK, by far the most frequent frame, is packed as ``CHUNK_HEADER``; no
msgpack array begins with its kind. Nothing that arrives is trusted: lengths are bounded before anything is allocated,
and a header that does not fit its row of the schema is refused with ``RemoteProtocolError``. Names travel once per
link: ``KEY`` and ``SIGNATURE`` give them small integers, which later frames use.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import msgpack

from kfcomm.errors import LocalProtocolError, RemoteProtocolError

PREFIX = struct.Struct("<II")
PREFIX_NBYTES = PREFIX.size
CHUNK_HEADER = struct.Struct("<BIQIIBII")
"""Packed or unpacked in 0.1 µs; as msgpack, with a look at each field, it takes 0.3 and 0.7."""
CHUNK_FRAME = struct.Struct(PREFIX.format + CHUNK_HEADER.format[1:])
"""The prefix and the header of a CHUNK."""
MAX_HEADER_NBYTES = 1 << 16
MAX_PAYLOAD_NBYTES = 1 << 26
MAX_ID = 1 << 20
"""Keys and signatures are numbered below this; the numbers are used again after that many."""


class Kind(IntEnum):
    """Kinds of frames: below 16 on data links, from 16 on control links. For handshakes see ``handshake``."""

    CHUNK = 1
    ASK = 2
    KEY = 3
    SIGNATURE = 4
    POSTED = 5
    CREDIT = 6
    BYE = 7
    OPEN = 8
    SLOT = 9
    NO_SLOT = 10
    LEFT = 11
    VACANT = 12
    GOSSIP = 16
    PING = 17
    PONG = 18


SCHEMA: dict[int, tuple[type, ...]] = {
    Kind.CHUNK: (int, int, int, int, int, int, int),  # key id, seq, signature id, lane, phase, index, stamp
    Kind.ASK: (int, int, int, int),  # key id, seq, signature id, generation: tell me when this is posted
    Kind.KEY: (int, bytes, str, int),  # key id, group id, name, uses below this one may be lost: see core.links
    Kind.SIGNATURE: (int, list),  # signature id, fields
    Kind.POSTED: (int, int),  # key id of the receiver of this frame, seq
    Kind.CREDIT: (int, int),  # payload bytes and headers given back
    Kind.BYE: (),  # nothing follows on this link
    Kind.OPEN: (int,),  # number of this link among those from its sender; comes first
    Kind.SLOT: (int, int, int, int, int),  # key id, signature id, use after which it holds, number, place
    Kind.NO_SLOT: (int, int, int),  # key id, signature id, use from which on there is none
    Kind.LEFT: (bytes,),  # group id: this rank has left it, and nothing follows for it on this link
    Kind.VACANT: (int,),  # number of a slot in the memory of the sender of this frame: free again
    Kind.GOSSIP: (int, int, list),  # origin, number, message: see core.gossip
    Kind.PING: (),  # are you there?
    Kind.PONG: (),  # yes
}
"""The fields after the kind, by type. Integers are never negative. For the stamp see ``core.collective.Collective``."""

_LENGTHS_OF_INTEGERS = {int(kind): 1 + len(types) for kind, types in SCHEMA.items() if types and set(types) == {int}}
"""Rows of integers alone, as hot frames have them, are checked by length: 0.4 µs instead of 0.75."""

MAX_FIELD_NBYTES = 1 << 12
"""Longest name or reason."""

MAX_ARRAY_LENGTH = 1 << 10
"""Longest array in a header: so a header of nested arrays takes 8 MiB at most."""

NUMBERS_END = 1 << 63
"""Bound of the numbers of keys, links, uses and the like."""

Header = tuple[Any, ...] | list[Any]


_CHUNK = int(Kind.CHUNK)


def make_encoder() -> Callable[..., bytes]:
    """Return an encoder of frame heads: ``encode(header, payload_nbytes=0) -> bytes`` (prefix and header)."""
    # A packer each: threads must not share one. A call takes 0.5 µs, for a CHUNK 0.3 µs by a fixed struct.
    pack_header = msgpack.Packer(autoreset=True).pack
    pack_prefix = PREFIX.pack
    pack_chunk, chunk_nbytes = CHUNK_FRAME.pack, CHUNK_HEADER.size

    def encode(header: Sequence[Any], payload_nbytes: int = 0) -> bytes:
        if header[0] == _CHUNK and payload_nbytes <= MAX_PAYLOAD_NBYTES:
            try:
                return pack_chunk(chunk_nbytes, payload_nbytes, *header)
            except struct.error:
                pass  # a number that is larger than any in use: msgpack has room for it
        packed: bytes = pack_header(header)
        if len(packed) > MAX_HEADER_NBYTES or payload_nbytes > MAX_PAYLOAD_NBYTES:
            raise LocalProtocolError(f"frame too large: header {len(packed)} bytes, payload {payload_nbytes} bytes")
        return pack_prefix(len(packed), payload_nbytes) + packed

    return encode


def decode_head(data: memoryview, start: int, end: int) -> tuple[Header, int, int] | None:
    """Return header, payload nbytes and payload offset of the frame at ``start``; None if its head is incomplete."""
    # Nearly all frames are CHUNKs, which take 0.3 µs this way.
    if end - start >= CHUNK_FRAME.size:
        fields = CHUNK_FRAME.unpack_from(data, start)
        if fields[2] == _CHUNK and fields[0] == CHUNK_HEADER.size and fields[1] <= MAX_PAYLOAD_NBYTES:
            return fields[2:], fields[1], start + CHUNK_FRAME.size
    elif end - start < PREFIX_NBYTES:
        return None
    header_nbytes, payload_nbytes = decode_prefix(data, start)
    body = start + PREFIX_NBYTES + header_nbytes
    if body > end:
        return None
    return decode_header(data[start + PREFIX_NBYTES : body]), payload_nbytes, body


def decode_prefix(data: bytes | bytearray | memoryview, offset: int = 0) -> tuple[int, int]:
    """Return ``(header nbytes, payload nbytes)``, both within bounds, from the 8 bytes at ``offset``."""
    header_nbytes, payload_nbytes = PREFIX.unpack_from(data, offset)
    if not 0 < header_nbytes <= MAX_HEADER_NBYTES:
        raise RemoteProtocolError(f"header of {header_nbytes} bytes (1 to {MAX_HEADER_NBYTES} are allowed)")
    if payload_nbytes > MAX_PAYLOAD_NBYTES:
        raise RemoteProtocolError(f"payload of {payload_nbytes} bytes (at most {MAX_PAYLOAD_NBYTES} are allowed)")
    return header_nbytes, payload_nbytes


def decode_header(data: bytes | bytearray | memoryview) -> Header:
    """Return the header in exactly these bytes, checked against its row of ``SCHEMA``; else a RemoteProtocolError."""
    if len(data) == CHUNK_HEADER.size and data[0] == _CHUNK:
        return CHUNK_HEADER.unpack(data)
    try:
        header = msgpack.unpackb(
            data, max_str_len=MAX_FIELD_NBYTES, max_bin_len=MAX_FIELD_NBYTES, max_array_len=MAX_ARRAY_LENGTH,
            max_map_len=0, max_ext_len=0,
        )  # fmt: skip
    except Exception as error:  # msgpack raises many types, also plain ValueError and RecursionError
        raise RemoteProtocolError(f"header is not msgpack: {type(error).__name__}") from error
    if type(header) is not list or not header or type(header[0]) is not int:
        raise RemoteProtocolError("header is not an array that begins with its kind")
    # Of integers alone, as nearly all are: its length says whether it fits.
    for field in header:
        if type(field) is not int or not 0 <= field < NUMBERS_END:
            return _checked(header)
    return header if len(header) == _LENGTHS_OF_INTEGERS.get(header[0]) else _checked(header)


def _checked(header: list[Any]) -> Header:
    types = SCHEMA.get(header[0])
    if types is None:
        raise RemoteProtocolError(f"unknown frame kind {header[0]}")
    if len(header) != len(types) + 1:
        raise RemoteProtocolError(f"{Kind(header[0]).name} has {len(header) - 1} fields, not {len(types)}")
    for position, kind in enumerate(types, 1):
        field = header[position]
        if type(field) is not kind or (type(field) is int and not 0 <= field < NUMBERS_END):
            raise RemoteProtocolError(f"{Kind(header[0]).name} field {position} is not a valid {kind.__name__}")
    return header
