"""Headless Chromium, driven by its DevTools protocol: for tests of pages, and for pictures of them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

PATIENCE_S = 600.0
"""A page that does not come to what it should show is a fault by then, however busy the machine is."""
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions",
    "--remote-debugging-port=0",
)  # fmt: skip


def program() -> str | None:
    """Path of Chromium, if there is one."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """A page, and the errors that it has logged: exceptions, messages to the console, requests that failed."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.errors: list[str] = []

    async def hear(self) -> None:
        """Take the browser's messages until it hangs up."""
        async for message in self._socket:
            told = json.loads(message.data)
            if (answer := self._answers.pop(told.get("id", 0), None)) is not None:
                answer.set_result(told)
            elif told.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(told["params"]["exceptionDetails"]))
            elif told.get("method") == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                self.errors.append(json.dumps(told["params"]["entry"]))
            elif told.get("method") == "Runtime.consoleAPICalled" and told["params"]["type"] in ("error", "assert"):
                self.errors.append(json.dumps(told["params"]["args"]))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ConnectionError("the browser has hung up"))

    async def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        told = await answer
        assert "error" not in told, told  # noqa: S101
        return told["result"]

    async def value(self, script: str) -> Any:
        """Value of an expression; of a promise, its result."""
        options = {"awaitPromise": True, "returnByValue": True}
        told = await self.call("Runtime.evaluate", expression=script, **options)
        assert "exceptionDetails" not in told, told  # noqa: S101
        return told["result"].get("value")

    async def until(self, script: str) -> Any:
        """Value of an expression, once it is true; what the page shows is in the error if it never is."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self.value(
                    "new Promise((done) => { const look = () => { let value = null; "
                    f"try {{ value = ({script}); }} catch (error) {{}} "
                    "if (value) done(value); else setTimeout(look, 20); }; look(); })"
                )
        except TimeoutError:
            text = await self.value("document.body.innerText")
            raise AssertionError(f"still not true: {script}; logged {self.errors}; the page shows:\n{text}") from None

    async def picture(self) -> bytes:
        """PNG of the viewport."""
        told = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(told["data"])


@contextlib.asynccontextmanager
async def page(url: str, size: tuple[int, int] = (1400, 1200), *, dark: bool = False) -> AsyncIterator[Page]:
    """A page in a browser of its own, which leaves no files."""
    options = [*OPTIONS, f"--window-size={size[0]},{size[1]}"]
    async with _browser(options) as port, aiohttp.ClientSession() as client:
        async with client.put(f"http://127.0.0.1:{port}/json/new?about:blank") as made:
            target = await made.json()
        async with client.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            found = Page(socket)
            hearing = asyncio.create_task(found.hear())
            for domain in ("Runtime", "Log", "Page"):
                await found.call(f"{domain}.enable")
            metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
            await found.call("Emulation.setDeviceMetricsOverride", **metrics)
            scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
            await found.call("Emulation.setEmulatedMedia", features=scheme)
            await found.call("Page.navigate", url=url)
            try:
                yield found
            finally:
                with contextlib.suppress(ConnectionError):
                    await socket.send_json({"id": 0, "method": "Browser.close"})
                await hearing


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
    # A short path: the browser makes a socket in it, and the path of one has at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="kfcomm-"))
    try:
        yield folder
    finally:
        while folder.exists():  # helpers of a browser that is dying may still write
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.asynccontextmanager
async def _browser(options: list[str]) -> AsyncIterator[str]:
    """Port of a browser of its own."""
    with _own_folder() as folder:
        log, env = folder / "chromium.log", os.environ | {"TMPDIR": str(folder)}
        command = (program() or "chromium", *options, f"--user-data-dir={folder / 'chromium'}")
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *command, stderr=out, stdout=out, env=env, start_new_session=True
            )
        try:
            port_file = folder / "chromium" / "DevToolsActivePort"
            while not port_file.exists() or port_file.read_text().count("\n") < 1:
                assert process.returncode is None, log.read_text()  # noqa: S101
                await asyncio.sleep(0.02)
            yield port_file.read_text().split()[0]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5):
                    await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its helpers too, which may outlive it
            await process.wait()
