"""Web server of the dashboard: the page, and the messages of a `JobObserver` as server-sent events. Read-only.

On loopback it answers requests to loopback names alone, so that no page from elsewhere can read it by a name of its own
(DNS rebinding). At any other address a token, made at the start, is the beginning of every path.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from kfcomm.common.sockets import why_failed
from kfcomm.errors import ConfigError
from kfcomm.monitor.dashboard.watching import JobObserver

STATIC = Path(__file__).parent / "static"
PORT = 29650
"""Tried first where no port is given."""
LAST_MESSAGES_S = 1.0
"""For readers to get the last messages at the end."""
RECONNECT_MS = 500
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",  # the token is part of the address
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Address:
    """Address to listen at: ``port`` 0 means any that is free, None `PORT`, or any that is free if it is taken."""

    host: str = "127.0.0.1"
    port: int | None = None

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach it."""
        return is_loopback(self.host)

    def listen(self) -> socket.socket:
        """Open the listening socket.

        Raises:
            ConfigError: the port is in use, or the address is not one of this host.
        """
        if self.port is None:
            with contextlib.suppress(ConfigError):
                return Address(self.host, PORT).listen()
            return Address(self.host, 0).listen()
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            return socket.create_server(found[0][4][:2], family=found[0][0])
        except OSError as error:
            hint = "; choose another with --port, or 0 for any that is free" if self.port else ""
            where = f"{self.host}:{self.port}"
            raise ConfigError(f"the dashboard cannot listen at {where}: {why_failed(error)}{hint}") from error


def is_loopback(host: str) -> bool:
    """Whether a name or address is a loopback one."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@contextlib.asynccontextmanager
async def served(observer: JobObserver, address: Address) -> AsyncIterator[str]:
    """Serve what an observer publishes, and run it; yields the URL. At the end readers get the last messages.

    Raises:
        ConfigError: see ``Address.listen``.
    """
    listener = address.listen()
    token = "" if address.is_loopback else secrets.token_urlsafe(16)
    runner = web.AppRunner(_application(observer, token), access_log=None, shutdown_timeout=LAST_MESSAGES_S)
    try:
        await runner.setup()
        await web.SockSite(runner, listener).start()
        observing = asyncio.create_task(observer.run(), name="kfcomm observes for the dashboard")
        try:
            yield _url(address.host, listener.getsockname()[1], token)
        finally:
            observer.feed.close()
            observing.cancel()
            await asyncio.wait([observing])
            if not observing.cancelled() and (error := observing.exception()) is not None:
                raise error
    finally:
        await runner.cleanup()
        listener.close()


def _url(host: str, port: int, token: str) -> str:
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    host = f"[{host}]" if ":" in host else host
    return f"http://{host}:{port}/{token and token + '/'}"


def _application(observer: JobObserver, token: str) -> web.Application:
    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not token and not is_loopback(request.url.host or ""):
            raise web.HTTPForbidden(text=f"{request.host} is not a loopback name: start the dashboard with --host\n")
        return await handler(request)

    async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(HEADERS)

    async def page(_: web.Request) -> web.StreamResponse:
        return web.FileResponse(STATIC / "index.html")

    async def events(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **HEADERS})
        await response.prepare(request)
        await response.write(f"retry: {RECONNECT_MS}\n\n".encode())
        with contextlib.suppress(ConnectionError):
            async with contextlib.aclosing(observer.feed.read()) as messages:
                async for kind, text in messages:
                    await response.write(f"event: {kind}\ndata: {text}\n\n".encode())
        return response

    prefix = f"/{token}" if token else ""
    app = web.Application(middlewares=[guarded])
    app.on_response_prepare.append(add_headers)
    app.router.add_get(f"{prefix}/", page)
    app.router.add_get(f"{prefix}/events", events)
    app.router.add_static(f"{prefix}/static", STATIC)
    return app
