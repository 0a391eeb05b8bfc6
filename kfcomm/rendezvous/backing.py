"""Where the contents of a store are, besides in its memory: nowhere, in a folder, or in etcd.

A store answers from its `Board`. What changes it goes through its *backing*, which gives the board the value when it is
kept: so nobody acts upon what a store that is started again would not know. `Memory` keeps nothing; the others are
``journal.Journal`` and ``etcd.mirror.Mirror``.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod

from kfcomm.rendezvous.board import Board, Exit
from kfcomm.rendezvous.signing import IDENTITY_NBYTES


class Backing(ABC):
    """What a store is kept in.

    Attributes:
        board: the contents, in memory.
        identity: of the job: 16 bytes, the same whenever the same contents are served.

    Raises (all methods): `Closed`, and `LocalProtocolError` for what is out of bounds.
    """

    def __init__(self) -> None:
        self.board = Board()
        self.identity = secrets.token_bytes(IDENTITY_NBYTES)

    @abstractmethod
    async def set(self, key: str, value: bytes) -> None:
        """Give ``key`` a value, or another one."""

    @abstractmethod
    async def claim(self, key: str, value: bytes) -> bytes:
        """Give ``key`` a value unless it has one; returns the value that it has."""

    async def report_exit(self, end: Exit) -> None:
        """Note that the process of a rank has ended; the first report of a rank stands."""
        await self.claim(end.key, end.to_wire())


class Lasting(Backing):
    """A backing that outlives its process, unless the job is over."""

    @abstractmethod
    async def close(self, *, is_over: bool) -> None:
        """Nothing is kept any more; if the job is over, nor is what was. May be called twice."""

    @abstractmethod
    async def clear(self, *folders: str) -> None:
        """Forget everything but what is in these folders."""


class Memory(Backing):
    """A store that is gone with its process."""

    async def set(self, key: str, value: bytes) -> None:
        """See `Backing`."""
        self.board.set(key, value)

    async def claim(self, key: str, value: bytes) -> bytes:
        """See `Backing`."""
        return self.board.claim(key, value)

    async def report_exit(self, end: Exit) -> None:
        """See `Backing`."""
        self.board.report_exit(end)
