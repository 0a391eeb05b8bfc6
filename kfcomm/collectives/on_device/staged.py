"""Collectives of device memory through the host: copied there, carried out over the links, copied back.

This module has the common part of the calls of one group; see ``staging`` for one call.

For each segment a collective is posted, in a separate group of the same members, under the call's key. Its sequence
number follows only from the use of the key and the segment's index. So the numbers agree on all ranks, even if some
have refused the call or make another one. Collectives of one key are posted in the order of their numbers: a segment's
*turn* comes when all earlier ones of its key are posted, or skipped. First segments have a group of their own: so their
numbers have no gaps, and calls of one segment use slots of shared memory, as calls of the host do.

Freedom from deadlock: a call whose memory is ready waits only for its own segments, the earlier calls of its key, and
the other ranks. Each call has a window of its own, the pool of blocks never makes a call wait, and within a key all
ranks have the same order. Waits for a caller's stream are put on a separate stream for each stream of a caller (its
``wait_stream``), and never later than in ``begin``. All other work goes to one stream for copies in and one for copies
out, where a copy waits only for copies. The reason: the work of a caller's stream may be a collective of another
group, which other ranks begin when this call is done.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from kfcomm.arrays.devices import Device, Stream
from kfcomm.collectives.group import Group, GroupTurns
from kfcomm.collectives.on_device.calls import DevicePath
from kfcomm.collectives.on_device.marks import Marks
from kfcomm.collectives.on_device.segments import MAX_SEGMENTS, SEGMENT_NBYTES
from kfcomm.collectives.on_device.staging import Staging, StagingStreams
from kfcomm.core.collective import GroupView
from kfcomm.types import override

if TYPE_CHECKING:
    from kfcomm.arrays.devices.host import PinnedPool
    from kfcomm.collectives.on_device.calls import DeviceCall

WINDOW = 4
"""Segments of one call that have a block at a time: one on its way in, one out, and two in the network, so that it
has the next when it is done with one."""
MAX_WAIT_STREAMS = 16
"""Kept at a time, of the streams that were met last: callers have few, and where they make new ones all the time, each
of ours may cost the device a thread."""


class StagedPath(DevicePath):
    """The calls of one group on this rank. Everything runs on the engine's loop.

    Args:
        group: its ranks.
        pool_of: the pool of blocks for a device.
        segment_nbytes: see ``SEGMENT_NBYTES``; the same on every rank, as is the cut of calls.
        window: see ``WINDOW``.

    Attributes:
        view: the group under which first segments are posted.
    """

    def __init__(
        self, group: Group, pool_of: Callable[[Device], PinnedPool], *, segment_nbytes: int = SEGMENT_NBYTES,
        window: int = WINDOW,
    ) -> None:  # fmt: skip
        self.view, self._later = like(group.view, b"staged"), like(group.view, b"segments")
        self.group, self.engine = group, group.engine
        self.pool_of = pool_of
        self.segment_nbytes = segment_nbytes
        self.window = window
        self.turns = GroupTurns()
        self.marks = Marks(group.engine.reactor)
        self._wait_streams: dict[tuple[Device, Stream], Stream] = {}
        self._ways: dict[Device, tuple[Stream, Stream]] = {}
        self._under_way: dict[DeviceCall, Staging] = {}

    def __len__(self) -> int:
        """Number of calls with something under way, on a stream or a link."""
        return len(self._under_way)

    @property
    @override
    def name(self) -> str:
        return "staged"

    @override
    def begin(self, call: DeviceCall) -> None:
        try:
            staging = self._under_way[call] = Staging(self, call)
        except Exception as error:  # noqa: BLE001  of the device's library, perhaps: it belongs to the call
            call.failed(error)
            return
        staging.begin()

    @override
    def give_up(self, call: DeviceCall) -> None:
        # Blocks go back when no copy and no link uses them any more.
        staging = self._under_way.get(call)
        if staging is not None:
            staging.give_up()

    @override
    def never_began(self, key: str, seq: int) -> None:
        # What others have sent for its segments is dropped, when its turn comes.
        self.turns.next(key).ready(lambda: self.leave_out(key, seq))

    @override
    def hurry(self) -> None:
        self.marks.hurry()

    @override
    def close(self) -> None:
        for staging in list(self._under_way.values()):
            staging.give_up()
        self._wait_streams.clear()
        self._ways.clear()
        self.marks.close()

    def number(self, seq: int, index: int) -> tuple[GroupView, int]:
        """Group and sequence number of a segment of a use of a key."""
        return (self._later, seq * MAX_SEGMENTS + index) if index else (self.view, seq)

    def leave_out(self, key: str, seq: int) -> None:
        """Take all numbers of this use of a key, and of those before it, that were not used."""
        self.engine.leave_out(self.view, key, seq + 1)
        self.engine.leave_out(self._later, key, (seq + 1) * MAX_SEGMENTS)

    @override
    def group_ids(self) -> set[bytes]:
        return {self.view.id, self._later.id}

    def streams(self, call: DeviceCall) -> StagingStreams:
        """Streams for the copies of a call."""
        device = call.device
        wait_stream = self._wait_streams.pop((device, call.stream), None)
        if wait_stream is None:
            wait_stream = device.stream()
            if len(self._wait_streams) >= MAX_WAIT_STREAMS:
                del self._wait_streams[next(iter(self._wait_streams))]
        self._wait_streams[device, call.stream] = wait_stream
        if device not in self._ways:
            self._ways[device] = device.stream(), device.stream()
        return StagingStreams(wait_stream, *self._ways[device])

    def forget(self, call: DeviceCall) -> None:
        """End a call with nothing under way any more. May be called again."""
        self._under_way.pop(call, None)


def like(view: GroupView, person: bytes) -> GroupView:
    """A group of its own with the same members."""
    identity = hashlib.blake2b(view.id, digest_size=16, person=person).digest()
    return GroupView(identity, view.members, view.rank)
