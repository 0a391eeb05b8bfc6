"""How the ranks of a process group find each other: by the store that torch has opened for it, and no other.

Each rank listens, says where in torch's store, and waits for what the others say. Nothing else is kept there, so the
store may end with whoever serves it. It is used in the order *generation, token, addresses*: a group that is made again
over the same store counts on.

Whoever can reach torch's store can join: it knows no secret. ``KFCOMM_TOKEN``, set on all ranks, is one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from kfcomm.common.sizes import ranges
from kfcomm.errors import RemoteProtocolError, RendezvousError
from kfcomm.joining import prepare
from kfcomm.rendezvous.identity import PeerInfo
from kfcomm.rendezvous.interfaces import LOOPBACK
from kfcomm.rendezvous.settings import Settings, store_url
from kfcomm.rendezvous.token import concealed_token, given_token
from kfcomm.sync.communicator import Communicator, join

logger = logging.getLogger("kfcomm")

FIRST_PAUSE_S, LAST_PAUSE_S = 1e-3, 50e-3
"""Between two looks whether the others are there."""
MAX_SHOWN = 32


def make_world(store: Any, rank: int, size: int, timeout: timedelta) -> Communicator:
    """A world of kfcomm's of the ranks that share a store of torch's; all of them call it.

    Args:
        store: of this group alone.
        rank: of this process.
        size: how many ranks there are.
        timeout: of the group's collectives, and for joining.

    Raises:
        ConfigError: the settings cannot work.
        RendezvousError: ranks are missing in the end (all named), or do not accept each other.
    """
    board = Board(store, rank, size, timeout.total_seconds())
    settings = board.settings()
    return join(settings, board.exchange)


class Board:
    """What the ranks of one group tell each other by torch's store.

    Args:
        store: of this group alone.
        rank: of this process.
        size: how many ranks there are.
        timeout_s: how long to wait for the others.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._stall_after_s = 10.0
        # all ranks have made as many groups over this store as this one
        self._folder = f"kfcomm/{store.add(f'kfcomm/{rank}', 1)}"

    def settings(self) -> Settings:
        """Those of this rank: torch says who it is, the environment all else.

        Raises:
            ConfigError: they cannot work.
        """
        if self._size == 1:
            return prepare(rank=0, size=1, timeout=self._timeout_s, elastic=False)
        url = store_url(*address_of(self._store))
        token = None
        if given_token(os.environ, None) is None and concealed_token(url) is None:
            token = self._token()
        local_rank, local_size = _local(self._size)
        settings = prepare(
            rank=self._rank, size=self._size, local_rank=local_rank, local_size=local_size, store=url, serve=False,
            token=token, timeout=self._timeout_s, elastic=False,
        )  # fmt: skip
        self._stall_after_s = settings.stall_after_s
        return settings

    async def exchange(self, me: PeerInfo) -> Sequence[PeerInfo]:
        """Tell the others of this process, and wait for what they tell; see ``network.Exchange``."""
        return await asyncio.to_thread(self._exchange, me)

    def _token(self) -> bytes:
        """Made by rank 0. Whoever reads it could as well have joined."""
        key = f"{self._folder}/token"
        if self._rank == 0:
            self._store.set(key, secrets.token_hex(32))
        else:
            self._await({key: 0})
        return bytes(self._store.get(key))

    def _exchange(self, me: PeerInfo) -> Sequence[PeerInfo]:
        keys = {f"{self._folder}/{rank}": rank for rank in range(self._size)}
        self._store.set(f"{self._folder}/{self._rank}", me.to_wire().hex())
        self._await(keys)
        try:
            return [PeerInfo.from_wire(bytes.fromhex(self._store.get(key).decode())) for key in keys]
        except (RemoteProtocolError, ValueError) as error:
            raise RendezvousError(f"torch's store holds what no rank of this version wrote: {error}") from error

    def _await(self, keys: dict[str, int]) -> None:
        """Wait until all keys are set; each is of a rank.

        Raises:
            RendezvousError: some are not within the timeout, or the store is gone.
        """
        begun_s = time.monotonic()
        pending, is_reported, pause_s = dict(keys), False, FIRST_PAUSE_S
        while pending:
            waited_s = time.monotonic() - begun_s
            if waited_s >= self._timeout_s:
                raise RendezvousError(
                    f"after {waited_s:g} s {len(pending)} of {self._size} ranks have not joined the process group: "
                    f"missing {ranges(sorted(pending.values()), MAX_SHOWN)}"
                )
            if waited_s >= self._stall_after_s and not is_reported:
                is_reported = True
                logger.warning(
                    "rank %d has waited for %.0f s to join the process group: missing %s", self._rank, waited_s,
                    ranges(sorted(pending.values()), MAX_SHOWN),
                )  # fmt: skip
            pending = {key: rank for key, rank in pending.items() if not self._is_set(key)}
            time.sleep(pause_s if pending else 0.0)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def _is_set(self, key: str) -> bool:
        """Not by the store's own waiting, which holds up other uses of it, and says on standard error that it ended."""
        try:
            return bool(self._store.check([key]))
        except RuntimeError as error:
            raise RendezvousError(f"torch's store does not answer: {error}") from error


def address_of(store: Any) -> tuple[str, int]:
    """Host and port behind which the other ranks are; of a file, or where there is no store, those of this host."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if not host or not port:
        return os.environ.get("MASTER_ADDR") or LOOPBACK, 1
    return (LOOPBACK if host == "localhost" else str(host)), int(port)


def _local(size: int) -> tuple[int | None, int | None]:
    """Rank and size on this host, as a launcher has given them, which tell the device; of no use in a smaller world."""
    rank, local_size = os.environ.get("LOCAL_RANK", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    if str(size) != os.environ.get("WORLD_SIZE") or not rank.isdigit() or not local_size.isdigit():
        return None, None
    return int(rank), int(local_size)
