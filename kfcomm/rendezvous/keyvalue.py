"""Key-value store interface: what the ranks and launchers of a job share, wherever the values are kept.

Keys are paths; the part before the last slash is the *folder*. Implementations: `client.StoreClient` over HTTP, and the
local stores of `backends`, which a `store.StoreServer` can serve.
"""

from __future__ import annotations

import asyncio
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import msgpack

from kfcomm.errors import LocalProtocolError, RendezvousError
from kfcomm.types import Wanted

MAX_KEY_LENGTH = 256
MAX_VALUE_NBYTES = 1 << 19
MAX_BODY_NBYTES = MAX_VALUE_NBYTES + 1024

_WAIT_S = 20.0
AGAIN_S = 1.0
"""Seconds between attempts to reach a store that is gone: it may be restarted."""

SIZES = "sizes"
"""Folder of the requested numbers of ranks, counted from 1."""
JOINING, ASIDE, INVITED, ENTRY = "joining", "aside", "invited", "entry"
"""Folders of a running job: processes that ask to join, by uid, and the answer each one gets."""
GIVEN_UP = "given-up"
"""Folder of uids that the other ranks of an elastic job have given up, whether their processes have ended or not."""
RELEASED = "released"
"""Folder of the uids that the ranks of an elastic job have released, whether their processes have ended or not."""
REPLACED = "replaced"
"""Folder of uids that the ranks of an elastic job want replaced."""
SILENT = "silent"
"""Folder of hosts, by position: which of their ranks show no sign of life, as reported by the launchers."""
LAUNCHERS, LEAVING = "launchers", "leaving"
"""Folders of hosts, by position, whose launchers have ended, or are about to."""
START, DISMISSED = "start", "dismissed"
"""Folders of uids of an elastic job: processes to start, in one folder for each host; processes no longer wanted."""
OUTCOME = "outcome"
"""Folder with one name, 0: how an elastic job has ended, written by the primary launcher."""
JOB_RECORD = "job"
"""Key of the job's record for a restarted launcher: see ``kfcomm.launch.stores``."""
LAUNCHED = "launched"
"""Folder of hosts, by position, whose launchers have arrived: the identity of each, since only one may run."""
COMERS, ADMITTED = "comers", "admitted"
"""Folders of launchers that arrive later, counted from 1: their host; the answer, empty for a position."""
ENDS = "ends"
"""Folder of ranks that have ended: exit code and reason, where a store outlives its process."""
BOUNDS = "bounds"
"""Key of the least and the largest number of ranks of an elastic job: ``2:8``."""


class StoreClosed(RendezvousError):
    """The store is closing, or the store of another job has taken its place: the job is over."""


class NotSet(RendezvousError):
    """A key was not set in time."""


@dataclass(frozen=True, slots=True)
class MeetRequest:
    """Question of a rank that joins: are there ``count`` values in the folder, or one named ``unless``?

    Exits of processes among the first ``count`` ranks end the wait, too, if it ``heeds_ends``.
    """

    folder: str
    rank: int
    count: int
    unless: str
    heeds_ends: bool


class Why(StrEnum):
    """Why the process of a rank ended, as far as its launcher knows."""

    ITSELF = "itself"
    ELSEWHERE = "elsewhere"
    """It reported that another rank had failed."""
    SILENT = "silent"
    """Unknown: its launcher stopped answering."""
    ABSENT = "absent"
    """Its launcher never arrived."""
    RELEASED = "released"
    """The ranks of an elastic job had released it."""


class Exit(NamedTuple):
    """End of a rank's process: its return code (negative: minus a signal), and why."""

    rank: int
    code: int
    why: str = Why.ITSELF

    @property
    def key(self) -> str:
        """Key of the exit in a store that outlives its process."""
        return f"{ENDS}/{self.rank}"

    def to_wire(self) -> bytes:
        """Value of that key."""
        encoded: bytes = msgpack.packb([self.code, str(self.why)])
        return encoded

    @classmethod
    def from_wire(cls, rank: str, told: bytes) -> Exit:
        """The inverse of `to_wire`. Raises `LocalProtocolError`: the value is malformed."""
        try:
            code, why = msgpack.unpackb(told)
            return cls(int(rank), int(code), Why(why))
        except (TypeError, ValueError, msgpack.UnpackException) as error:
            raise LocalProtocolError(f"malformed exit of rank {rank!r}: {told[:64]!r}") from error

    def describe(self) -> str:
        """The end in a message: ``the process of rank 1 ended (SIGKILL)``."""
        if self.why == Why.SILENT:
            return f"the launcher of rank {self.rank} is not heard of any more"
        if self.why == Why.ABSENT:
            return f"the launcher of rank {self.rank} did not come"
        return f"the process of rank {self.rank} ended ({describe_exit(self.code)})"


def describe_exit(code: int) -> str:
    """A return code in words: ``exit code 3``, ``SIGKILL``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


class KeyValue(ABC):
    """A key-value store.

    Raises (all methods but those that watch): `RendezvousError` if the store is gone. Watches wait until it is back,
    and end when the job is over.
    """

    @abstractmethod
    async def find(self, key: str) -> bytes | None:
        """The value of ``key`` now, or None."""

    @abstractmethod
    async def set(self, key: str, value: bytes) -> None:
        """Give ``key`` a value (at most 512 KiB), or another one."""

    @abstractmethod
    async def claim(self, key: str, value: bytes) -> bytes:
        """Give ``key`` a value unless it has one. Returns the value it has: ``value`` if the claim won."""

    @abstractmethod
    async def collect(self, folder: str, count: int, *, timeout_s: float) -> dict[str, bytes]:
        """The values of ``folder``, by name, once there are ``count`` of them; after that time, those present."""

    @abstractmethod
    async def report_exit(self, end: Exit) -> None:
        """Report that the process of a rank has ended; the first report of a rank stands."""

    @abstractmethod
    def watch_exits(self, host: int | None = None, *, lasting: bool = False) -> AsyncIterator[Exit]:
        """Yield the end of every process that has ended or ends, as it is reported; ends with the store.

        Args:
            host: position of the host whose launcher asks; asking is its sign of life.
            lasting: survive a restart of the store, then yield all exits again; ends when the job is over.
        """

    async def watch(self, folder: str) -> AsyncIterator[tuple[int, bytes]]:
        """Yield each value of a folder whose names are numbers, once it is there; ends with the store."""
        known: set[str] = set()
        while (found := await self._found(folder, len(known) + 1)) is not None:
            for name in sorted(found.keys() - known, key=int):
                known.add(name)
                yield int(name), found[name]

    async def watch_sizes(self) -> AsyncIterator[int]:
        """Yield each requested number of ranks, without those that later requests replaced or the launcher made."""
        async for told in self._told():
            sizes = [wanted.size for wanted, is_held in told if not is_held]
            if sizes:
                yield sizes[-1]

    async def watch_wanted(self) -> AsyncIterator[Wanted]:
        """Yield each request to the ranks, of users or the launcher, without those that later requests replaced."""
        async for told in self._told():
            yield told[-1][0]

    async def _told(self) -> AsyncIterator[list[tuple[Wanted, bool]]]:
        """Yield new requests, in batches, each with whether the launcher made it."""
        count = 0
        while (found := await self._found(SIZES, count + 1)) is not None:
            new = [read_wanted(found[str(number)]) for number in range(count + 1, len(found) + 1)]
            count = len(found)
            if new:
                yield new

    async def _found(self, folder: str, count: int) -> dict[str, bytes] | None:
        """As `collect`, for as long as there is a store, or may be again; None after its end."""
        while True:
            try:
                return await self.collect(folder, count, timeout_s=_WAIT_S)
            except StoreClosed:
                return None
            except RendezvousError:
                await asyncio.sleep(AGAIN_S)

    async def ask_size(self, size: int) -> None:
        """Ask for a number of ranks; ranks that were asked to leave still have to."""
        await self._ask_for(lambda last: _written(Wanted(size, last.leavers), is_held=False))

    async def hold(self, wanted: Wanted) -> None:
        """Limit the ranks to this; called by the primary launcher, which knows the available slots."""
        await self._ask_for(lambda _: _written(wanted, is_held=True))

    async def ask_to_go(self, uid: int) -> None:
        """Ask a rank to leave, on top of earlier requests; the launcher is notified by other means."""
        await self._ask_for(lambda last: _written(Wanted(last.size, (*last.leavers, uid)), is_held=True))

    async def _ask_for(self, following: Callable[[Wanted], bytes]) -> None:
        """Apply a change to the latest request, with retries if others write meanwhile; no write if it is the same."""
        is_told = False
        while not is_told:
            found = await self.collect(SIZES, 0, timeout_s=0.0)
            last = found.get(str(len(found)))
            mine = following(Wanted() if last is None else read_wanted(last)[0])
            is_told = mine == last or await self.claim(f"{SIZES}/{1 + len(found)}", mine) == mine

    async def was_let_in(self, uid: int) -> bool:
        """Whether a process that was started later is a rank of the job, or was."""
        return await self.find(f"{ENTRY}/{uid}") is not None


def _written(wanted: Wanted, *, is_held: bool) -> bytes:
    """The number, a colon or a space, the uids."""
    return b"%d%s%s" % (wanted.size, b" " if is_held else b":", b",".join(b"%d" % uid for uid in wanted.leavers))


def read_wanted(told: bytes) -> tuple[Wanted, bool]:
    """A value of the folder of sizes, and whether the launcher wrote it."""
    is_held = b" " in told
    size, _, leavers = told.partition(b" " if is_held else b":")
    return Wanted(int(size), tuple(int(uid) for uid in leavers.split(b",") if uid)), is_held


def loop_now_s() -> float:
    """Return the time of the running event loop, in seconds."""
    return asyncio.get_running_loop().time()
