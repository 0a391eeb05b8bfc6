"""Local stores, and the registry of backends that outlive their process (``--store``).

To add a backend, add a module or package to this folder with a `Backend` named ``BACKEND``.
"""

from __future__ import annotations

import contextlib
import pkgutil
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from kfcomm.errors import ConfigError
from kfcomm.rendezvous.authentication import IDENTITY_NBYTES
from kfcomm.rendezvous.contents import Contents
from kfcomm.rendezvous.keyvalue import Exit, KeyValue, StoreClosed
from kfcomm.types import override

_WAIT_S = 20.0


class LocalStore(KeyValue):
    """A store whose contents are in the memory of this process, and lost with it; subclasses keep them elsewhere too.

    Reads never leave the process. A subclass writes elsewhere first, then to the contents, so that no process acts on a
    value that a restarted store would lack.

    Raises (all methods): `StoreClosed`, and `LocalProtocolError` for what is out of bounds.
    """

    def __init__(self) -> None:
        self.contents = Contents()  # the values; may be read directly
        # of the job: 16 bytes, the same whenever the same contents are served
        self.identity = secrets.token_bytes(IDENTITY_NBYTES)

    @override
    async def find(self, key: str) -> bytes | None:
        return await self.contents.get(key, 0.0)

    @override
    async def collect(self, folder: str, count: int, *, timeout_s: float) -> dict[str, bytes]:
        return await self.contents.collect(folder, count, None, timeout_s)

    @override
    async def watch_exits(self, host: int | None = None, *, lasting: bool = False) -> AsyncIterator[Exit]:
        seen = 0
        with contextlib.suppress(StoreClosed):
            while True:
                for end in await self.contents.exits_since(seen, _WAIT_S, host):
                    seen += 1
                    yield end

    @override
    async def set(self, key: str, value: bytes) -> None:
        self.contents.set(key, value)

    @override
    async def claim(self, key: str, value: bytes) -> bytes:
        return self.contents.claim(key, value)

    @override
    async def report_exit(self, end: Exit) -> None:
        self.contents.report_exit(end)

    async def clear(self, *folders: str) -> None:
        """Remove all values but those of these folders."""
        for key in [key for key, _ in self.contents.items() if key.partition("/")[0] not in folders]:
            self.contents.drop(key)

    async def close(self, *, is_over: bool) -> None:
        """Stop writing elsewhere; if the job is over, remove what was written. May be called twice."""
        self.contents.close()


@dataclass(frozen=True, slots=True)
class Opening:
    """Circumstances in which a launcher opens a backend: ``is_first`` for that of the first host, which is one.

    ``within_s`` bounds the attempts to reach a server.
    """

    environ: Mapping[str, str]
    is_first: bool
    within_s: float


@dataclass(frozen=True, slots=True)
class Backend:
    """A kind of storage for the contents of a job's store.

    Attributes:
        schemes: of its addresses, ``SCHEME://...``; an empty one means paths.
        example: an address.
        open: opens the store at an address. Raises `ConfigError` if that is malformed or of another job, and
            `RendezvousError` if it cannot be reached.
        is_shared: whether the launchers of all hosts open it, each for the ranks of its host; else the first one alone.
        token: returns the token that is stored with the contents, and makes a missing one; None if it stores no token.
        secrets: variables of the environment for launchers alone.
    """

    schemes: tuple[str, ...]
    example: str
    open: Callable[[str, Opening], Awaitable[LocalStore]]
    is_shared: bool = False
    token: Callable[[str], bytes] | None = None
    secrets: tuple[str, ...] = ()


def backends() -> list[Backend]:
    """All backends: one of each module of this folder."""
    names = sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return [import_module(f"{__name__}.{name}").BACKEND for name in names]


def backend_of(address: str) -> Backend:
    """The backend of an address. Raises `ConfigError`: its scheme is unknown."""
    scheme, mark, _ = address.partition("://")
    found = backends()
    for backend in found:
        if (scheme if mark else "") in backend.schemes:
            return backend
    expected = " or ".join(backend.example for backend in found[::-1])
    raise ConfigError(f"--store: expected {expected}, not {scheme}://")


def secret_variables() -> set[str]:
    """Variables of the environment that ranks and scripts do not inherit."""
    return {name for backend in backends() for name in backend.secrets}
