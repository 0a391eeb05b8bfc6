"""One collective of device memory on one rank: from the caller's stream, through a path, back to that stream.

The life of a call::

    event                               what follows
    ----------------------------------  --------------------------------------------------------------------------
    the verb is called                  posted without a chunk: it has its number, a deadline, and can be missed
    (the path, any time)                its work is put on streams of the device
    enqueued: the result is behind      the caller's stream is made to wait for that place, the handle resolves;
    this place of a stream              the host has not waited for the device
    done: nothing on a stream touches   over on this rank
    its memory any more
    failed, here or elsewhere           over on all ranks; the handle raises, or, if it has resolved, the next call or
                                        ``synchronize`` does

Invariants: the memory of a call is kept alive by it, and the path keeps the call until no stream touches that. All
ranks choose the same path, from facts that all of them know. Paths exist from the beginning, to hear messages of
other ranks, unless no rank has a device: then they are not even imported. They touch no device before their first
order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from kfcomm.arrays.devices import Device, Mark, SharingDevice, Stream
from kfcomm.arrays.devices.host import PinnedPool
from kfcomm.arrays.devices.routes import Choice, Route
from kfcomm.collectives.compiled import NO_ARRAY, Compiled, CompiledCall
from kfcomm.collectives.group import Group
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.mailbox import Mailbox
from kfcomm.collectives.plans import Plan, PlanKey, Planner
from kfcomm.collectives.specs import Arguments
from kfcomm.core.cause import Cause, CauseKind
from kfcomm.core.collective import Collective, GroupView, shown
from kfcomm.engine.operation import Operation
from kfcomm.errors import CollectiveAborted, CollectiveMismatch, KfcommError, PeerLost
from kfcomm.strategies import AnyStrategy
from kfcomm.transports.base import BackendMaker, Part
from kfcomm.types import Layout, Verb

if TYPE_CHECKING:
    from kfcomm.core.signature import Signature

SLOTS_NBYTES = 512 << 10
"""Least message of device slots, for each rank of the group. A kernel waits for the time slice of its process; copies
to the host and back do not, so that below this size these and a slot of the host take less time."""

Ended: TypeAlias = "Callable[[DeviceCall, BaseException | None], None]"


@dataclass(frozen=True, slots=True, eq=False)
class DeviceOrder:
    """The request of a call, the same on every rank."""

    kind: PlanKey  # with the dtype of all parts
    key: str
    counts: tuple[Any, ...] = ()  # further values that must be the same on all ranks
    overlapping: bool = False  # further uses of the key may begin before this one is over
    # of several calls that are one to the caller: a rank that refuses them takes a number of the first alone
    first: Handle[Any] | None = None
    # common properties of calls under this name: if equal, the next one may use the cached plan
    alike: Arguments | None = None
    strategy: AnyStrategy | None = None  # of this call alone: it goes through the host, along these graphs


@dataclass(slots=True, eq=False)
class CallPlan:
    """Common properties of all calls of one kind under one name, whatever arrays they have."""

    order: DeviceOrder
    path: DevicePath
    plan: Plan
    # derived by the path: by the key of a step, or "" for the call itself
    memo: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBuffers:
    """Device, stream and memory of an order on this rank."""

    device: Device
    stream: Stream  # the caller's
    ready: Mark  # on that stream at the time of the call: behind it the sources may be read, and the targets written
    parts: tuple[Part, ...]  # flat sources and targets
    outcome: Callable[[], Any]  # makes the caller's result, once the caller's stream waits for the data


class DevicePath(Protocol):
    """Way in which the calls of one group are carried out on this rank. Everything runs on the engine's loop."""

    @property
    def name(self) -> str:
        """In a word, for signatures: ranks of a group take the same path."""
        ...

    launches: Any = None  # `Launches` of cached names, on a path where that is possible
    compiled_type: type[CompiledCall] = CompiledCall
    """Of cached plans of its calls with one array."""
    batch_type: type[CompiledCall] | None = None
    """The same of calls with several; None on a path where these have none."""

    def begin(self, call: DeviceCall) -> None:
        """Begin a call; called in the order of the program."""

    def give_up(self, call: DeviceCall) -> None:
        """Withdraw the parts of a failed call that are not on a stream yet."""

    def never_began(self, key: str, seq: int) -> None:
        """Note a call of this rank that failed before it began, and so fails on every rank."""

    def hurry(self) -> None:
        """Speed up: a caller waits for calls to be over."""

    def close(self) -> None:
        """Close the path; calls under way have failed."""

    def group_ids(self) -> set[bytes]:
        """Return the ids of further groups under which it posts, to be left with its own."""
        return set()


class DeviceCall:
    """One collective of device memory on this rank.

    Args:
        group: its ranks.
        plan: of the call.
        buffers: of the call.
        handle: of the caller.
        ended: called when it is over, with an error that the handle could not raise any more.
        priority: see `Operation`.

    Attributes:
        plans: those of its own strategy, or of the one in force when it was called.
        signature: value that all ranks must agree on.
        head: its collective in the runtime.
        is_over: done, or failed: its memory is touched only by work that is on a stream already.
        is_enqueued: the caller has its result.
        takes_result: its stream may take the result itself, however long it is held up.
    """

    takes_result = True

    __slots__ = (
        "_buffers", "_ended", "_has_begun", "device", "group", "handle", "head", "is_enqueued", "is_over",
        "key", "kind", "memo", "parts", "plan", "plans", "priority", "ready", "signature", "stream",
    )  # fmt: skip

    def __init__(
        self, group: Group, plan: CallPlan, buffers: DeviceBuffers, handle: Handle[Any], ended: Ended, priority: int = 0
    ) -> None:
        order = plan.order
        self.group = group
        self.kind, self.key = order.kind, order.key
        self.device, self.stream, self.ready, self.parts = buffers.device, buffers.stream, buffers.ready, buffers.parts
        self.plans = group.plans_along(order.strategy, order.key, None if order.first is None else order.first.seq)
        self.signature = plan.plan.signature
        self.memo = plan.memo
        self.priority = priority
        self.handle = handle
        self.is_over = self.is_enqueued = self._has_begun = False
        self.plan = plan
        self._buffers = buffers
        self._ended = ended

    @property
    def title(self) -> str:
        """Its name, for people."""
        return shown(self.key)

    def post(self, timeout_s: float | None, *, overlapping: bool, seq: int | None = None) -> None:
        """Take the name, and begin; the handle raises whatever prevents that.

        ``overlapping``: earlier uses of the name may still be under way. ``seq``: see ``Router.post``.
        """
        group, plan = self.group, self.plan.plan
        # To the runtime a call is an operation without chunks.
        self.head = head = Operation(_Ending(self), None, None, plan.work, priority=self.priority)
        head.nbytes = self._nbytes()
        post = plan.post(group.view, self.key, self.plans.generation, overlapping, seq)
        group.engine.post(post, head, group.timeout_s if timeout_s is None else timeout_s)
        self.handle.seq = group.last_seq(self.key)
        self._begin()

    def post_again(self, name: Compiled) -> bool:
        """Post the next use of a cached name; return False, with nothing begun, if anything is unusual."""
        self.head = head = name.operation(name, _Ending(self), NO_ARRAY, NO_ARRAY, None)
        head.nbytes = self._nbytes()
        if not self.group.engine.post_again(name.series, self.plans.stamp, head):
            return False
        self.handle.seq = head.seq
        self._begin()
        return True

    def enter(self, head: Operation, *, is_enqueued: bool) -> None:
        """Become known to the runtime, as a use of a cached name that was launched, or refused, where it was called.

        ``head``: its operation, which has no future yet.
        """
        self.head, collective = head, head.collective
        head.future = _Ending(self)
        series, router = collective.series, self.group.engine.router
        if series.version != router.names.version:  # questions may have to be sent for it
            signature = cast("Signature", series.signature)
            collective.series = router.series(series.group, series.key.name, signature, series.program, series.sizes)
        self.handle.seq = head.seq
        if not is_enqueued:
            self.handle.operation = head
        self.is_enqueued, self._has_begun = is_enqueued, True
        self.group.engine.enter(head)

    def _nbytes(self) -> int:
        return sum((one.source if one.target is None else one.target).nbytes for one in self.parts)

    def _begin(self) -> None:
        path = self.plan.path
        if self.is_over:
            path.never_began(self.key, self.handle.seq)
            return
        self.handle.operation = self.head
        self._has_begun = True
        path.begin(self)

    def enqueued(self, mark: Mark | None) -> None:
        """Complete the result behind this mark: the caller's stream waits for it, the caller does not.

        ``mark`` None: the result is on the caller's stream.
        """
        if self.is_over:
            return
        self.is_enqueued = True
        try:
            if mark is not None:
                self.device.wait(self.stream, mark)
            result = self._buffers.outcome()
        except Exception as error:  # noqa: BLE001  of the device or the caller's library: it belongs to the caller
            if not self.handle.done():
                self.handle.set_exception(error)
            return
        if not self.handle.done():
            self.handle.set_result(result)

    def done(self) -> None:
        """Finish it: no stream touches its memory any more."""
        if not self.is_over:
            self.head.collective.done_elsewhere()

    def failed(self, error: BaseException) -> None:
        """Fail it on all ranks, since it cannot be carried out on this one."""
        if not self.is_over:
            self.group.engine.abort(self.head.collective, cause_of(error, self))

    def over(self, error: BaseException | None) -> None:
        """Handle its end by the runtime."""
        self.is_over = True
        late = None
        if error is not None:
            if self._has_begun:
                self.plan.path.give_up(self)
            if not self.handle.done():
                self.handle.set_exception(error)
            elif self.is_enqueued:
                late = error
        self._ended(self, late)


class _Ending:
    """In place of a future: an operation tells its call how it ended."""

    __slots__ = ("call", "operation")

    def __init__(self, call: DeviceCall) -> None:
        self.call = call
        self.operation: Operation | None = None

    def done(self) -> bool:
        """Return False: only the operation ends it."""
        return False

    def set_result(self, _: Any) -> None:
        """Handle the completion of the operation."""
        self.call.over(None)

    def set_exception(self, error: BaseException) -> None:
        """Handle the failure of the operation."""
        self.call.over(error)


def is_enqueued(collective: Collective) -> bool:
    """Whether this is a device call whose caller has the result, though the device may not have made it."""
    ending = cast("Operation", collective.driver).future
    return type(ending) is _Ending and ending.call.is_enqueued


def cause_of(error: BaseException, call: DeviceCall) -> Cause:
    """Reason for which a call failed, in a form that travels."""
    view = call.group.view
    rank, mine = view.members[view.rank], view.called(view.rank)
    message = str(error) or type(error).__name__
    if isinstance(error, PeerLost):
        return Cause(CauseKind.LOST, error.rank, message)
    if isinstance(error, CollectiveMismatch):
        return Cause(CauseKind.MISMATCH, rank, message)
    if isinstance(error, MemoryError):
        where = f"{mine} has no memory for {call.title}"
        return Cause(CauseKind.REFUSED, rank, f"{where}: {message}")
    if isinstance(error, CollectiveAborted):
        return Cause(CauseKind.REFUSED, rank, message)
    kind = CauseKind.LINK if isinstance(error, KfcommError) else CauseKind.INTERNAL
    return Cause(kind, rank, f"{mine}: {message}")


NewGroup = Callable[[str, Sequence[int]], tuple[GroupView, Layout]]
"""The view and the layout of some of a group's ranks; see ``GroupTable.add``."""


@dataclass(slots=True, eq=False)
class Paths:
    """The paths of one group."""

    group: Group
    mailbox: Mailbox
    device: Device | None  # of this rank; None without a device
    maker: BackendMaker | None
    choice: Choice | None  # None where no rank has a device
    new_group: NewGroup  # makes the groups inside of hosts, and across them
    pool_of: Callable[[Device], PinnedPool]  # pinned memory for a device
    _made: dict[Route, DevicePath] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.choice is not None:
            self._made[Route.STAGED] = self._make(Route.STAGED)
            if self.choice.route is not Route.STAGED:
                self._made[self.choice.route] = self._make(self.choice.route)

    def plan(self, order: DeviceOrder) -> CallPlan:
        """Choose the path of an order. It depends on kind and name alone, and so is the same for the next call."""
        route, strategy = self._route(order), order.strategy
        # Graphs are followed on the way through the host alone, where the signatures of segments tell them.
        path = self._made[route if strategy is None else Route.STAGED]
        name = path.name if strategy is None or route is Route.STAGED else f"{strategy.name}, {path.name}"
        memory = "" if self.choice is not None and self.choice.mixed else "device"
        plan = self.group.plans.plan(Planner.elsewhere, order.kind, name, order.counts, memory)
        return CallPlan(order, path, plan)

    def never_began(self, key: str, seq: int) -> None:
        """Note a failed call of this rank whose path is not known."""
        for path in self._made.values():
            path.never_began(key, seq)

    @property
    def note(self) -> str:
        """Features that the backends in use lack on this host, for the reason of a route; empty if none is lacking."""
        backends = (getattr(path, "backend", None) for path in self._made.values())
        return "; ".join(one.note for one in backends if one is not None and one.note)

    @property
    def num_launched(self) -> int:
        """Uses of cached names that devices may not have passed."""
        return sum(0 if path.launches is None else len(path.launches) for path in self._made.values())

    def hurry(self) -> None:
        """Speed up: a caller waits for calls to be over."""
        for path in self._made.values():
            path.hurry()

    def group_ids(self) -> set[bytes]:
        """Return the ids of the groups that carry calls through the host."""
        return set().union(*(path.group_ids() for path in self._made.values()))

    def close(self) -> None:
        """Close the paths; calls under way have failed. May be called again."""
        made, self._made = self._made, {}
        for path in made.values():
            path.close()

    def _route(self, order: DeviceOrder) -> Route:
        choice, maker, kind = self.choice, self.maker, order.kind
        if choice is None or choice.route is Route.STAGED:
            return Route.STAGED
        if choice.route is Route.SLOTS:
            nbytes = math.prod(kind.shape) * kind.dtype.itemsize
            return Route.SLOTS if nbytes >= SLOTS_NBYTES * self.group.view.size else Route.STAGED
        if maker is None:
            return Route.STAGED
        if not maker.supports(kind.verb, kind.dtype, kind.op):
            return Route.STAGED
        if choice.route is Route.HIERARCHY:
            return Route.HIERARCHY if kind.verb is Verb.ALL_REDUCE and not order.counts else Route.STAGED
        is_even = kind.verb is not Verb.REDUCE_SCATTER or kind.shape[0] % self.group.view.size == 0
        return Route.BACKEND if is_even else Route.STAGED

    def _make(self, route: Route) -> DevicePath:
        from kfcomm.collectives.on_device.backed import BackendPath
        from kfcomm.collectives.on_device.staged import StagedPath

        device, maker = self.device, self.maker
        if route is Route.SLOTS and device is not None:
            from kfcomm.collectives.on_device.slots import SlotsPath

            return SlotsPath(self.group, cast("SharingDevice", device), self._made[Route.STAGED])
        if route is Route.STAGED or device is None or maker is None:
            return StagedPath(self.group, self.pool_of)
        if route is Route.BACKEND:
            return BackendPath(self.group, device, maker, self.mailbox)

        # Groups of the ranks of this host, and of those with the same place on every host.
        from kfcomm.collectives.on_device.hierarchy import HierarchicalPath

        layout, rank = self.group.layout, self.group.view.rank
        here = layout.ranks_of(layout.hosts[rank])
        place = here.index(rank)
        there = [layout.ranks_of(host)[place] for host in range(layout.num_hosts)]
        inside = self._subgroup("\0inside", here)
        across = self._subgroup("\0across", there)
        mailbox = Mailbox(inside.engine, inside.view, inside.timeout_s)
        return HierarchicalPath(
            BackendPath(inside, device, maker, mailbox, follows=False), StagedPath(across, self.pool_of), mailbox
        )

    def _subgroup(self, name: str, ranks: Sequence[int]) -> Group:
        view, layout = self.new_group(name, ranks)
        group = self.group
        return Group(group.engine, view, layout, "auto", group.timeout_s)
