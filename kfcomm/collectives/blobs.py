"""Named, versioned blobs that a rank keeps for others to fetch when they like.

A blob is copied when it is saved, so that what a peer gets is always one whole version, never a torn one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

from kfcomm.arrays import HostArray, adapt
from kfcomm.arrays.kinds import NUMPY, ArrayKind
from kfcomm.collectives.handle import Handle, looked_at
from kfcomm.collectives.mailbox import Mailbox, Message
from kfcomm.common.arguments import whole_number
from kfcomm.core.collective import GroupView
from kfcomm.errors import CollectiveAborted, CollectiveError, CollectiveTimeout, ConfigError, PeerLost

ASK_TAG = "blob question"
KEPT_VERSIONS = 2


class Blobs:
    """The blobs of this rank, and requests for those of others."""

    def __init__(self, mailbox: Mailbox, view: GroupView) -> None:
        self._mailbox = mailbox
        self._view = view
        self._rank = view.rank
        self._kept: dict[str, OrderedDict[int, HostArray]] = {}
        self._free_slots: list[int] = []
        self._num_slots = 0
        mailbox.serve(ASK_TAG, self._serve)

    def save(self, name: str, x: Any, version: int | None) -> int:
        """Keep a copy; return its version. The last versions of each name are kept."""
        array = adapt(as_array(x))
        version = checked_version(version)
        versions = self._kept.setdefault(name, OrderedDict())
        number = (max(versions, default=-1) + 1) if version is None else version
        versions[number] = HostArray(array.flat.copy(), array.shape, array.kind, False)
        versions.move_to_end(number)
        while len(versions) > KEPT_VERSIONS:
            versions.popitem(last=False)
        return number

    async def request(
        self, name: str, source: int, version: int | None, timeout_s: float | None, kind: ArrayKind = NUMPY
    ) -> Any:
        """Request a rank's blob, as an array of this kind. The answer is a refusal, often empty, and then the blob."""
        if source == self._rank:
            kept = self._find(name, version)
            if isinstance(kept, str):
                raise CollectiveError(kept, key=name)
            return kind.restore(kept.flat.copy().reshape(kept.shape))
        # Tags of answers are used again, since every tag that was ever used is remembered by both ends.
        slot = self._free_slots.pop() if self._free_slots else self._num_slots
        self._num_slots = max(self._num_slots, slot + 1)
        question = np.frombuffer(msgpack.packb([name, version, slot]), np.uint8)
        asked = self._mailbox.send(adapt(question), source, ASK_TAG, timeout_s)
        answers = {
            tag: self._mailbox.recv(source, tag, None, timeout_s, kind=of)
            for tag, of in zip(_reply_tags(slot), (NUMPY, kind), strict=True)
        }
        told, blob = answers.values()
        try:
            await asked
            refusal = (await told)[0].tobytes().decode()
            result = None if refusal else (await blob)[0]
        except BaseException as error:
            self._give_up(asked, answers, source)
            whole = self._of_request(error, name, source)
            if whole is None:
                raise
            raise whole from None
        self._free_slots.append(slot)
        if refusal:
            blob.cancel()
            raise CollectiveError(refusal, key=name)
        return result

    def _give_up(self, asked: Handle[None], answers: Mapping[str, Handle[Message]], source: int) -> None:
        """Drop the answer of a request that failed. Its tags are not used again: a late answer might meet a new one."""
        asked.cancel()
        for tag, answer in answers.items():
            if answer.cancel() or answer.cancelled() or isinstance(answer.exception(), CollectiveTimeout):
                self._mailbox.drop(source, tag, f"{self._view.called(self._rank)} no longer waits")
        handles: list[Handle[Any]] = [asked, *answers.values()]
        for handle in handles:
            handle.when_done(self._mailbox.reactor, looked_at)

    def _of_request(self, error: BaseException, name: str, source: int) -> CollectiveError | None:
        """Error for the caller if a message of a request has failed; None for the original error."""
        what = f"the request for {name!r} of {self._view.called(source)}"
        if isinstance(error, CollectiveTimeout):
            known = {"arrived": (self._rank,), "missing": (source,)}
            return CollectiveTimeout(f"{what} was not answered in time", key=name, **known)
        if isinstance(error, PeerLost):
            return PeerLost(f"{what} failed: {str(error).rpartition(' failed: ')[2]}", key=name, rank=error.rank)
        if isinstance(error, CollectiveAborted):
            return CollectiveAborted(f"{what} was cancelled there", key=name)
        return None

    def _find(self, name: str, version: int | None) -> HostArray | str:
        versions = self._kept.get(name)
        if not versions:
            return f"{self._view.called(self._rank)} has saved nothing as {name!r}"
        if version is None:
            return versions[next(reversed(versions))]
        if version not in versions:
            return f"{self._view.called(self._rank)} keeps versions {sorted(versions)} of {name!r}, not {version}"
        return versions[version]

    async def _serve(self, source: int, message: Handle[Message]) -> None:
        """Answer one request of one rank."""
        question, _ = await message
        name, version, slot = msgpack.unpackb(question.tobytes())
        kept = self._find(name, version)
        refusal = kept if isinstance(kept, str) else ""
        told, blob = _reply_tags(slot)
        replies = [self._mailbox.send(adapt(np.frombuffer(refusal.encode(), np.uint8)), source, told, None)]
        if not isinstance(kept, str):
            replies.append(self._mailbox.send(kept, source, blob, None))
        await asyncio.gather(*replies)


def as_array(x: Any) -> Any:
    """Read an array or ``bytes``, which verbs refuse, but blobs keep as numbers from 0 to 255."""
    return np.frombuffer(x, np.uint8) if isinstance(x, bytes) else x


def checked_version(version: Any) -> int | None:
    """Return a version as ``int`` itself; None for the latest.

    Raises:
        ConfigError: it is not a number from 0 on, or is too large to travel.
    """
    number = whole_number(version)
    if version is not None and (number is None or not 0 <= number < 1 << 63):
        raise ConfigError(f"a version is a whole number from 0 to 2**63 - 1, not {version!r:.60}")
    return number


def _reply_tags(slot: int) -> tuple[str, str]:
    return f"blob answer {slot}", f"blob {slot}"
