"""Device slots: collectives of ranks of one host that map each other's device memory.

Each rank copies its contribution to exported memory. Then it posts a *record* of where that is: a small all_gather in
host memory under the key of the call, in a group of its own (the same members). When the records of all ranks have
arrived, all contributions are complete: each rank folds or copies what it needs straight into its target. See
``slot_call``.

The first call of a group makes the ranks *meet*: each exports memory, maps that of the others, and compiles a kernel.
If any rank cannot, all go through the host from then on (``staged``), and each that could not logs why::

    state    event                                      next               calls
    -------  -----------------------------------------  -----------------  -------------------------------------
    idle     a call comes                               meeting
    meeting  all have said whether they can share       ready, or staged   wait
    meeting  the meeting fails                          idle               those that wait fail with it
    ready                                                                  in device slots
    staged                                                                 through the host

Failures: the hosts alone order the ranks. A contribution is complete before its record is posted, and no stream ever
waits for another process, so a killed or stopped rank leaves no other device waiting. Once a rank is known to be lost,
its memory is not read any more. What is being read at the moment of its death stays mapped until this rank unmaps it
(decision 081).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kfcomm.arrays.devices import HANDLE_NBYTES, Flat, Sharing, SharingDevice, Stream
from kfcomm.collectives.compiled import MAX_NAMES, CompiledName
from kfcomm.collectives.group import Group, GroupTurns
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.on_device.calls import DevicePath
from kfcomm.collectives.on_device.marks import Marks
from kfcomm.collectives.on_device.places import NamedUse, Places, digest_of
from kfcomm.collectives.on_device.slot_call import RECORD, SlotCall
from kfcomm.collectives.on_device.staged import like
from kfcomm.collectives.plans import Plan, PlanKey
from kfcomm.core.deadlines import NEVER
from kfcomm.errors import InternalError
from kfcomm.types import Verb, override

if TYPE_CHECKING:
    from kfcomm.collectives.on_device.calls import DeviceCall

logger = logging.getLogger("kfcomm")

MAX_WAIT_STREAMS: Final = 16
"""See ``staged``."""
MEETING: Final = "\0meeting"
_ROOM_NBYTES: Final = 8
"""Of the number that tells how long exported memory is."""


class SlotsState(StrEnum):
    """States of a path, as in the table above."""

    IDLE = "idle"
    MEETING = "meeting"
    READY = "ready"
    STAGED = "staged"


class SharedMemory(NamedTuple):
    """Memory of all ranks, and the work on it; there once ranks begin to meet."""

    sharing: Sharing
    places: Places  # of this rank
    stream: Stream  # of all folds, on which nothing waits for other work


class Records(NamedTuple):
    """Exchange of records under one name."""

    name: CompiledName
    plan: Plan


class SlotsPath(DevicePath):
    """The calls of one group on this rank. Everything runs on the engine's loop.

    Args:
        group: its ranks.
        device: of this rank.
        staged: takes the calls where memory cannot be shared.

    Attributes:
        state: see the table above.
        acks: uses that this rank has acknowledged, to be sent with the next records.
    """

    def __init__(self, group: Group, device: SharingDevice, staged: DevicePath) -> None:
        self.state = SlotsState.IDLE
        self.group, self.engine = group, group.engine
        self.view = like(group.view, b"slots")
        # A record has no deadline of its own: it is a part of a call.
        self.inner = Group(group.engine, self.view, group.layout, "auto", NEVER)
        self.marks = Marks(group.engine.reactor)
        self.device = device
        self.turns = GroupTurns()
        self.acks: deque[NamedUse] = deque(maxlen=1 << 12)
        self._staged = staged
        self._shared: SharedMemory | None = None
        self._wait_streams: dict[Stream, Stream] = {}
        self._mapped: dict[tuple[bytes, int], Flat] = {}
        self._names: dict[str, Records] = {}
        self._waiting: dict[DeviceCall, None] = {}
        self._under_way: dict[DeviceCall, SlotCall] = {}
        self._is_closed = False

    def __len__(self) -> int:
        """Number of calls with something under way."""
        return len(self._under_way) + len(self._waiting)

    @property
    @override
    def name(self) -> str:
        return "device slots"

    @override
    def begin(self, call: DeviceCall) -> None:
        if self.state is SlotsState.READY:
            self._begin(call)
        elif self.state is SlotsState.STAGED:
            self._staged.begin(call)
        else:
            self._waiting[call] = None
            if self.state is SlotsState.IDLE:
                self._meet()

    @override
    def give_up(self, call: DeviceCall) -> None:
        if call in self._waiting:
            del self._waiting[call]
            self.never_began(call.key, call.head.seq)
        elif call in self._under_way:
            self._under_way[call].give_up()
        else:
            self._staged.give_up(call)

    @override
    def never_began(self, key: str, seq: int) -> None:
        if self.state is not SlotsState.READY:
            self._staged.never_began(key, seq)
        self.turns.next(key).ready(lambda: self.engine.leave_out(self.view, key, seq + 1))
        self.acknowledge(NamedUse(digest_of(key), seq))

    @override
    def hurry(self) -> None:
        self.marks.hurry()

    @override
    def group_ids(self) -> set[bytes]:
        return {self.view.id}

    @override
    def close(self) -> None:
        self._is_closed = True
        for one in list(self._under_way.values()):
            one.give_up()
        if self._shared is not None:
            self._shared.places.close()
            for handle, _ in self._mapped:
                self._shared.sharing.close(handle)
        self.marks.close()
        self._waiting.clear()
        self._mapped.clear()
        self._wait_streams.clear()
        self._names.clear()

    # ---------------------------------------------------------------- for calls

    @property
    def shared(self) -> SharedMemory:
        """Memory of all ranks, for calls that have begun."""
        if self._shared is None:
            raise InternalError("device slots are used before the ranks have met")
        return self._shared

    def wait_stream(self, stream: Stream) -> Stream:
        """A stream for copies that wait for a caller's stream: a held one holds up no other."""
        wait_stream = self._wait_streams.pop(stream, None)
        if wait_stream is None:
            wait_stream = self.device.stream(urgent=True)
            if len(self._wait_streams) >= MAX_WAIT_STREAMS:
                del self._wait_streams[next(iter(self._wait_streams))]
        self._wait_streams[stream] = wait_stream
        return wait_stream

    def memory(self, handle: bytes, nbytes: int) -> Flat:
        """Exported memory of another rank; mapped at its first use."""
        known = self._mapped.get((handle, nbytes))
        if known is None:
            known = self._mapped[handle, nbytes] = self.shared.sharing.open(handle, nbytes)
        return known

    def records(self, call: DeviceCall) -> Records:
        """The exchange of records under the name of a call."""
        inner, generation = self.inner, call.plans.generation
        if inner.plans.generation != generation:
            inner.plans = inner.plans.again(generation)
            self._names.clear()
        known = self._names.get(call.key)
        if known is None or known.plan.signature != call.signature:
            plan = inner.plans.of(PlanKey(Verb.ALL_GATHER, RECORD.dtype, RECORD.shape), call.key)
            # The signature is that of the call, so that ranks that differ in it notice.
            plan = replace(plan, signature=call.signature)
            form = RECORD.dtype, RECORD.shape, (inner.view.size, *RECORD.shape)
            if len(self._names) >= MAX_NAMES:
                self._names.clear()
            known = Records(CompiledName(inner, call.key, (Verb.ALL_GATHER,), plan, form), plan)
            self._names[call.key] = known
        return known

    def acknowledged(self, rank: int, uses: Iterable[NamedUse]) -> None:
        """Note that another rank does not read these uses any more."""
        for use in uses:
            self.shared.places.acknowledged(use, rank)

    def acknowledge(self, use: NamedUse) -> None:
        """Note that this rank does not read contributions to a use any more; the others hear it by a later record."""
        self.acks.append(use)
        if self._shared is not None:
            self._shared.places.acknowledged(use, self.view.rank)

    def forget(self, call: DeviceCall) -> None:
        """End a call with nothing under way any more. May be called again."""
        self._under_way.pop(call, None)

    def _begin(self, call: DeviceCall) -> None:
        try:
            one = self._under_way[call] = SlotCall(self, call)
        except Exception as error:  # noqa: BLE001  it belongs to the call
            self.never_began(call.key, call.head.seq)
            call.failed(error)
        else:
            one.begin()

    # ---------------------------------------------------------------- the meeting

    def _meet(self) -> None:
        """Export memory, and exchange its handles."""
        self.state = SlotsState.MEETING
        mine = np.zeros(1 + _ROOM_NBYTES + HANDLE_NBYTES, np.uint8)
        try:
            if self._shared is None:
                sharing = self.device.sharing()
                self._shared = SharedMemory(sharing, Places(sharing, self.view.size), self.device.stream(urgent=True))
            handle, room = self._shared.places.first()
            mine[:] = np.frombuffer(b"\1" + room.to_bytes(_ROOM_NBYTES, "little") + handle, np.uint8)
        except Exception as error:  # noqa: BLE001  of the device's library, perhaps: any of them means the same
            self._cannot(error)
        self._exchange(mine, self._map)

    def _map(self, rows: Any) -> None:
        """Map the memory of all others, and say whether that was possible."""
        can = bool(rows[:, 0].all())
        try:
            for rank, row in enumerate(rows if can else ()):
                if rank != self.view.rank:
                    room, handle = row[1:-HANDLE_NBYTES].tobytes(), row[-HANDLE_NBYTES:].tobytes()
                    self.memory(handle, int.from_bytes(room, "little"))
        except Exception as error:  # noqa: BLE001  as above
            self._cannot(error)
            can = False
        self._exchange(np.array([can], np.uint8), self._decide)

    def _decide(self, rows: Any) -> None:
        self.state = SlotsState.READY if rows.all() else SlotsState.STAGED
        waiting, self._waiting = list(self._waiting), {}
        for call in waiting:
            self.begin(call)

    def _exchange(self, mine: Any, then: Callable[[Any], None]) -> None:
        """Call ``then`` with the arrays of all ranks."""
        inner = self.inner
        plan = inner.plans.of(PlanKey(Verb.ALL_GATHER, mine.dtype, mine.shape), MEETING)
        result = np.empty((self.view.size, *mine.shape), mine.dtype)
        handle: Handle[Any] = Handle(loop=self.engine.loop)
        handle.when_done(self.engine.reactor, partial(self._met, then))
        operation = plan.operation(handle, mine, result.reshape(-1), plan.work, value=result)
        self.engine.post(plan.post(self.view, MEETING, 0), operation, None)

    def _met(self, then: Callable[[Any], None], done: Handle[Any]) -> None:
        error = None if done.cancelled() else done.exception()
        if self._is_closed:
            return
        if error is None:
            then(done.result())
            return
        self.state = SlotsState.IDLE
        for call in list(self._waiting):
            call.failed(error)

    def _cannot(self, error: Exception) -> None:
        me = self.view.called(self.view.rank)
        text = "%s cannot share memory of its device with other processes: in this group it goes through the host: %s"
        logger.warning(text, me, str(error))
