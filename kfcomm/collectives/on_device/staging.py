"""One call of device memory on its way through the host.

A call is cut into *segments* (``segments``), and several are under way at a time, so that the copies to the host, the
network and the copies back overlap. The life of a segment::

    state      event                               next       action
    ---------  ----------------------------------  ---------  ------------------------------------------------------
    waiting    fewer than ``window`` segments of   fetching   it takes a block; its pieces are fetched, behind the
               its call have a block                          place of the caller's stream where they are ready
    fetching   the device says that they are here  here
    here       its turn comes                      posted     a collective of the host is posted, in place in the block
    posted     that is done                        putting    its pieces are put; behind the last put of the call
                                                              the result is complete (``DeviceCall.enqueued``);
                                                              that of a small call is put on the caller's stream
    putting    the device says that it is done     over       its block goes back; with the last, the call is done
    any        the call fails                      over       its block goes back, once no copy and no link uses it

Invariants: a block goes back once, and only when neither a copy nor a link uses it; after the call has failed
nothing is put on a stream any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from kfcomm.arrays.devices import Flat, Mark, Stream
from kfcomm.collectives.group import Turn
from kfcomm.collectives.on_device.carried import Carried, CarriedPlan
from kfcomm.collectives.on_device.segments import Piece, Segment, SegmentPlace, segments_of
from kfcomm.common import do_nothing
from kfcomm.core.collective import shown
from kfcomm.errors import InternalError
from kfcomm.types import Verb

if TYPE_CHECKING:
    from kfcomm.arrays.devices.host import PooledBlock
    from kfcomm.collectives.on_device.calls import DeviceCall
    from kfcomm.collectives.on_device.staged import StagedPath

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Heard: TypeAlias = "Callable[[BaseException | None], None]"
Step: TypeAlias = "Callable[[_Staged], None]"

_EMPTY = np.empty(0, np.uint8)

SMALL_NBYTES = 256 << 10
"""Up to here the result of a call of one segment is put on the caller's stream itself. That may be held up, and the
block with it, which no other segment of the call waits for."""


class StagingStreams(NamedTuple):
    """Streams for the copies of a call; see ``staged``."""

    wait_stream: Stream
    inward: Stream
    outward: Stream


class StagingState(StrEnum):
    """States of a segment, as in the table above."""

    WAITING = "waiting"
    FETCHING = "fetching"
    HERE = "here"
    POSTED = "posted"
    PUTTING = "putting"
    OVER = "over"


@dataclass(slots=True, eq=False)
class _Staged:
    """A segment of a call under way, with its block; ``memory`` is that, in the call's dtype."""

    segment: Segment
    turn: Turn
    plan: CarriedPlan | None = None
    state: StagingState = StagingState.WAITING
    block: PooledBlock | None = None
    memory: Array = field(default_factory=lambda: _EMPTY)
    carried: Carried | None = None


class _Known(NamedTuple):
    """Segments of all calls of one name, and plans by numbers of elements."""

    segments: list[Segment]
    plans: dict[int, CarriedPlan]
    is_small: bool  # see ``SMALL_NBYTES``


class Staging:
    """One call under way."""

    def __init__(self, path: StagedPath, call: DeviceCall) -> None:
        self._path = path
        self._call = call
        self._device = call.device
        self._streams = path.streams(call)
        known: _Known | None = call.memo.get("")
        if known is None:
            known = call.memo[""] = _known(call, path)
        self._plans, segments, self._is_small = known.plans, known.segments, known.is_small
        self._staged = [_Staged(segment, path.turns.next(call.key)) for segment in segments]
        self._num_begun = self._num_held = self._num_posted = 0
        self._num_left = len(segments)
        self._to_put = sum(1 for segment in segments if segment.put)
        self._copying = 0  # times that the device has yet to say that copies are done
        self._is_over = False
        self._is_ready = False  # the caller's stream is known to be past ``call.ready``
        self._asks_if_ready = False
        self._when_ready: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Put the next copies on streams, and post segments that need no copy."""
        self._try(self._begin)

    def _begin(self) -> None:
        call, device, wait_stream = self._call, self._device, self._streams.wait_stream
        device.wait(wait_stream, call.ready)
        is_alone = self._path.view.size == 1
        if is_alone or (call.kind.verb is Verb.BROADCAST and call.kind.root == self._path.view.rank):
            for source, target in call.parts:
                if target is not None and target is not source and source.nbytes:
                    device.copy(source, target, wait_stream)
        if is_alone:
            self._finish_alone()
        else:
            if not self._staged[0].segment.fetched:  # else its copy tells
                self._ask_if_ready()
            self._fill()

    def _finish_alone(self) -> None:
        """End a call in a group of one rank: the result of every verb is its input, which has been copied."""
        wait_stream = self._streams.wait_stream
        try:
            self._call.enqueued(self._device.mark(wait_stream))
        finally:
            self._notify(wait_stream, self._is_copied)

    def _is_copied(self, error: BaseException | None) -> None:
        if error is not None:
            self._failed(error)
        elif not self._is_over:
            self._end()

    # ---------------------------------------------------------------- waiting, fetching, here

    def _fill(self) -> None:
        """Begin further segments, up to the size of the window."""
        while not self._is_over and self._num_begun < len(self._staged) and self._num_held < self._path.window:
            staged = self._staged[self._num_begun]
            self._num_begun += 1
            self._num_held += 1
            staged.state = StagingState.FETCHING
            try:
                self._prepare(staged)
            except Exception as error:  # noqa: BLE001  no memory on the host, perhaps
                self._failed(error)
                self._give_back(staged)
                return
            if staged.segment.fetched:
                self._once_safe(staged, self._fetch, in_order=True)
            else:
                self._is_here(staged)

    def _prepare(self, staged: _Staged) -> None:
        count = staged.segment.count
        staged.plan = self._plans.get(count)
        if staged.plan is None:
            staged.plan = self._plans[count] = CarriedPlan(self._path, self._call, count)
        dtype, room = self._call.kind.dtype, staged.segment.room
        if room:
            staged.block = self._path.pool_of(self._device).take(room * dtype.itemsize)
            staged.memory = staged.block.view.view(dtype)
        else:
            staged.memory = np.empty(0, dtype)

    def _once_safe(self, staged: _Staged, copy: Step, *, in_order: bool) -> None:
        """Copy when the caller's memory is ready: at once if ``in_order``, where a stream puts the copy behind that."""
        begin = partial(self._go_on, staged, copy)
        # A copy of memory that is not pinned may block this thread until its stream comes to it, and the stream may, by
        # way of other ranks, wait for this thread.
        if self._is_ready or (in_order and (staged.block is None or staged.block.is_pinned())):
            self._try(begin)
        else:
            self._when_ready.append(begin)
            self._ask_if_ready()

    def _ask_if_ready(self) -> None:
        if not self._asks_if_ready:
            self._asks_if_ready = True
            self._notify(self._streams.wait_stream, self._ready)

    def _ready(self, error: BaseException | None) -> None:
        """Continue after the caller's stream: the sources may be read, and the targets written."""
        if error is not None:
            self._failed(error)
        self._is_ready = True
        waiting, self._when_ready = self._when_ready, []
        for copy in waiting:
            self._try(copy)

    def _fetch(self, staged: _Staged) -> None:
        stream = self._streams.inward if self._is_ready else self._streams.wait_stream
        try:
            for piece in staged.segment.fetched:
                source = self._call.parts[piece.part].source[piece.start : piece.stop]
                self._device.fetch(source, staged.memory[piece.place], stream)
        finally:
            self._notify(stream, partial(self._go_on, staged, self._is_fetched))

    def _is_fetched(self, staged: _Staged) -> None:
        if not self._is_ready:  # the copy was behind that
            self._ready(None)
        self._is_here(staged)

    def _is_here(self, staged: _Staged) -> None:
        staged.state = StagingState.HERE
        staged.turn.ready(partial(self._post, staged))

    # ---------------------------------------------------------------- posted

    def _post(self, staged: _Staged) -> None:
        """Post the segment whose turn has come."""
        staged.state = StagingState.POSTED
        self._num_posted += 1
        staged.carried = Carried(self._path.engine.reactor, partial(self._go_on, staged, self._has_result))
        try:
            if staged.plan is None:
                raise InternalError("a segment was posted before its plan was made")
            staged.plan.post(staged.carried, self._call, staged.segment, staged.memory)
        except Exception as error:  # noqa: BLE001  more names in flight than there can be, perhaps
            staged.carried.set_exception(error)

    def _has_result(self, staged: _Staged) -> None:
        if staged.segment.put:
            self._once_safe(staged, self._put, in_order=self._is_small)
        else:
            self._segment_over(staged)

    # ---------------------------------------------------------------- putting, over

    def _put(self, staged: _Staged) -> None:
        staged.state = StagingState.PUTTING
        is_last = self._is_small and (staged.block is None or staged.block.is_pinned())
        stream, mark = self._call.stream if is_last else self._streams.outward, None
        try:
            for piece in staged.segment.put:
                target = _target(self._call, piece)[piece.start : piece.stop]
                self._device.put(staged.memory[piece.place], target, stream)
            self._to_put -= 1
            if not self._to_put:
                mark = None if is_last else self._device.mark(stream)
                self._call.enqueued(mark)
        finally:
            self._notify(stream, partial(self._go_on, staged, self._segment_over), mark, lazily=is_last)

    def _segment_over(self, staged: _Staged) -> None:
        self._give_back(staged)
        self._num_left -= 1
        if self._num_left:
            self._try(self._fill)
        elif any(one.segment.put for one in self._staged):
            self._end()
        else:
            self._try(self._end_without_result)

    def _end_without_result(self) -> None:
        self._call.enqueued(self._device.mark(self._streams.outward))
        self._end()

    def _end(self) -> None:
        self._is_over = True
        self._forget_if_at_rest()
        self._call.done()

    def _give_back(self, staged: _Staged) -> None:
        """Give back the block of a segment, which no copy and no link uses any more."""
        if staged.state is StagingState.OVER:
            return
        staged.state = StagingState.OVER
        staged.memory = _EMPTY
        self._num_held -= 1
        if staged.block is not None:
            staged.block.release()
            staged.block = None
        self._forget_if_at_rest()

    def _forget_if_at_rest(self) -> None:
        if self._is_over and not self._num_held and not self._copying:
            self._path.forget(self._call)

    # ---------------------------------------------------------------- failures

    def _go_on(self, staged: _Staged, step: Step, error: BaseException | None = None) -> None:
        """Run the next step of a segment; if the call is over, give its block back instead."""
        if error is not None:
            self._failed(error)
        if self._is_over:
            self._give_back(staged)
        else:
            step(staged)

    def _try(self, step: Callable[[], None]) -> None:
        """Run a step; its error fails the call."""
        try:
            step()
        except Exception as error:  # noqa: BLE001  of the device's library, perhaps: it belongs to the call
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        """Fail the call. The other ranks hear the reason first, then the outcome of its segments."""
        if not self._is_over:
            self._call.failed(error)
            self.give_up()

    def give_up(self) -> None:
        """Withdraw posted segments of a failed call, take the numbers of the others, and use no memory again."""
        if self._is_over:
            return
        self._is_over = True
        unposted = self._staged[self._num_posted :]  # they are posted one after the other
        for staged in self._staged:
            if staged.state is StagingState.HERE:
                self._give_back(staged)
            elif staged.state is StagingState.POSTED and staged.carried is not None:
                staged.carried.cancel()
        for index, staged in enumerate(unposted):  # the turn of the first takes the numbers of all
            staged.turn.ready(do_nothing if index else partial(self._leave_out, staged.segment.index))
        self._forget_if_at_rest()

    def _leave_out(self, index: int) -> None:
        """Abandon the segments from the first unposted one on, since its turn has come."""
        path, key, seq = self._path, self._call.key, self._call.head.seq
        view, number = path.number(seq, index)
        message = f"{view.called(view.rank)} gave up its call of {shown(key)}"
        path.engine.refuse(view, key, message, seq=number)
        path.leave_out(key, seq)

    # ---------------------------------------------------------------- the device

    def _notify(self, stream: Stream, then: Heard, mark: Mark = None, *, lazily: bool = False) -> None:
        """Call ``then`` on the loop when the present work of the stream, or a mark, is done, or has failed."""
        self._copying += 1
        self._path.marks.watch(self._device, stream, partial(self._heard, then), mark=mark, lazily=lazily)

    def _heard(self, then: Heard, error: BaseException | None) -> None:
        self._copying -= 1
        then(error)
        self._forget_if_at_rest()


def _known(call: DeviceCall, path: StagedPath) -> _Known:
    segments = _segments(call, path) if path.view.size > 1 else []
    is_short = len(segments) == 1 and segments[0].room * call.kind.dtype.itemsize <= SMALL_NBYTES
    return _Known(segments, {}, is_short and call.takes_result)


def _segments(call: DeviceCall, path: StagedPath) -> list[Segment]:
    kind, itemsize = call.kind, call.kind.dtype.itemsize
    counts = [
        (part.target if kind.verb is Verb.BROADCAST and part.target is not None else part.source).nbytes // itemsize
        for part in call.parts
    ]
    place = SegmentPlace(path.view.rank, path.view.size, kind.root)
    return segments_of(kind.verb, place, kind.shape, counts, path.segment_nbytes // itemsize)


def _target(call: DeviceCall, piece: Piece) -> Flat:
    target = call.parts[piece.part].target
    if target is None:
        raise InternalError(f"{shown(call.key)} has a result, but no memory for it")
    return target
