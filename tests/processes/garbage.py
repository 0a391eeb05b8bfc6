"""Garbage connections, as a scanner, a broken peer or an attacker opens them to a listening port."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

from kfcomm.common.version import PROTOCOL_VERSION
from kfcomm.core.handshake import NONCE_NBYTES, PREFIX_NBYTES, Hello, Proof, Purpose, encode

AT_ONCE = 50


def knock(target: Mapping[str, Any], impostor: Mapping[str, Any], count: int, seed: int) -> None:
    """So many connections to ``target``; returns when each has been closed by it.

    Args:
        target: who listens (fields of a ``PeerInfo``).
        impostor: whom some of the connections claim to come from.
        count: number of connections.
        seed: of what is sent.
    """
    kinds = _rubbish(impostor, Random(seed))
    for start in range(0, count, AT_ONCE):
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(_connect(target, number)) for number in range(start, start + AT_ONCE)]
            for sock in opened:
                with contextlib.suppress(OSError):  # the other end may be quicker to hang up
                    sock.sendall(next(kinds))
                    sock.shutdown(socket.SHUT_WR)
            for sock in opened:
                with contextlib.suppress(ConnectionError):
                    while sock.recv(4096):
                        pass


def _connect(target: Mapping[str, Any], number: int) -> socket.socket:
    if number % 2 and target["unix"]:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect("\0" + target["unix"].lstrip("\0@"))
        return sock
    return socket.create_connection((target["address"], target["port"]))


def _rubbish(impostor: Mapping[str, Any], random: Random) -> Iterator[bytes]:
    nonce = bytes(NONCE_NBYTES)
    hello = encode(Hello(PROTOCOL_VERSION, 0, impostor["rank"], Purpose.DATA, nonce, impostor["uid"]))
    while True:
        yield random.randbytes(random.randrange(1, 2000))
        yield hello[: random.randrange(len(hello))]
        yield b"\xff" * PREFIX_NBYTES
        yield hello[:PREFIX_NBYTES] + b"\xc1" * (len(hello) - PREFIX_NBYTES)
        yield hello + encode(Proof(bytes(32)))
        yield b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
        yield b""
        yield hello[: PREFIX_NBYTES - 2] + b"\xff\xff" + hello[PREFIX_NBYTES:]
