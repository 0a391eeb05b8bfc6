"""Secret channels: ways by which rank 0 hands the job's token to the other ranks, where none was given.

A channel is secret if other users of the cluster can neither read nor write what passes through it. Rank 0 makes the
token from its user's own on that host and the store's address: programs that follow each other in a task have the same
one. Ranks of one job take the same channel, since it follows from variables and software that their hosts share.

To add a channel, write a module with these, and add its name to `CHANNELS`::

    TITLE = "..."                                       what it is, in messages
    def why_absent(environ, source) -> str: ...         the reason why this process cannot use it; empty if it can
    async def agree(handing) -> tuple[bytes, bytes]: ...    the token, and what the store shows to everyone, if any
"""

from __future__ import annotations

import hmac
import importlib
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from kfcomm.errors import ConfigError
from kfcomm.rendezvous.authentication import HOW_TO_SET, user_token
from kfcomm.rendezvous.worlds import Environ

if TYPE_CHECKING:
    from kfcomm.rendezvous.settings import Settings

CHANNELS = ("munge", "pmi", "torchrun", "jax")
"""In order of preference."""


@dataclass(frozen=True, slots=True)
class Handing:
    """One handing over of a token.

    Attributes:
        environ: variables of this process.
        rank: rank of this process.
        store: URL of the store.
        timeout_s: longest wait of a rank.
        look: gets what the store of rank 0 shows to everyone; waits until the store is there.
    """

    environ: Environ
    rank: int
    store: str
    timeout_s: float
    look: Callable[[], Awaitable[bytes]]

    def propose(self) -> bytes:
        """Make the token that this process would hand to the others; blocks while it reads a file."""
        own, _ = user_token(self.environ)
        return hmac.digest(own, b"token of the job at " + self.store.encode(), "sha256").hex().encode()


class ChannelModule(Protocol):
    """Functions of a module that implements a channel; all raise `RendezvousError` where the channel fails."""

    TITLE: str

    def why_absent(self, environ: Environ, source: str) -> str:
        """Return the reason why this process, in a world that this finder found, cannot use it; empty if it can."""

    async def agree(self, handing: Handing) -> tuple[bytes, bytes]:
        """Return the token, and what the store is to show to everyone, where this rank serves it; all ranks call it."""


def channel(name: str) -> ChannelModule:
    """The channel of this name."""
    return cast("ChannelModule", importlib.import_module(f"{__name__}.{name}"))


def choose_channel(environ: Environ, source: str, *, serves: bool) -> str:
    """Choose the first channel that this process can use, in a world that the finder ``source`` has found.

    Raises:
        ConfigError: no channel works here, or another process than rank 0 serves the store; says what to set.
    """
    lacks: list[str] = []
    for name in CHANNELS if serves else ():
        found = channel(name)
        why = found.why_absent(environ, source)
        if not why:
            return name
        lacks.append(f"{found.TITLE}: {why}")
    why = f". Rank 0 can hand one over by none of these: {'; '.join(lacks)}" if lacks else ""
    raise ConfigError(f"a world on several hosts needs a token: {HOW_TO_SET}{why}")


async def agree_on_token(settings: Settings, look: Callable[[], Awaitable[bytes]]) -> tuple[bytes, bytes]:
    """Return the token of a job with a channel, and what the store of rank 0 is to show to everyone.

    Raises:
        ConfigError: the job has no channel.
        RendezvousError: the channel fails, or rank 0 does not come within the timeout.
    """
    if settings.channel is None or settings.store is None:
        raise ConfigError("a world without a token has no channel for one")
    handing = Handing(os.environ, settings.rank, settings.store, settings.timeout_s, look)
    return await channel(settings.channel).agree(handing)
