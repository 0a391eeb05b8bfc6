"""Named, versioned blobs that a rank keeps for others to fetch when they like.

A blob is copied when it is saved, so that what a peer gets is always one whole version, never a torn one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

import msgpack
import numpy as np

from kfcomm.arrays import HostArray, adapt
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.mailbox import Mailbox
from kfcomm.errors import CollectiveError, ConfigError

ASK_TAG = "\0blob ask"
KEPT_VERSIONS = 2


class Blobs:
    """The blobs of this rank, and the way to those of others."""

    def __init__(self, mailbox: Mailbox, rank: int) -> None:
        self._mailbox = mailbox
        self._rank = rank
        self._kept: dict[str, OrderedDict[int, HostArray]] = {}
        self._free_slots: list[int] = []
        self._num_slots = 0
        mailbox.serve(ASK_TAG, self._serve)

    def save(self, name: str, x: Any, version: int | None) -> int:
        """Keep a copy; returns its version. The last versions of each name are kept."""
        array = adapt(x)
        versions = self._kept.setdefault(name, OrderedDict())
        number = (max(versions, default=-1) + 1) if version is None else version
        if type(number) is not int or number < 0:
            raise ConfigError(f"a version is a number from 0 on, not {version!r}")
        versions[number] = HostArray(array.flat.copy(), array.shape, array.kind, False)
        versions.move_to_end(number)
        while len(versions) > KEPT_VERSIONS:
            versions.popitem(last=False)
        return number

    async def request(self, name: str, source: int, version: int | None, timeout_s: float | None) -> Any:
        """A rank's blob, as a NumPy array."""
        if source == self._rank:
            kept = self._find(name, version)
            if isinstance(kept, str):
                raise CollectiveError(kept, key=name)
            return kept.flat.copy().reshape(kept.shape)
        slot = self._free_slots.pop() if self._free_slots else self._num_slots
        self._num_slots = max(self._num_slots, slot + 1)
        question = np.frombuffer(msgpack.packb([name, version, slot]), np.uint8)
        self._mailbox.send(adapt(question), source, ASK_TAG, timeout_s)
        header, _ = await self._mailbox.recv(source, _reply_tag(slot), None, timeout_s)
        refusal, shape = msgpack.unpackb(header.tobytes())
        if not refusal:
            blob, _ = await self._mailbox.recv(source, _reply_tag(slot), None, timeout_s)
        # After an error or a cancellation the slot is never used again: a late answer must not meet a new question.
        self._free_slots.append(slot)
        if refusal:
            raise CollectiveError(refusal, key=name)
        return blob.reshape(shape)

    def _find(self, name: str, version: int | None) -> HostArray | str:
        versions = self._kept.get(name)
        if not versions:
            return f"rank {self._rank} has saved nothing as {name!r}"
        if version is None:
            return versions[next(reversed(versions))]
        if version not in versions:
            return f"rank {self._rank} keeps versions {sorted(versions)} of {name!r}, not {version}"
        return versions[version]

    async def _serve(self, source: int) -> None:
        """Answer one request of one rank."""
        question, _ = await self._mailbox.recv(source, ASK_TAG, None, None)
        name, version, slot = msgpack.unpackb(question.tobytes())
        kept = self._find(name, version)
        header = msgpack.packb([kept, []] if isinstance(kept, str) else ["", list(kept.shape)])
        replies: list[Handle[None]] = [
            self._mailbox.send(adapt(np.frombuffer(header, np.uint8)), source, _reply_tag(slot), None)
        ]
        if not isinstance(kept, str):
            replies.append(self._mailbox.send(kept, source, _reply_tag(slot), None))
        await asyncio.gather(*replies)


def _reply_tag(slot: int) -> str:
    return f"\0blob {slot}"
