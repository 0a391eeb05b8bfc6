"""A relay before an HTTP server that loses answers: a request is carried out, and then its connection is cut.

Not the connection of a watch in etcd, which is an answer that does not end, but for its beginning.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Container

_METHODS = (b"POST ", b"PUT ", b"GET ")


class CuttingRelay:
    """Made by `cutting`.

    Args:
        port: of the server, on the loopback.
        lost: the requests, counted from 1, whose answers are lost.

    Attributes:
        port: at which it listens, on the loopback.
        num_requests: that have come so far.
        num_lost: of their answers.
    """

    def __init__(self, port: int, lost: Container[int]) -> None:
        self._target = port
        self._lost = lost
        self._open: dict[asyncio.Future[None], list[asyncio.StreamWriter]] = {}
        self.port = 0
        self.num_requests = self.num_lost = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        over = asyncio.get_running_loop().create_future()
        ends = self._open[over] = [writer]
        try:
            with contextlib.suppress(OSError):
                answers, far = await asyncio.open_connection("127.0.0.1", self._target)
                ends.append(far)
                await self._relay(reader, far, answers, writer)
        finally:
            for one in ends:
                one.transport.abort()
            del self._open[over]
            over.set_result(None)

    async def _relay(
        self, reader: asyncio.StreamReader, far: asyncio.StreamWriter, answers: asyncio.StreamReader,
        near: asyncio.StreamWriter,
    ) -> None:  # fmt: skip
        is_doomed = False

        async def forward() -> None:
            nonlocal is_doomed
            while data := await reader.read(1 << 16):
                if data.startswith(_METHODS):
                    self.num_requests += 1
                    is_doomed = self.num_requests in self._lost
                far.write(data)

        async def back() -> None:
            while data := await answers.read(1 << 16):
                if is_doomed:
                    self.num_lost += 1
                    return
                near.write(data)

        tasks = [asyncio.ensure_future(forward()), asyncio.ensure_future(back())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Cut all."""
        for ends in self._open.values():
            for one in ends:
                one.transport.abort()
        while self._open:
            await asyncio.wait(list(self._open))


@contextlib.asynccontextmanager
async def cutting(port: int, lost: Container[int] = ()) -> AsyncIterator[CuttingRelay]:
    """A relay before a server of this host; the answers to these requests, counted from 1, are lost."""
    relay = CuttingRelay(port, lost)
    server = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
    relay.port = server.sockets[0].getsockname()[1]
    try:
        yield relay
    finally:
        server.close()
        await relay.close()
