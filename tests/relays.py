"""A relay between two ranks that changes, repeats or forges what passes it.

It leaves nothing out: for what never comes there are time limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from kfcomm.transports.sockets import connect

Harm = Callable[[bytes, Random], bytes]


def flipped(data: bytes, random: Random) -> bytes:
    """One bit is another."""
    changed = bytearray(data)
    changed[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(changed)


def repeated(data: bytes, random: Random) -> bytes:
    """A part comes twice."""
    start = random.randrange(len(data))
    return data + data[start:]


def forged(data: bytes, random: Random) -> bytes:
    """Forged frames are put in: a goodbye, and a report of a lost rank."""
    frames = (b"\x02\0\0\0\0\0\0\0\x91\x07", b"\x09\0\0\0\0\0\0\0\x94\x10\x00\x09\x93\x02\x01\xa0")
    return random.choice(frames) * 20 + data


HARMS: tuple[Harm, ...] = (flipped, repeated, forged)


@dataclass
class Relay:
    """Stands in every TCP connection that is opened while it is there.

    Attributes:
        harms: what is done to what passes; chosen by chance.
        every: about one in so many parts is harmed.
        spared: so many bytes pass first, in each direction: handshakes, which are tried again after growing pauses.
        done: how often something was.
    """

    random: Random
    harms: tuple[Harm, ...] = HARMS
    every: int = 20
    spared: int = 200
    done: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def connect(self, address: object) -> socket.socket:
        """As ``sockets.connect``, but through this relay."""
        far = await connect(address)  # type: ignore[arg-type]
        if far.family == socket.AF_UNIX:
            return far
        ours, near = tcp_pair()
        for one, other in ((near, far), (far, near)):
            task = asyncio.get_running_loop().create_task(self._pass_on(one, other))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return ours

    async def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        passed = 0
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(source, 1 << 15):
                if passed >= self.spared and self.random.randrange(self.every) == 0:
                    data = self.random.choice(self.harms)(data, self.random)
                    self.done += 1
                passed += len(data)
                await loop.sock_sendall(target, data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        source.close()

    async def close(self) -> None:
        """Cut all."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected non-blocking TCP sockets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    for sock in (one, other):
        sock.setblocking(False)
    return one, other
