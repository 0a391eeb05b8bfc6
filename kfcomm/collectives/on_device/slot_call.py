"""One call in device slots on this rank, from the caller's stream to that stream.

::

    state    event                                   next     action
    -------  --------------------------------------  -------  -------------------------------------------------------
    copying  the contribution is in exported memory  here     (it was copied behind the caller's work)
    here     its turn comes                          posted   its record is posted, in the order of the uses of a key
    posted   the records of all ranks are there      reading  contributions are folded or copied into the targets;
                                                              behind that the result is complete
    reading  the device says that this is done       over     the use is acknowledged; the call is done
    any      the call fails                          over     a record that is not posted is left out; the use is
                                                              acknowledged once nothing is being read any more

Invariants: a record is posted only when the contribution is complete on the device; each rank acknowledges every use of
a key once, whether it succeeded, failed, or never began.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from kfcomm.arrays.devices import HANDLE_NBYTES, CopyWork, FoldWork, Span
from kfcomm.collectives.on_device.places import NamedUse, SlotPlace, digest_of
from kfcomm.collectives.on_device.slot_work import SlotPiece, SlotWork, work_of
from kfcomm.core.collective import shown
from kfcomm.errors import InternalError, TransportError
from kfcomm.types import Verb

if TYPE_CHECKING:
    from kfcomm.collectives.handle import Handle
    from kfcomm.collectives.on_device.calls import DeviceCall
    from kfcomm.collectives.on_device.slots import SlotsPath

MAX_ACKS: Final = 6
"""Uses that one record acknowledges: each call adds one, so that few ever wait."""
_WORDS: Final = HANDLE_NBYTES // 8
_HANDLE: Final = struct.Struct(f"={_WORDS}q")
_ROOM, _OFFSET, _ACKS = _WORDS, _WORDS + 1, _WORDS + 2
RECORD: Final = np.full(_ACKS + 2 * MAX_ACKS, -1, np.int64)
"""An empty record: handle and length of exported memory, offset of the contribution there, and acknowledged uses."""


class SlotState(StrEnum):
    """States of a call, as in the table above."""

    COPYING = "copying"
    HERE = "here"
    POSTED = "posted"
    READING = "reading"
    OVER = "over"


class _Kept:
    """Common properties of all calls of one kind under one name."""

    __slots__ = ("digest", "work")

    def __init__(self, digest: int, work: SlotWork) -> None:
        self.digest = digest
        self.work = work


class SlotCall:
    """One call under way."""

    __slots__ = ("_acks", "_call", "_future", "_is_seen", "_path", "_place", "_turn", "_use", "_work", "state")

    def __init__(self, path: SlotsPath, call: DeviceCall) -> None:
        self.state = SlotState.COPYING
        self._path = path
        self._call = call
        kept: _Kept | None = call.memo.get("")
        if kept is None:
            view = path.view
            kept = call.memo[""] = _Kept(digest_of(call.key), work_of(call.kind, view.rank, view.size, _counts(call)))
        self._work = kept.work
        self._use = NamedUse(kept.digest, call.head.seq)
        self._place: SlotPlace | None = None
        self._acks: list[NamedUse] = []  # by the record
        self._is_seen = False  # other ranks may have the record
        self._future: _Future | None = None
        self._turn = path.turns.next(call.key)

    def begin(self) -> None:
        """Copy the contribution, behind the caller's work."""
        path, call, work = self._path, self._call, self._work
        wait_stream, mark = path.wait_stream(call.stream), None
        try:
            copies: list[CopyWork] = []
            if work.gives and work.nbytes:
                place = self._place = path.shared.places.take(work.nbytes, self._use)
                memory, offset = place.span
                copies = [
                    CopyWork(Span(part.source, 0), Span(memory, offset + at), part.source.nbytes)
                    for part, at in zip(call.parts, work.offsets, strict=True)
                ]
            mark = path.shared.sharing.run((), copies, wait_stream, call.ready)
        except Exception as error:  # noqa: BLE001  of the device's library, perhaps: it belongs to the call
            call.failed(error)
        path.marks.watch(path.device, wait_stream, self._copied, mark=mark)

    def _copied(self, error: BaseException | None) -> None:
        """Go on after the caller's work: sources were read, and targets may be written."""
        if error is not None:
            self._call.failed(error)
        if self.state is SlotState.OVER:
            self._end()
            return
        self.state = SlotState.HERE
        self._turn.ready(self._post)

    # ---------------------------------------------------------------- posted

    def _post(self) -> None:
        if self.state is SlotState.OVER:  # given up while it waited for its turn
            self._leave_out()
            return
        self.state = SlotState.POSTED
        self._is_seen = True
        try:
            self._post_record()
        except Exception as error:  # noqa: BLE001  more names in flight than there can be, perhaps
            self.answered(None, error)

    def _post_record(self) -> None:
        path, call, seq = self._path, self._call, self._call.head.seq
        engine = path.engine
        name, plan = path.records(call)
        table = np.empty((path.view.size, RECORD.size), np.int64)
        record, result = self._record(), table.reshape(-1)
        future = self._future = _Future(self, table)
        next_seq = name.series.key.next_seq
        if next_seq == seq and not call.priority:
            begun = name.begin(cast("Handle[Any]", future), record, result, table)
            if begun is not None:
                if not begun.is_over:
                    future.operation = begun
                return
        if seq < next_seq:
            raise InternalError(f"use {seq} of {shown(call.key)} began after a later one")
        operation = plan.operation(future, record, result, plan.work, value=table, priority=call.priority)
        engine.post(plan.post(path.view, call.key, call.plans.generation, True, seq), operation, None)
        if not operation.is_over:
            future.operation = operation

    def _record(self) -> Any:
        record = RECORD.copy()
        place, acks = self._place, self._path.acks
        if place is not None:
            record[:_WORDS] = np.frombuffer(place.handle, np.int64)
            record[_ROOM], record[_OFFSET] = place.slab.memory.nbytes, place.span.offset
        sent = self._acks = [acks.popleft() for _ in range(min(MAX_ACKS, len(acks)))]
        if sent:
            record[_ACKS : _ACKS + 2 * len(sent)] = [number for use in sent for number in use]
        return record

    def answered(self, table: Any, error: BaseException | None) -> None:
        """Go on with the records of all ranks, or without."""
        self._future = None
        path = self._path
        if error is not None:
            path.acks.extend(self._acks)  # nobody may have heard it
            if self.state is not SlotState.OVER:
                self.state = SlotState.OVER
                self._call.failed(error)
            self._end()
            return
        for rank, row in enumerate(table):
            if rank != path.view.rank:
                uses = row[_ACKS:].reshape(-1, 2).tolist()
                path.acknowledged(rank, (NamedUse(*use) for use in uses if use[1] >= 0))
        if self.state is SlotState.OVER:
            self._end()
        else:
            self._read(table)

    # ---------------------------------------------------------------- reading

    def _read(self, table: Any) -> None:
        path, call = self._path, self._call
        self.state = SlotState.READING
        stream, mark = path.shared.stream, None
        try:
            folds, copies = self._to_read(table) if self._work.gets else ((), ())
            mark = path.shared.sharing.run(folds, copies, stream)
            call.enqueued(mark)
        except Exception as error:  # noqa: BLE001  of the device's library, perhaps: it belongs to the call
            call.failed(error)
        path.marks.watch(path.device, stream, self._has_read, mark=mark)

    def _to_read(self, table: Any) -> tuple[Sequence[FoldWork], Sequence[CopyWork]]:
        """Work on the contributions of all ranks."""
        call, work = self._call, self._work
        op, dtype = call.kind.op, call.kind.dtype
        contributions = [self._contribution(rank, row) for rank, row in enumerate(table.tolist())]
        if work.folds and op is None:
            raise InternalError(f"{shown(call.key)} folds without an op")
        folds = [
            FoldWork(
                op, dtype, [self._span(rank, one, piece) for rank, one in enumerate(contributions)],
                self._target(piece.part, 0), count,
            )
            for piece, count in work.folds
            if op is not None
        ]  # fmt: skip
        copies = [
            CopyWork(self._span(rank, contributions[rank], piece), self._target(piece.part, to), nbytes)
            for rank, piece, nbytes, to in work.copies
        ]
        return folds, copies

    def _contribution(self, rank: int, row: list[int]) -> Span | None:
        """The contribution of a rank; None if it gives none."""
        path = self._path
        if rank == path.view.rank:
            return None if self._place is None else self._place.span
        offset, room = row[_OFFSET], row[_ROOM]
        if offset < 0:
            return None
        if offset + self._work.nbytes > room:
            raise TransportError(f"{path.view.called(rank)} sent a place outside of its memory")
        return Span(path.memory(_HANDLE.pack(*row[:_WORDS]), room), offset)

    def _span(self, rank: int, contribution: Span | None, piece: SlotPiece) -> Span:
        """A piece of the contribution of a rank; where this rank gives none, of its own source."""
        if contribution is not None:
            return Span(contribution.memory, contribution.offset + piece.at)
        if rank != self._path.view.rank:
            raise TransportError(f"{self._path.view.called(rank)} sent no place for its contribution")
        return Span(self._call.parts[piece.part].source, piece.start)

    def _target(self, part: int, offset: int) -> Span:
        target = self._call.parts[part].target
        if target is None:
            raise InternalError(f"{shown(self._call.key)} has a result, but no memory for it")
        return Span(target, offset)

    def _has_read(self, error: BaseException | None) -> None:
        if error is not None:
            self._call.failed(error)
        was_over = self.state is SlotState.OVER
        self._end()
        if not was_over:
            self._call.done()

    # ---------------------------------------------------------------- the end

    def _end(self) -> None:
        """Acknowledge the use, after the last piece of work on the device."""
        self.state = SlotState.OVER
        path = self._path
        if not self._is_seen and self._place is not None:
            path.shared.places.drop(self._use)
        path.acknowledge(self._use)
        path.forget(self._call)

    def give_up(self) -> None:
        """Withdraw a failed call."""
        state, self.state = self.state, SlotState.OVER
        match state:
            case SlotState.COPYING:
                self._turn.ready(self._leave_out)  # the copy is awaited
            case SlotState.HERE:
                self._end()
            case SlotState.POSTED:
                operation = None if self._future is None else self._future.operation
                if operation is not None:
                    operation.cancel()
            case SlotState.READING | SlotState.OVER:
                pass

    def _leave_out(self) -> None:
        """Leave out the record, since its turn has come."""
        path, key, seq = self._path, self._call.key, self._call.head.seq
        path.engine.refuse(
            path.view, key, f"{path.view.called(path.view.rank)} gave up its call of {shown(key)}", seq=seq
        )
        path.engine.leave_out(path.view, key, seq + 1)


class _Future:
    """In place of a future: an exchange of records tells its call how it ended."""

    __slots__ = ("_one", "_table", "operation")

    def __init__(self, one: SlotCall, table: Any) -> None:
        self._one = one
        self._table = table
        self.operation: Any = None

    def done(self) -> bool:
        """Return False: only the exchange ends it."""
        return False

    def set_result(self, _: Any) -> None:
        """Handle the records of all ranks."""
        self._one.answered(self._table, None)

    def set_exception(self, error: BaseException) -> None:
        """Handle a failure of the exchange."""
        self._one.answered(self._table, error)


def _counts(call: DeviceCall) -> list[int]:
    """Elements of each part as it is given: on all ranks those of the root's, in a broadcast."""
    is_broadcast = call.kind.verb is Verb.BROADCAST
    return [part.target.size if is_broadcast and part.target is not None else part.source.size for part in call.parts]
