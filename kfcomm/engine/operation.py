"""One collective in flight: carries out the decisions of its state machine at once.

It folds, stores and copies chunks in its memory, and gives links the bytes to send.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from kfcomm.core.cause import Cause, CauseKind
from kfcomm.core.deadlines import NEVER
from kfcomm.core.frame import Kind
from kfcomm.core.links import admit, may_send
from kfcomm.core.machine import FOLD, FOLD_LAST, FOLD_UP, INPUT, PARTIAL, PAYLOAD, CollectiveDriver
from kfcomm.core.program import Lane
from kfcomm.engine.memory import COPIED_NBYTES, Array, OperationMemory, Work
from kfcomm.engine.observer import BATCH
from kfcomm.engine.receiver import Payload
from kfcomm.types import override

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfcomm.core.collective import Collective, Series
    from kfcomm.engine.engine import Engine
    from kfcomm.engine.executors import SlotExecutor

CHUNK = int(Kind.CHUNK)
_NOTHING = np.empty(0, np.uint8)


class CachedName(Protocol):
    """Known properties of the next use of a name; implemented by ``collectives.compiled.Compiled``."""

    group: Any
    engine: Engine
    series: Series
    work: Any
    nbytes: int
    timeout_s: float
    first_s: float
    priority: int
    is_small: bool
    is_whole: bool


class Operation(OperationMemory, CollectiveDriver):
    """Driver of one collective, with its memory. It owns what links read for it: see ``transports.base.Owner``.

    It and its collective, and it and its future, drop their references to each other at the end: ten thousand finished
    operations are then no work for the garbage collector.

    Args:
        future: resolved with the caller's result, or rejected; its slot ``operation`` is emptied at the end. None: the
            caller polls ``done`` and asks for the ``result`` itself.
        source: flat input, or None where this rank gives nothing.
        result: flat memory of the result, or None where this rank keeps nothing.
        work: how they are folded and converted.
        value: the caller's result.
        finish: if given, the caller gets ``finish(value)``.
        priority: see ``transports.base.Link.send``.

    Attributes:
        engine: set when it is posted.
        executor: of the part that links do not carry out; None if they do all of it.
        is_over: it is complete or has failed.
        is_whole: it is one chunk, and what is folded lies in the result.
        is_cached: it is a use of a name that was used before; see ``again``.
        nbytes: of the result on this rank, or of the input where it gets none.
        failed: it has raised ``error``; its memory is not touched any more.
        posted_s: when it was posted, by the reactor's clock.
        timeout_s, due_s, told: see ``core.deadlines.Waiting``.
    """

    # Most stay what they are here: then they cost an operation neither time nor memory.
    engine: Engine
    is_over = failed = is_whole = is_cached = False
    error: BaseException | None = None
    executor: SlotExecutor | None = None
    value: Any = None
    finished_by: Callable[[Any], Any] | None = None
    priority = 0
    timeout_s = due_s = NEVER
    posted_s = 0.0
    told = 0

    def __init__(
        self,
        future: Any,
        source: Array | None,
        result: Array | None,
        work: Work,
        *,
        value: Any = None,
        finish: Callable[[Any], Any] | None = None,
        priority: int = 0,
    ) -> None:
        self.future = future
        self.given = _NOTHING if source is None else source
        self.out = _NOTHING if result is None else result
        self.nbytes = self.out.nbytes or self.given.nbytes
        self.work = work
        if value is not None:
            self.value = value
        if finish is not None:
            self.finished_by = finish
        if priority:
            self.priority = priority

    @classmethod
    def again(cls, name: CachedName, future: Any, source: Array, result: Array, value: Array | None) -> Self:
        """Make one use of a cached name: only its number and its arrays are new."""
        # All attributes are set in this frame: each further constructor would cost 0.2 µs.
        self = cls.__new__(cls)
        self.is_cached = True
        self.is_small = name.is_small
        self.is_whole = name.is_whole
        self.engine = name.engine
        self.work = name.work
        self.nbytes = name.nbytes
        self.future = future
        self.given = source
        self.out = result
        self.value = value
        self.posted_s = now_s = name.engine.reactor.time()
        self.timeout_s = name.timeout_s
        self.due_s = now_s + name.first_s
        if name.priority:
            self.priority = name.priority
        return self

    # What the machine decides is done at once. A payload is a `Payload`, or a view that may be read during the call.

    @property
    def seq(self) -> int:
        """Number of this use of its name."""
        return self.collective.seq

    @override
    def begin(self, machine: Collective) -> None:
        self.collective = machine
        machine.heard_s = self.posted_s
        executor = self.work.executor
        if executor is not None and (self.engine.slots.is_possible or not executor.needs_slot):
            executor(self).begin()
        else:
            # A cached use is not the first; while calls are observed, nothing is cached.
            if not self.is_cached:
                self.engine.begins(self)
            machine.start()

    @override
    def send(self, to: tuple[int, ...], lane: Lane, index: int, phase: int, source: int, payload: Any) -> None:
        # Held back where a destination may not have it yet: see ``admit``.
        engine, collective, executor = self.engine, self.collective, self.executor
        if source == PAYLOAD:
            payload.forwarded(engine.pool)
            data = payload.view
        else:
            data = self.to_send(lane, index, source)
        nbytes = len(data)
        series, links = collective.series, engine.links
        for rank in to if executor is None else executor.far(to, phase):
            peer = series.group.members[rank]
            sender = links.by_peer.get(peer) or links.towards(peer)
            link, state = sender.link, sender.state
            if link is None or link.needs_flush:
                links.dirty[sender] = None
            stamp = collective.stamp
            is_known = series in state.known and collective.deferred is None
            if is_known and collective.posted >> rank & 1:
                pass
            elif is_known and state.window.take(nbytes):
                stamp += 1
            else:
                before, admitted = admit(state, collective, rank, (lane, index, phase, source, payload), nbytes)
                for definition in before:
                    sender.send(definition)
                if admitted is None:
                    collective.sends += 1
                    continue
                stamp = admitted[7]
            if engine.observers is not None:
                for observer in engine.observers:
                    observer.sent(peer, self, nbytes)
            header = (CHUNK, series.key_id, collective.seq, series.signature_id, lane.number, phase, index, stamp)
            # Without payload too: who is done may block its loop or exit, so its frames must have left by then.
            if not (link or sender).send(header, data if nbytes else None, self, self.priority):
                collective.sends += 1
        if executor is not None:
            executor.show(lane, index, phase)

    @override
    def fold(self, tag: int, lane: Lane, index: int, payload: Payload | memoryview, first: bool) -> None:
        # FOLD_UP takes the long way: its result may be made in the link's memory.
        if self.is_whole and type(payload) is memoryview and tag != FOLD_UP:
            kernel, out = self._folding(), self.out
            own = self.given if first else out
            if tag == FOLD:
                kernel.fold(own, np.frombuffer(payload, out.dtype), out)
            else:
                kernel.last(own, np.frombuffer(payload, out.dtype), out, self.work.size)
            return
        view = payload if type(payload) is memoryview else payload.view
        if tag == FOLD_LAST:
            self.fold_last(lane, index, view, first)
        elif tag == FOLD_UP:
            self.fold_up(lane, index, view, first)
        else:
            self.fold_partial(lane, index, view, first)
        if type(payload) is not memoryview:
            payload.release(self.engine.pool)

    @override
    def hold(self, payload: Payload | memoryview) -> Payload:
        if type(payload) is memoryview:
            payload = Payload(payload, None, self.engine.receiver.lender)
        payload.keep(self.engine.pool)
        return payload

    @override
    def store(self, lane: Lane, index: int, payload: Payload | memoryview) -> None:
        if type(payload) is memoryview:
            # A chunk that is the whole result needs no bounds and no slices.
            if self.is_cached and lane.count == len(self.out) and lane.num_chunks == 1:
                self.out[:] = np.frombuffer(payload, self.out.dtype)
            else:
                self.write(lane, index, payload)
        else:
            if payload.owner is not self:
                self.write(lane, index, payload.view)
            else:
                self.written(lane, index, payload.view)
            payload.release(self.engine.pool)

    @override
    def release(self, payload: Payload | memoryview) -> None:
        if type(payload) is not memoryview:
            payload.release(self.engine.pool)

    @override
    def completed(self) -> None:
        engine, collective = self.engine, self.collective
        if self.executor is not None and not self.executor.combine():
            return
        # Tallied in batches: one by one would cost three times as much, for tallies that are in no cache.
        ended = engine.recorder.ended
        ended.append((collective.series, collective.seq, self.posted_s, monotonic(), self.nbytes))
        if len(ended) >= BATCH:
            engine.recorder.settle()
        engine.router.complete(collective)
        if engine.deadlines.inquiries:
            engine.deadlines.inquiries.pop(self, None)
        if engine.observers is not None:
            engine.tell_done(self)
        if self.future is None:
            self.is_over = True
        else:
            self.resolve()

    # Its end, for whoever waits.

    def look_at_once(self) -> None:
        """Poll for its end, if no descriptor signals it: the caller has nothing else to do."""
        if self.executor is not None:
            self.executor.look_at_once()

    def done(self) -> bool:
        """Whether it is over."""
        return self.is_over

    def cancel(self) -> bool:
        """End it everywhere; return False if it is over already."""
        if self.is_over:
            return False
        group, rank = self.collective.group, self.engine.rank
        message = f"{self.collective.title} was cancelled on {group.called(group.rank)}"
        self.engine.abort(self.collective, Cause(CauseKind.CANCELLED, rank, message))
        return True

    def give_up(self) -> None:
        """Cancel it, for a caller who was interrupted."""
        self.cancel()

    def sent(self) -> None:
        """A link no longer reads one of this operation's payloads."""
        if not self.failed:
            self.collective.was_read()

    def result(self) -> Any:
        """The caller's result, once it is over.

        Raises:
            KfcommError: it has failed.
        """
        if self.error is not None:
            raise self.error
        return self.value if self.finished_by is None else self.finished_by(self.value)

    def resolve(self) -> None:
        """Complete it: resolve its future."""
        self.is_over = True
        future = self.future
        if future is None:
            return
        self.future = future.operation = None  # leaves no cycle to the garbage collector
        if future.done():
            return
        try:
            outcome = self.result()
        except Exception as error:  # noqa: BLE001  of the caller's array library: it belongs to the caller, not to this loop
            future.set_exception(error)
        else:
            future.set_result(outcome)

    def reject(self, error: BaseException) -> None:
        """Fail it: reject its future, and touch no memory any more."""
        if self.executor is not None:
            self.executor.give_up()
        self.is_over = self.failed = True
        self.error = error
        future, self.future = self.future, None
        if future is not None:
            future.operation = None
            if not future.done():
                future.set_exception(error)

    # Its memory.

    def fold_up(self, lane: Lane, index: int, view: memoryview, first: bool) -> None:
        """Fold the last contribution of a partial result, which goes to the lane's parent next.

        It is made in the send buffer of the link, if that has space: then nothing is copied.
        """
        start, stop = self._bounds(lane, index)
        kernel = self.work.kernel or self._folding()
        nbytes = (stop - start) * kernel.accumulate_dtype.itemsize
        room: memoryview | None = None  # that the link sends from
        if nbytes > COPIED_NBYTES:
            collective = self.collective
            sender = self.engine.links.to(collective.group.members[lane.parent])
            if sender.link is not None and may_send(sender.state, collective, lane.parent, nbytes):
                room = sender.link.reserve(nbytes, self.priority)
        if room is None:
            self.fold_partial(lane, index, view, first)
            return
        own = self._part(lane, INPUT if first else PARTIAL, start, stop)
        made = np.frombuffer(room, kernel.accumulate_dtype)
        kernel.fold(own, self._contribution(kernel, view, stop - start), made)
        self._last = (lane, index, PARTIAL, room)

    def redirect(self, result: Array) -> None:
        """Move the result to other memory, with a copy of what has come so far."""
        self.out, self._last = result, None
        self.engine.links.redirect(self)
