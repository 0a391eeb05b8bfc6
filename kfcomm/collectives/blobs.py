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
from kfcomm.collectives.mailbox import Mailbox, Message
from kfcomm.errors import CollectiveAborted, CollectiveError, ConfigError

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
        check_version(version)
        versions = self._kept.setdefault(name, OrderedDict())
        number = (max(versions, default=-1) + 1) if version is None else version
        versions[number] = HostArray(array.flat.copy(), array.shape, array.kind, False)
        versions.move_to_end(number)
        while len(versions) > KEPT_VERSIONS:
            versions.popitem(last=False)
        return number

    async def request(self, name: str, source: int, version: int | None, timeout_s: float | None) -> Any:
        """A rank's blob, as a NumPy array.

        The answer comes as one message under a tag of its own, a refusal as one that is aborted: either way, both
        ends have then used that tag once more, and it serves again.
        """
        if source == self._rank:
            kept = self._find(name, version)
            if isinstance(kept, str):
                raise CollectiveError(kept, key=name)
            return kept.flat.copy().reshape(kept.shape)
        slot = self._free_slots.pop() if self._free_slots else self._num_slots
        self._num_slots = max(self._num_slots, slot + 1)
        question = np.frombuffer(msgpack.packb([name, version, slot]), np.uint8)
        asked = self._mailbox.send(adapt(question), source, ASK_TAG, timeout_s)
        answer = self._mailbox.recv(source, _reply_tag(slot), None, timeout_s)
        try:
            await asked
            blob, _ = await answer
        except BaseException as error:
            self._give_up(asked, answer, source, slot, error)
            if isinstance(error, CollectiveAborted):
                raise CollectiveError(str(error), key=name) from None
            raise
        self._free_slots.append(slot)
        return blob

    def _give_up(self, asked: Handle[None], answer: Handle[Any], source: int, slot: int, error: BaseException) -> None:
        """Whatever becomes of the question, its answer finds nobody waiting."""
        if isinstance(error, CollectiveAborted) and answer.done() and not asked.cancelled() and not asked.exception():
            self._free_slots.append(slot)
            return
        # Never used again: a late answer must not meet a new question.
        asked.cancel()
        answer.cancel()
        if answer.seq < 0:
            self._mailbox.refuse(source, self._rank, _reply_tag(slot), f"rank {self._rank} waits no longer")
        for handle in (asked, answer):
            handle.add_done_callback(_looked_at)

    def _find(self, name: str, version: int | None) -> HostArray | str:
        versions = self._kept.get(name)
        if not versions:
            return f"rank {self._rank} has saved nothing as {name!r}"
        if version is None:
            return versions[next(reversed(versions))]
        if version not in versions:
            return f"rank {self._rank} keeps versions {sorted(versions)} of {name!r}, not {version}"
        return versions[version]

    async def _serve(self, source: int, message: Handle[Message]) -> None:
        """Answer one request of one rank."""
        question, _ = await message
        name, version, slot = msgpack.unpackb(question.tobytes())
        kept = self._find(name, version)
        if isinstance(kept, str):
            self._mailbox.refuse(self._rank, source, _reply_tag(slot), kept)
        else:
            await self._mailbox.send(kept, source, _reply_tag(slot), None)


def check_version(version: Any) -> None:
    """Refuse a version that is none.

    Raises:
        ConfigError: it is not a number from 0 on.
    """
    if version is not None and (type(version) is not int or version < 0):
        raise ConfigError(f"a version is a number from 0 on, not {version!r}")


def _looked_at(done: asyncio.Future[Any]) -> None:
    """No complaint by asyncio that nobody looked at the error."""
    if not done.cancelled():
        done.exception()


def _reply_tag(slot: int) -> str:
    return f"\0blob {slot}"
