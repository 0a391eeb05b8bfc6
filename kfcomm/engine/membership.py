"""Membership of a job in its store: joining, welcomed, released and lost processes, and requested sizes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgpack

from kfcomm.engine.interfaces import Membership
from kfcomm.engine.meeting import Meeting, check_checksums
from kfcomm.errors import ConfigError, KfcommError, RemoteProtocolError, RendezvousError
from kfcomm.rendezvous import exit_report
from kfcomm.rendezvous.identity import PeerInfo
from kfcomm.rendezvous.join import check_versions
from kfcomm.rendezvous.keyvalue import BOUNDS, ENTRY, GIVEN_UP, JOINING, RELEASED, REPLACED, Exit, Why
from kfcomm.types import Candidate, Wanted, override

LOOK_S = 15.0
WORD_WITHIN_S = 2.0
"""Bound of each question to the store of ranks that are half of all and ask whether they may survive."""


class StoreMembership(Membership):
    """Membership of one epoch.

    Args:
        meeting: of the first epoch.
        peers: all processes, by rank.
        births: the ranks that they had in the first epoch.
        epoch: of this world.
        job: see ``Network``.
    """

    def __init__(
        self, meeting: Meeting, peers: Sequence[PeerInfo], births: Sequence[int], epoch: int, job: str
    ) -> None:
        self._meeting = meeting
        self._settings = meeting.settings
        self._peers = peers
        self._births = births
        self._epoch = epoch
        self._job = job
        self._me = peers[births.index(meeting.settings.rank)]

    @override
    def may_live(self, peer: int) -> bool:
        end = self._meeting.ends.get(self._births[peer])
        return end is None or not is_certain(end)

    @override
    async def candidates(self, known: Collection[int]) -> list[Candidate]:
        # whom these ranks cannot understand is told so, and left out
        count = 1
        while True:
            found = await self._meeting.client.collect(JOINING, count, unless=None, timeout_s=LOOK_S)
            count = len(found) + 1
            new = [Candidate(int(name), about) for name, about in found.items() if int(name) not in known]
            fit = [one for one in new if not await self._was_let_in(one) and await self._fits(one)]
            if fit:
                return sorted(fit)

    async def _was_let_in(self, candidate: Candidate) -> bool:
        """Whether it has been let in before, and is here, or was; or has been refused."""
        return await self._meeting.client.find(f"{ENTRY}/{candidate.birth}") is not None

    async def _fits(self, candidate: Candidate) -> bool:
        """Whether a process can be let in; one that speaks otherwise is sent the reason."""
        if candidate.birth in self._births or candidate.birth in self._meeting.ends:
            return False
        try:
            peer = PeerInfo.from_wire(candidate.about)
        except RemoteProtocolError:
            return False
        try:
            check_versions(self._me, [peer])
            check_checksums([self._me, peer])
        except KfcommError as error:
            await self._meeting.client.claim(f"{ENTRY}/{candidate.birth}", msgpack.packb(str(error)))
            return False
        return True

    @override
    async def welcome(self, num_old: int, births: Collection[int], strategy: str) -> None:
        peers = [peer.to_wire() for peer in self._peers]
        entry = msgpack.packb([self._epoch, self._births, peers, num_old, strategy])
        for birth in births:
            await self._meeting.client.claim(f"{ENTRY}/{birth}", entry)

    @override
    async def give_up(self, births: Collection[int]) -> None:
        for birth in births:
            await self._meeting.client.claim(f"{GIVEN_UP}/{birth}", b"")

    @override
    async def let_go(self, births: Collection[int]) -> None:
        # this process tells its launcher itself, which hears it before it sees it end
        if self._settings.rank in births:
            exit_report.report_release()
            return
        for birth in births:
            await self._meeting.client.claim(f"{RELEASED}/{birth}", b"")

    @override
    async def wanted(self, known: Wanted) -> Wanted:
        from kfcomm.rendezvous.keyvalue import StoreClosed

        async for wanted in self._meeting.client.watch_wanted():
            if wanted != known:
                return wanted
        raise StoreClosed("the store is gone")

    @override
    async def want_size(self, size: int) -> None:
        client = self._meeting.client
        bounds = await client.find(BOUNDS)
        if bounds is not None:
            least, most = map(int, bounds.split(b":"))
            if not least <= size <= most:
                raise ConfigError(f"size {size} is outside the job's range {least}..{most}")
        await client.ask_size(size)

    @override
    async def want_replaced(self, birth: int) -> None:
        # the launcher hears it first, so that the end of that process is none of the job
        client = self._meeting.client
        await client.claim(f"{REPLACED}/{birth}", b"")
        await client.ask_to_go(birth)

    @override
    async def has_word(self, living: Sequence[int], rivals: Sequence[int]) -> bool:
        # a store that cannot be reached has no word to give
        client = self._meeting.client
        mine = bytes(msgpack.packb([self._peers[rank].uid for rank in living]))
        key = f"epochs/{self._job}/{self._epoch + 1}"
        try:
            if rivals and await client.find(f"{GIVEN_UP}/{self._settings.rank}", timeout_s=WORD_WITHIN_S) is not None:
                return False  # they have gone on, and need nobody's word
            held = await client.claim(key, mine, timeout_s=WORD_WITHIN_S)
            is_mine = self._me.uid in msgpack.unpackb(held)
            for rank in rivals if is_mine else ():
                await client.claim(f"{GIVEN_UP}/{self._births[rank]}", b"", timeout_s=WORD_WITHIN_S)
        except RendezvousError:
            return False
        return is_mine


def is_certain(end: Exit) -> bool:
    """Whether the process has ended; unknown, hence False, if its host is silent or has not come."""
    return end.why not in (Why.SILENT, Why.ABSENT)
