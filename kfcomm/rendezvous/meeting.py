"""Rendezvous through the key-value store of another library, where a job has no store of kfcomm's: torch's, Ray's.

Each rank listens, writes its description, and waits for those of the others. Who can read that store can join, unless
all ranks were given a token: it holds no other secret.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kfcomm.common.sizes import ranges
from kfcomm.errors import RemoteProtocolError, RendezvousError
from kfcomm.rendezvous.identity import PeerInfo

logger = logging.getLogger("kfcomm")

FIRST_PAUSE_S, LAST_PAUSE_S = 1e-3, 50e-3
"""Between two looks whether the others are there."""
MAX_SHOWN = 32


class ForeignStore(Protocol):
    """Key-value store of another library; its calls may block for a round trip, not longer."""

    def set(self, key: str, value: str) -> None:
        """Give a key a value."""

    def find(self, key: str) -> bytes | None:
        """Return the value of a key now, or None. Raises `RendezvousError`: the store does not answer."""


@dataclass(slots=True)
class ForeignRendezvous:
    """One meeting of the ranks of a group; ``folder`` is that of its keys alone.

    ``owner`` and ``group`` name the store's library and the group in messages. A long wait is reported once.
    """

    store: ForeignStore
    owner: str
    group: str
    folder: str
    rank: int
    size: int
    timeout_s: float
    stall_after_s: float = 10.0

    def share(self, key: str, make: Callable[[], str]) -> bytes:
        """Return a value that rank 0 makes and the others wait for."""
        if self.rank == 0:
            self.store.set(key, made := make())
            return made.encode()
        return self._await({key: 0})[key]

    async def exchange(self, me: PeerInfo) -> Sequence[PeerInfo]:
        """Give this process's description to the others, and wait for theirs; an ``engine.meeting.Exchange``."""
        return await asyncio.to_thread(self._exchange, me)

    def _exchange(self, me: PeerInfo) -> Sequence[PeerInfo]:
        keys = {f"{self.folder}/{rank}": rank for rank in range(self.size)}
        self.store.set(f"{self.folder}/{self.rank}", me.to_wire().hex())
        found = self._await(keys)
        try:
            return [PeerInfo.from_wire(bytes.fromhex(found[key].decode())) for key in keys]
        except (RemoteProtocolError, ValueError) as error:
            raise RendezvousError(f"{self.owner}'s store has an entry of another version of kfcomm: {error}") from error

    def _await(self, keys: dict[str, int]) -> dict[str, bytes]:
        """Wait until all keys are set, each by the rank that is named with it; return their values.

        Raises:
            RendezvousError: some are not set within the timeout, or the store is unreachable.
        """
        begun_s = time.monotonic()
        found: dict[str, bytes] = {}
        pending, is_reported, pause_s = dict(keys), False, FIRST_PAUSE_S
        while True:
            found |= {key: value for key in pending if (value := self.store.find(key)) is not None}
            pending = {key: rank for key, rank in pending.items() if key not in found}
            if not pending:
                return found
            waited_s, missing = time.monotonic() - begun_s, ranges(sorted(pending.values()), MAX_SHOWN)
            if waited_s >= self.timeout_s:
                raise RendezvousError(
                    f"after {waited_s:g} s {len(pending)} of {self.size} ranks have not joined the {self.group}: "
                    f"missing {missing}"
                )
            if waited_s >= self.stall_after_s and not is_reported:
                is_reported = True
                logger.warning(
                    "rank %d has waited for %.0f s to join the %s: missing %s", self.rank, waited_s, self.group, missing
                )
            # Polled: the stores' own waits would block their other uses, and torch's writes to standard error.
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
