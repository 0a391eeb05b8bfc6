"""Communicator: the verbs on one group of ranks, groups, epochs, and the end.

A communicator lives on the event loop on which it was made; ``kfcomm.sync`` has the same verbs for programs
without one. Sub-groups are communicators too, over the same session. What few programs ask for (probes, timelines,
statistics) is imported when it is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from kfcomm.arrays import form_of
from kfcomm.arrays.devices.routes import Choice
from kfcomm.collectives.blobs import Blobs
from kfcomm.collectives.group import STRATEGY_KEY, UNNAMED, Group
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.kept import KeptBuffers
from kfcomm.collectives.mailbox import Mailbox
from kfcomm.collectives.on_device.calls import Paths
from kfcomm.collectives.on_device.verbs import DeviceVerbs
from kfcomm.collectives.persistent import Persistent
from kfcomm.common.arguments import checked_name, plain_text, whole_number
from kfcomm.common.sizes import seconds_of
from kfcomm.core.cause import Cause, CauseKind
from kfcomm.core.collective import GroupView
from kfcomm.engine.closing import LEAVE_WITHIN_S, Drain
from kfcomm.engine.session import Session
from kfcomm.errors import ConfigError, SessionClosed
from kfcomm.monitor.dumps import snapshot
from kfcomm.rendezvous import exit_report
from kfcomm.strategies import AnyStrategy, StrategySpec
from kfcomm.transports.shm.heap import Array
from kfcomm.types import Layout, Seconds
from kfcomm.world.epochs import NO_PLAN, EpochPlan, agree, next_epoch, settle

if TYPE_CHECKING:
    from kfcomm.monitor import Statistics
    from kfcomm.probe import Probe, Prober
    from kfcomm.world.improving import Improvement
    from kfcomm.world.prepared import PreparedEpoch


T = TypeVar("T")

ARRIVED = "kfcomm/arrived"
"""The first collective of an epoch: who completes it knows that all know of the epoch."""
DIGEST_NBYTES = 8


class Communicator(Persistent):
    """The collectives of one group of ranks. Made by ``kfcomm.init``, ``group`` and ``split``.

    Use it on its own event loop only. Every verb returns a handle of a collective that is already under way.
    """

    outlives = False
    """Whether collectives outlive a rank that is lost: those of an elastic one, while an ``Elastic`` is open."""

    def __init__(self, session: Session, view: GroupView, strategy: StrategySpec, name: str = "world") -> None:
        self.name = name
        self._session = session
        self._left = False
        self._follower: Communicator | None = None
        self._final: Statistics | None = None
        layout = session.layout_of(view)
        self._uids = tuple(session.network.births[rank] for rank in view.members)
        self._group = Group(session.engine, view, layout, strategy, session.timeout_s)
        heaps = session.network.heaps()
        self._group.heaps = heaps if len(set(layout.hosts)) == 1 else None
        self._group.kept = KeptBuffers() if view is session.world else None
        self._mailbox = Mailbox(session.engine, view, session.timeout_s)
        self._blobs = Blobs(self._mailbox, view, heaps, session.engine.links.traffic)
        self._paths, self._devices = self._take_devices(view)
        self._prober: Prober | None = None
        self._improvement = self._improving(strategy)
        session.engine.end_listeners.append(self._leave)
        session.drains.append(self._drains)

    def __repr__(self) -> str:
        state = "closed" if self._left or self._session.is_closed else "open"
        return f"<Communicator {self.name!r}, rank {self.rank} of {self.size}, {state}>"

    # ---------------------------------------------------------------- who and where

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return self._group.view.rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self._group.view.size

    @property
    def local_rank(self) -> int:
        """Rank of this process among those of the group on its host."""
        return self._group.layout.local_rank(self.rank)

    @property
    def local_size(self) -> int:
        """Number of ranks of the group on this host."""
        return len(self._group.layout.ranks_of(self._group.layout.hosts[self.rank]))

    @property
    def layout(self) -> Layout:
        """Hosts of the ranks of the group."""
        return self._group.layout

    @property
    def epoch(self) -> int:
        """Number of the membership."""
        return self._session.epoch

    @property
    def births(self) -> tuple[int, ...]:
        """The rank that each rank of the group had in the first epoch: who it is, whatever its number is now."""
        return self._uids

    def _improving(self, strategy: StrategySpec) -> Improvement | None:
        """Improvement of ``auto``; None on one host, where the links are known, and for other strategies."""
        layout = self._group.layout
        if layout.num_hosts == 1 or strategy != "auto" or layout.costs.rates is not None:
            return None
        from kfcomm.world.improving import Improvement
        from kfcomm.world.links import MOST_HOSTS, MOST_RANKS, PACE

        if layout.num_hosts > MOST_HOSTS or layout.size > MOST_RANKS:
            return None
        return Improvement(self._session, self._group, self._mailbox, self.name, PACE)

    @property
    def strategy(self) -> AnyStrategy:
        """The strategy in force in this group."""
        return self._group.strategy

    @property
    def route(self) -> Choice | None:
        """Route of device memory in this group, with the reason; None where no rank has a device."""
        choice, note = self._session.route_of(self._group.view.members), self._paths.note
        return choice if choice is None or not note else choice._replace(because=f"{choice.because}; {note}")

    def _take_devices(self, view: GroupView) -> tuple[Paths, DeviceVerbs]:
        """Ways for arrays in the memory of devices."""
        session, setup = self._session, self._session.devices
        choice = session.route_of(view.members)

        def new_group(name: str, members: Sequence[int]) -> tuple[GroupView, Layout]:
            made = session.groups.add(view, name, members)
            return made, session.layout_of(made)

        paths = Paths(self._group, self._mailbox, setup.device, setup.maker, choice, new_group, session.pool_of)
        return paths, DeviceVerbs(paths, setup.reports[session.rank].lack)

    # ---------------------------------------------------------------- when a rank dies

    async def agree(self, value: Any, *, timeout: Seconds | None = None) -> Any:
        """Fault-tolerant logical AND: the same result on all surviving ranks, even if some die during the call.

        For programs that handle ``PeerLost`` themselves: after a step, do all have it? Calls are matched by their order
        (with those of ``shrink``). A lost rank takes no part and delays no other: ULFM's ``MPIX_Comm_agree``.

        Args:
            value: bool, or an integer of 64 bits; the same kind on all ranks.
            timeout: seconds; None for the communicator's.

        Returns:
            True if all say True; of integers the bits that all have set.

        Raises:
            ConfigError: another kind of value; or this is not the communicator of all ranks.
            CollectiveMismatch: others have called ``shrink``, or given another kind.
            CollectiveTimeout: ranks that live have not called it; the next call takes it up, with the first value.
            Partitioned: too few ranks are left, and the others may live.
            PeerLost: the others have given this rank up.

        Cost: two messages of each rank to all others.
        """
        self._check_whole("agree")
        return await agree(self._session, value, self._seconds(timeout))

    async def shrink(self, *, timeout: Seconds | None = None) -> Communicator:
        """The communicator of the next epoch: that of the ranks that live, in their order, numbered from 0.

        All ranks that live call it, after a ``PeerLost`` or when they like; ULFM's ``MPIX_Comm_shrink``. It has this
        one's strategy where all ranks still have the same one and that has a name, else ``auto``. This communicator and
        its groups are over then: what is in flight raises ``EpochChanged``, as does whatever is called later; closing
        it closes the next one. A device goes with the process.

        Args:
            timeout: seconds; None for the communicator's.

        Raises:
            CollectiveTimeout: ranks that live have not called it; the next call takes it up.
            CollectiveMismatch: others have called ``agree``.
            Partitioned: too few ranks are left, and the others may live: they go on without this one, or they are too
                few, too. More than half of the epoch's ranks go on; any that know that all others have ended; of two
                halves the one that asks the store first.
            EpochChanged: the others have taken this rank for lost, and gone on without it.
            PeerLost: the others have given this rank up.

        Cost: an agreement, and what it takes to make a world; a few milliseconds for some ranks.
        """
        self._check_whole("shrink")
        made, _, _ = await self._succeed(b"", timeout=timeout)
        return made

    async def _succeed(
        self, part: bytes, *, plan: EpochPlan = NO_PLAN, timeout: Seconds | None = None,
        prepared: PreparedEpoch | None = None,
    ) -> tuple[Communicator, dict[int, bytes], bool]:  # fmt: skip
        """As ``shrink``; also what each rank that lives has given, by its rank before, and if the plan was carried out.

        Raises:
            Released: by the plan this rank does not go on.
        """
        strategy = self._strategy_below()
        # Sent along: the decision tells whether all ranks have one strategy, without another exchange.
        given = self.strategy.digest[:DIGEST_NBYTES] + part
        if prepared is not None and (prepared.plan != plan or not prepared.fits(self)):
            prepared = None
        session, said, is_planned = await next_epoch(self._session, given, self._seconds(timeout), plan, prepared)
        made = None if prepared is None else prepared.comm
        if made is None or made._session is not session:
            is_one = len({one[:DIGEST_NBYTES] for one in said.values()}) == 1
            made = Communicator(session, session.world, strategy if is_one else "auto", self.name)
        self._follower = made
        settle(session, made.barrier(ARRIVED, timeout=timeout), plan)
        return made, {rank: one[DIGEST_NBYTES:] for rank, one in said.items()}, is_planned

    def _check_whole(self, verb: str) -> None:
        self._check_open()
        if self._group.view is not self._session.world:
            raise ConfigError(f"{verb} is for all ranks of an epoch: call it on the communicator of the world")

    def _seconds(self, timeout: Seconds | None) -> float:
        timeout_s = seconds_of(timeout)
        return self._session.timeout_s if timeout_s is None else timeout_s

    # ---------------------------------------------------------------- groups and graphs

    def set_strategy(self, strategy: StrategySpec, *, timeout: Seconds | None = None) -> Handle[None]:
        """Change the graphs of this group while it works; every rank calls it, at the same place in its program.

        What was posted before the call runs on the old graphs; what is posted after it waits for the outcome, one
        small collective.

        Args:
            strategy: a name, rules by size (``{"<=64KiB": "star", "else": "ring"}``), a ``Strategy``, a
                ``GraphPair`` or a ``Graph``; the same graphs on every rank.
            timeout: seconds; None for the communicator's.

        Returns:
            A handle of the outcome; the call has its place in the program whether or not it is awaited at once.

        Raises:
            ConfigError: the strategy is unknown, or for another number of ranks.
            CollectiveMismatch: the ranks do not agree; the old strategy stays.
            CollectiveTimeout, CollectiveAborted, PeerLost: the old strategy stays on this rank. As with every
                collective, others may have been done by then; the ranks meet again at their next ``set_strategy``.
        """
        self._check_open()
        try:
            timeout_s = seconds_of(timeout)
            chosen = self._group.build(strategy)
        except Exception as error:
            # Else the other ranks, which may have given a valid one, would wait until their timeout.
            self._group.refuse(STRATEGY_KEY, error)
            raise
        return self._group.swap(chosen, timeout_s)

    async def group(
        self, ranks: Iterable[int], name: str = "group", *, strategy: StrategySpec | None = None,
        timeout: Seconds | None = None,
    ) -> Communicator:  # fmt: skip
        """A communicator of some of this group's ranks, in the order given; only these call it.

        Args:
            ranks: ranks of this group, this one among them.
            name: part of the new group's identity.
            strategy: None for this group's (``auto``, if that is one of the caller's own graphs).
            timeout: seconds to wait for the others; None for the communicator's.

        Raises:
            ConfigError: a rank is out of range, repeated, or this one is missing.
            CollectiveTimeout: not all members called it alike.
        """
        self._check_open()
        name = checked_name(name)
        seconds_of(timeout)
        members = tuple(self._check_rank("member", rank) for rank in ranks)
        if len(set(members)) < len(members):
            raise ConfigError(f"expected each rank once in a group, got {list(members)}")
        if self.rank not in members:
            raise ConfigError(f"rank {self.rank} is not a member of the group {list(members)}: only members call it")
        view = self._session.groups.add(self._group.view, name, members)
        chosen = await self._placed(self._strategy_below) if strategy is None else strategy
        made = Communicator(self._session, view, chosen, name)
        # A rank that gave other arguments has another group: it is missed here, not in the first call.
        try:
            await made.barrier("group", timeout=timeout)
        except BaseException:
            made._leave()
            raise
        return made

    def _placed(self, ask: Callable[[], T]) -> Handle[T]:
        """Result of ``ask`` at this place in the program: after the outcome of a pending ``set_strategy``."""
        answer: Handle[T] = Handle(loop=self._group.engine.loop)
        self._group.in_order(lambda: None if answer.done() else answer.set_result(ask()))
        return answer

    def _strategy_below(self) -> str:
        """The name of the strategy in force, if another group can have it, too."""
        mine = self.strategy
        with contextlib.suppress(ConfigError):
            if self._group.build(mine.name).digest == mine.digest:
                return mine.name
        return "auto"

    async def split(
        self, color: int | str | None, key: int = 0, name: str = "split", *, timeout: Seconds | None = None
    ) -> Communicator | None:
        """A communicator of the ranks that give the same ``color``, ordered by ``key``, then rank; all call it.

        ``None`` as color takes part in no group, and gets None.
        """
        mine = [one if (number := whole_number(one)) is None else number for one in (color, key)]
        said = await self.all_gather_object(mine, timeout=timeout)
        color = said[self.rank][0]
        if color is None:
            return None
        members = [rank for _, rank in sorted((one[1], rank) for rank, one in enumerate(said) if one[0] == color)]
        # the first one's, which may be True where another's is 1
        title = f"{plain_text(name)}/{said[members[0]][0]}"
        return await self.group(members, title, timeout=timeout)

    def set_timeout(self, timeout: Seconds) -> None:
        """Calls of this group that follow have this timeout, unless they are given one; this rank's alone.

        Args:
            timeout: seconds, or a ``timedelta``.

        Raises:
            ConfigError: it is not above 0.
        """
        timeout_s = seconds_of(timeout)
        if not timeout_s or timeout_s < 0:
            raise ConfigError(f"timeout={timeout!r} must be a number of seconds above 0")
        self._group.timeout_s = timeout_s
        self._group.forget()  # cached plans have the former one
        self._mailbox.timeout_s = timeout_s

    def refuse(self, name: str | None, error: BaseException, *, steps: int = 1) -> None:
        """This rank's next call of this name is not made; the other ranks' calls raise ``CollectiveAborted`` with why.

        For what is built on a communicator, and finds out that a call cannot be made before it makes it.

        Args:
            name: of the call; None: the group's next number.
            error: why.
            steps: of the call: 2 where shapes go first (``scatter``, lists in ``all_to_all``, ``concat``).
        """
        self._check_open()
        self._group.refuse(checked_name(name) or UNNAMED, error, steps=steps)

    def mismatched(self, name: str, seq: int, message: str) -> None:
        """One use of a name fails with ``CollectiveMismatch``, on every rank that has called it or will.

        For what is built on a communicator, and finds out that the ranks' calls do not fit each other.

        Args:
            name: of the calls.
            seq: which use of the name, from 0.
            message: the whole story: what the ranks have called.
        """
        self._check_open()
        engine, group, name = self._session.engine, self._group.view.id, checked_name(name)
        cause = Cause(CauseKind.MISMATCH, self._session.rank, message)
        # Uses that run outside the router are found among the live ones only once they have entered.
        engine.enter_all()
        for collective in engine.router.live:
            if (collective.group.id, collective.key.name, collective.seq) == (group, name, seq):
                engine.abort(collective, cause)
                return
        engine.failures.aborted_elsewhere(group, name, seq, cause)  # if it is called here later, as on other ranks
        if engine.control is not None:
            engine.control.abort(group, name, seq, cause.to_wire())

    # ---------------------------------------------------------------- memory

    @property
    def shares_memory(self) -> bool:
        """Whether there are several ranks in this group, on one host, that share the memory in which ``empty`` is."""
        heaps = self._group.heaps
        return self.size > 1 and heaps is not None and heaps.empty(1) is not None

    def empty(self, shape: int | Sequence[int], dtype: Any = np.float32) -> Array:
        """An array of unknown content that the other ranks of this host can read where it is (*symmetric memory*).

        It is an ordinary NumPy array, to be used for anything; torch, JAX and DLPack take it without a copy. An
        ``all_reduce`` of more than 1 MiB by strategy ``direct`` (which is ``auto`` on one host) whose ranks give such
        arrays copies nothing of what it is given, and less of its result if ``out`` is one; see "Arrays that need no
        copy". Its memory is free again when the last view of it is gone, also after the communicator's end. In a forked
        child it is the parent's memory.

        Args:
            shape: of the array.
            dtype: of its elements; any that kfcomm exchanges.

        Returns:
            A C-contiguous array. Where the ranks of this group share no memory (several hosts, other links, a world of
            one), or the system gives no more, it is in ordinary memory, which is logged once.

        Raises:
            ConfigError: there can be no such array.

        Cost: some 5 µs, and a page fault for each 4 KiB that is touched first, unless an array as large has ended.
        """
        self._check_open()
        form, element = form_of(shape, dtype)
        heaps = self._group.heaps
        room = None if heaps is None else heaps.empty(math.prod(form) * element.itemsize)
        if room is None:
            self._session.say_unshared()
            return np.empty(form, element)
        return room.view(element).reshape(form)

    # ---------------------------------------------------------------- diagnosis and the end

    async def synchronize(self) -> None:
        """Wait until every collective of device memory that this rank has begun in this group is complete there.

        The handle of such a collective is done when the result is ready on the caller's stream, before the device has
        made it; what fails after that is raised here, or by the next call for device memory. Not waited for are
        messages, and calls of two steps (``scatter``, lists, ``concat``): it is complete on the caller's stream.

        Raises:
            CollectiveError: one of them has failed since its handle was done; the first of them, once.
        """
        await self._devices.synchronize()

    async def probe(self, *, nbytes: int = 1 << 20, rounds: int = 3, timeout: Seconds | None = None) -> Probe:
        """Measure latency and bandwidth between every two ranks, in both directions; every rank calls it.

        Along the links that collectives use; opens those that are not open. Pairs take turns, so that none measures
        while another uses the ports of its hosts. What else goes on meanwhile disturbs the figures, and they it.

        Args:
            nbytes: of the first message whose bandwidth is measured, at most 32 MiB; larger ones follow, up to 32 MiB,
                until one takes 20 ms. The same on every rank.
            rounds: 1 to 32, how many messages of that size are sent each way; the best one counts. Of round trips
                eight times as many. The same on every rank.
            timeout: seconds for each pair of ranks; None for the communicator's.

        Returns:
            The same on every rank; see ``kfcomm.probe.Probe``.

        Raises:
            ConfigError: the arguments cannot work (also for the other ranks' calls: ``CollectiveAborted``).
            CollectiveMismatch: the ranks give unlike arguments.
            CollectiveTimeout, PeerLost: a rank did not answer, or is gone; the message names it. The other ranks, which
                do not measure with it, may get ``CollectiveAborted`` with that message.

        Cost:
            With h hosts of p ranks (h−1)·p² + p(p−1)/2 turns, each of about rounds + 2 messages of 20 ms or of
            ``nbytes`` bytes both ways; memory for one such message.
        """
        self._check_open()
        if self._prober is None:
            from kfcomm.probe import Prober

            session, view, layout = self._session, self._group.view, self.layout
            names = session.network.host_names
            hosts = tuple(names[view.members[rank]] for rank in layout.masters) if names else ()
            self._prober = Prober(session.engine, view, layout, session.timeout_s, hosts)
        return await self._prober.run(nbytes, rounds, timeout)

    def dump(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """Record of this process's latest calls and waits, fit for JSON; written to ``path`` if given."""
        return snapshot(self._session, path)

    @property
    def _latest(self) -> Communicator:
        return self if self._follower is None else self._follower._latest

    def statistics(self) -> Statistics:
        """Counts and times so far: bytes by peer and link, calls by key, waits by rank.

        Keys and strategies are those of this group, peers those of the process. It can be read at any time, on any
        thread, also after the end (of a sub-group: as at its end); reading changes nothing that others read. Cost: some
        2 µs per key. Of a world that has shrunk: those of the latest epoch.

        Raises:
            ConfigError: monitoring is off.
        """
        if self._final is not None:
            return self._final
        if self._follower is not None:
            return self._follower.statistics()
        from kfcomm.monitor.statistics import statistics_of

        return statistics_of(self._session, self._group, self._mailbox.group_ids)

    async def close(self) -> None:
        """End it: of the world, everything is closed; of a sub-group, only this view of it. Never hangs.

        A world that is closed waits until the other ranks need nothing more of this one, and says so when that lasts:
        at most 5 s, and a rank that serves the store 10 s more. It waits no longer than 1.5 s where a rank is lost, or
        an exception leaves ``async with`` (Ctrl-C, too). Once cancelled it waits no more.

        What the device is still making of collectives whose handles are done is waited for, up to 5 s, and messages
        that were sent, until they are received or their time is up (of a sub-group up to 5 s). What else is in flight
        fails, here and, where it was not complete, on the other ranks. What the others post later fails with
        ``PeerLost`` if it needs a rank that has closed its world; a rank that has only closed its view of a sub-group
        is missed there until the timeout. When all members have closed a sub-group, nothing is left of it.
        """
        if self._group.view is self._session.world:
            exit_report.report_leaving()
            await self._session.close()
        elif not self._left:
            for drain in self._drains():
                await asyncio.wait([drain.done], timeout=min(drain.within_s, LEAVE_WITHIN_S))
            # Before the group is forgotten, as its counts go with it.
            self._final = self.statistics() if self._session.engine.meter is not None else None
            self._forget_group()

    def _forget_group(self) -> None:
        """Close a sub-group at once, without a last look at its statistics, whose first costs some milliseconds."""
        ids = self._paths.group_ids()
        self._leave()
        ids |= {self._group.view.id, *self._mailbox.group_ids(), *(self._prober.group_ids() if self._prober else ())}
        ids |= self._improvement.group_ids() if self._improvement else set()
        self._session.leave_groups(self._group.view.id, ids, f"{self._called} has closed group {self.name!r}")

    def _drains(self) -> list[Drain]:
        """Work still under way after its handles are done."""
        device, eager = self._devices.drained(), self._mailbox.eager.drained()
        found = [] if device is None else [Drain(device, LEAVE_WITHIN_S, lambda: "for its device")]
        if eager is not None:
            found.append(Drain(eager, self._session.timeout_s, self._mailbox.eager.awaited))
        return found if self._improvement is None else [*self._improvement.drains(), *found]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._session.hurry()
        await self.close()

    def _leave(self) -> None:
        if not self._left:
            self._left = True
            self._group.forget()
            if self._group.kept is not None:
                self._group.kept.withdraw()
            self._session.engine.end_listeners.remove(self._leave)
            self._session.drains.remove(self._drains)
            if self._improvement is not None:
                self._improvement.close()
            self._paths.close()
            self._blobs.close()
            reason = self._session.why_closed or f"{self._called} has closed group {self.name!r}"
            self._mailbox.close(reason, self._session.over)

    def _check_open(self) -> None:
        self._session.check_open()
        if self._left:
            raise SessionClosed(f"{self._called} has closed group {self.name!r}")

    @property
    def _called(self) -> str:
        """This rank, in words."""
        view = self._group.view
        return view.called(view.rank)
