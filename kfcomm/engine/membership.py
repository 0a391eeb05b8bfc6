"""Membership of a job: state that ranks share in all epochs, and changes of membership in the job's store."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import msgpack

from kfcomm.engine.interfaces import Membership
from kfcomm.errors import ConfigError, KfcommError, RendezvousError
from kfcomm.rendezvous import exit_report
from kfcomm.rendezvous.identity import PeerInfo
from kfcomm.rendezvous.join import check_versions
from kfcomm.rendezvous.keyvalue import ASIDE, BOUNDS, ENTRY, GIVEN_UP, INVITED, JOINING, RELEASED, REPLACED, Exit, Why
from kfcomm.rendezvous.saved_costs import rates_of_rows
from kfcomm.rendezvous.settings import Settings
from kfcomm.types import Candidate, Costs, Layout, Rates, Wanted, override

if TYPE_CHECKING:
    from kfcomm.rendezvous.client import StoreClient
    from kfcomm.rendezvous.join import JobStore
    from kfcomm.transports.tls import Tls

LOOK_S = 15.0
WORD_WITHIN_S = 2.0
"""Bound of each question to the store of ranks that are half of all and ask whether they may survive, or that leave."""


class StoreMembership(Membership):
    """Membership of one epoch of a job with a store; ``uids`` are those of the peers, by rank."""

    def __init__(
        self, meeting: Meeting, peers: Sequence[PeerInfo], uids: Sequence[int], epoch: int, attempt: int, job: str
    ) -> None:
        self._meeting = meeting
        self._settings = meeting.settings
        self._peers = peers
        self._uids = uids
        self._epoch = epoch
        self._attempt = attempt
        self._job = job
        self._me = peers[uids.index(meeting.settings.rank)]

    @property
    @override
    def trouble(self) -> str:
        return "" if self._meeting.store is None else self._meeting.store.client.trouble

    @override
    def may_live(self, peer: int) -> bool:
        end = self._meeting.ends.get(self._uids[peer])
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
                return sorted([await self._with_aside(one) for one in fit])

    async def _with_aside(self, candidate: Candidate) -> Candidate:
        """Add a process's address for a prepared epoch; see `peer_of`."""
        aside = await self._meeting.client.find(f"{ASIDE}/{candidate.birth}")
        return candidate._replace(about=msgpack.packb([candidate.about, aside]))

    async def _was_let_in(self, candidate: Candidate) -> bool:
        """Whether the process was admitted before (it may be gone), or refused."""
        return await self._meeting.client.find(f"{ENTRY}/{candidate.birth}") is not None

    async def _fits(self, candidate: Candidate) -> bool:
        """Whether a process can be admitted; one of another version is sent the reason."""
        if candidate.birth in self._uids or candidate.birth in self._meeting.ends:
            return False
        try:
            peer = PeerInfo.from_wire(candidate.about)
            check_versions(self._me, [peer])
            check_checksums([self._me, peer])
        except KfcommError as error:
            await self._meeting.client.claim(f"{ENTRY}/{candidate.birth}", msgpack.packb(str(error)))
            return False
        return True

    @override
    async def welcome(self, num_old: int, uids: Collection[int], strategy: str) -> None:
        for uid in uids:
            await self._meeting.client.claim(f"{ENTRY}/{uid}", self._told(num_old, strategy))

    @override
    async def invite(self, num_old: int, uids: Collection[int], strategy: str) -> bool:
        told = self._told(num_old, strategy)
        # A process is invited once: one for which that has failed is admitted without.
        return all([await self._meeting.client.claim(f"{INVITED}/{uid}", told) == told for uid in uids])

    def _told(self, num_old: int, strategy: str) -> bytes:
        peers = [peer.to_wire() for peer in self._peers]
        told = [self._epoch, self._uids, peers, num_old, strategy, self._attempt]
        return bytes(msgpack.packb(told))

    @override
    async def give_up(self, uids: Collection[int]) -> None:
        for uid in uids:
            await self._meeting.client.claim(f"{GIVEN_UP}/{uid}", b"")

    @override
    async def let_go(self, uids: Collection[int]) -> None:
        me = self._settings.rank
        if me in uids and self._settings.launcher is not None:
            # the process tells its launcher itself, which hears it before it sees the process end
            exit_report.report_release()
            return
        if me in uids:
            with contextlib.suppress(RendezvousError):  # it leaves all the same
                await self._meeting.client.claim(f"{RELEASED}/{me}", b"", timeout_s=WORD_WITHIN_S)
            return
        for uid in uids:
            await self._meeting.client.claim(f"{RELEASED}/{uid}", b"")

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
    async def want_replaced(self, uid: int) -> None:
        # the launcher hears it first, so that the end of that process is none of the job
        client = self._meeting.client
        await client.claim(f"{REPLACED}/{uid}", b"")
        await client.ask_to_go(uid)

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
                await client.claim(f"{GIVEN_UP}/{self._uids[rank]}", b"", timeout_s=WORD_WITHIN_S)
        except RendezvousError:
            return False
        return is_mine


def is_certain(end: Exit) -> bool:
    """Whether the process has ended; unknown, hence False, if its host is silent or has not come."""
    return end.why not in (Why.SILENT, Why.ABSENT)


class Meeting(NamedTuple):
    """Meeting point of the first epoch, which stays open through all later epochs."""

    settings: Settings  # of this rank in the first epoch
    me: PeerInfo  # this process, as the others have known it since then
    mark: str  # in socket names: tells apart the worlds of one process
    store: JobStore | None  # None where the ranks found each other by other means
    tls: Tls | None
    ends: dict[int, Exit]  # reports of launchers on processes of any epoch, by uid

    @property
    def client(self) -> StoreClient:
        """Client of the job's store.

        Raises:
            RendezvousError: the job has no store.
        """
        if self.store is None:
            raise RendezvousError("these ranks joined without a store of kfcomm, which this call needs")
        return self.store.client


def peer_of(candidate: Candidate, rank: int, *, is_prepared: bool) -> PeerInfo:
    """Return a joining rank as its peers know it, in an epoch that is prepared, or in another one."""
    about, aside = msgpack.unpackb(candidate.about)
    return replace(PeerInfo.from_wire(aside if is_prepared and aside is not None else about), rank=rank)


def unix_name(meeting: Meeting, epoch: int, attempt: int) -> str:
    """Name of this process's Unix socket in an epoch."""
    return f"@kfcomm-{meeting.me.uid}-{meeting.mark}-{epoch}" + (f".{attempt}" if attempt else "")


def check_checksums(peers: Sequence[PeerInfo]) -> None:
    """Refuse checksums that are on for some ranks and off for others: they could not read each other's frames."""
    with_it = [peer.rank for peer in peers if peer.checksum]
    if with_it and len(with_it) < len(peers):
        without = next(peer.rank for peer in peers if not peer.checksum)
        raise ConfigError(f"checksum is on for rank {with_it[0]} and off for rank {without}: it has to be the same")


def layout_of(peers: Sequence[PeerInfo]) -> Layout:
    """Hosts of all ranks, and what messages between them cost."""
    costs = Costs.worst(peer.costs for peer in peers)._replace(rates=kept_rates(peers)[0])
    return Layout.of((peer.host for peer in peers), min(peer.num_cpus for peer in peers), costs)


def kept_rates(peers: Sequence[PeerInfo]) -> tuple[Rates | None, str]:
    """Rates between the hosts, as kept on each; or None, and why, if something was kept.

    Of each host the first rank that tells something counts, so that all ranks have the same rates.
    """
    firsts: dict[str, PeerInfo] = {}
    for peer in peers:
        if not firsts.setdefault(peer.host, peer).links and peer.links:
            firsts[peer.host] = peer
    return rates_of_rows([peer.host_name for peer in firsts.values()], [peer.links for peer in firsts.values()])
