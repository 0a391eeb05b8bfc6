"""An all_reduce of devices on several hosts: the backend inside each host, graphs over links between the hosts.

It is cut into *blocks*. Each rank of a host has a *share* of every block. Several are under way at a time::

    step        among                                     what
    ----------  ----------------------------------------  ------------------------------------------------------------
    inside      the ranks of this host, on the backend    reduce_scatter: a share of the block, reduced over this host
    across      the ranks with this place on every host   all_reduce of the share, through pinned memory and the links
    together    the ranks of this host, on the backend    all_gather of the shares

So each byte crosses the network once for each host and not once for each device, and all ranks of a host send. A step
begins when the one before is on its stream; copies and links of one block go on beside the backend's work on another. A
block that the ranks of a host cannot share evenly is padded, in memory of its own.

The leader of a host sends the order of its launches each time: the time of a step *together* depends on other hosts,
and a learned order could wait for it before it lets another host continue.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from kfcomm.collectives.on_device import tell
from kfcomm.collectives.on_device.calls import DevicePath
from kfcomm.collectives.plans import PlanKey
from kfcomm.transports.base import Part
from kfcomm.types import Verb, override

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfcomm.arrays.devices import Flat, Mark, Stream
    from kfcomm.collectives.group import Group
    from kfcomm.collectives.mailbox import Mailbox
    from kfcomm.collectives.on_device.backed import BackendPath
    from kfcomm.collectives.on_device.calls import DeviceCall
    from kfcomm.collectives.on_device.staged import StagedPath

SHARE_NBYTES = 16 << 20
"""Of a share: a few segments of what goes across, so that one block's network covers the next one's work inside."""


@dataclass(eq=False)
class HierarchyStep:
    """A part of a call on another path, where it counts as a call. For other attributes see ``DeviceCall``."""

    whole: DeviceCall
    group: Group  # ranks of the step
    verb: Verb
    block: _Block
    ready: Mark  # behind this the block may be read and written
    stream: Stream
    then: Callable[[Mark], None]  # called with the mark behind which the result is complete
    ended: Callable[[HierarchyStep], None]  # called when nothing on a stream touches the block any more
    is_over: bool = False
    takes_result = False  # see ``DeviceCall``

    def __post_init__(self) -> None:
        whole, verb, block = self.whole, self.verb, self.block
        self.key = _key_of(whole.key, verb, block.index)
        count = (block.share if verb is Verb.ALL_REDUCE else block.source).size
        # averages of equally many averages are the average of all
        op = None if verb is Verb.ALL_GATHER else whole.kind.op
        self.kind = PlanKey(verb, whole.kind.dtype, (count,), op)
        self.device, self.parts, self.plans = whole.device, (block.part(verb),), self.group.plans
        self.priority, self.head, self.title = whole.priority, whole.head, whole.title
        self.signature = whole.signature._replace(verb=str(verb), counts=(self.key, (count,)))
        self.memo: dict[str, Any] = whole.memo.setdefault(self.key, {})

    def enqueued(self, mark: Mark) -> None:
        """Note that the result is complete behind this mark."""
        if self.is_over:
            return
        try:
            self.then(mark)
        except Exception as error:  # noqa: BLE001  of the device's library: it belongs to the call
            self.failed(error)

    def done(self) -> None:
        """Note that no stream touches the part any more."""
        if not self.is_over:
            self.is_over = True
            self.ended(self)

    def failed(self, error: BaseException) -> None:
        """Fail the whole call, since this step cannot be carried out."""
        if not self.is_over:
            self.whole.failed(error)


@dataclass(slots=True, eq=False)
class _Block:
    """One block of a call: input of the step inside, this rank's share, and the target."""

    index: int
    source: Flat
    target: Flat
    share: Flat
    unpadded: Flat | None = None

    def part(self, verb: Verb) -> Part:
        """Input and result of a step."""
        source = self.source if verb is Verb.REDUCE_SCATTER else self.share
        return Part(source, self.target if verb is Verb.ALL_GATHER else self.share)


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A call, its blocks, its steps that are under way, and how many blocks' last steps are not on a stream yet.

    ``is_in_place``: the device has made the result.
    """

    blocks: list[_Block]
    blocks_left: int
    steps: set[HierarchyStep] = field(default_factory=set)
    is_in_place: bool = False


class HierarchicalPath(DevicePath):
    """All_reduces of one group on this rank.

    Args:
        backend: inside the host; its order is not followed.
        staged: across the hosts.
        mailbox: of the group inside.
        share_nbytes: see ``SHARE_NBYTES``; the same on every rank.
    """

    def __init__(
        self, backend: BackendPath, staged: StagedPath, mailbox: Mailbox, *, share_nbytes: int = SHARE_NBYTES
    ) -> None:
        self._backend = backend
        self._staged = staged
        self._inside = backend.group
        self._across = staged.group
        self._device = backend.device
        self._mailbox = mailbox
        self._share_nbytes = share_nbytes
        self._stream: Stream = None  # made with the first call: until then no device is touched
        self._under_way: dict[DeviceCall, _UnderWay] = {}

    @property
    @override
    def name(self) -> str:
        return f"hierarchy of {self._backend.name}"

    @override
    def begin(self, call: DeviceCall) -> None:
        try:
            if self._stream is None:
                self._stream = self._device.stream()
            blocks = self._blocks(call)
            ready = self._device.mark(call.stream)
        except Exception as error:  # noqa: BLE001  no memory on the device, perhaps
            call.failed(error)
            return
        self._under_way[call] = _UnderWay(blocks, len(blocks))
        for block in blocks:
            self._step(call, block, Verb.REDUCE_SCATTER, ready, partial(self._reduced, call, block))

    @override
    def give_up(self, call: DeviceCall) -> None:
        under_way = self._under_way.pop(call, None)
        if under_way is not None:
            for step in under_way.steps:
                step.is_over = True
                self._path_of(step).give_up(step)
            with contextlib.suppress(Exception):  # of the device's library: then nothing is on a stream of it any more
                self._device.notify(self._stream, partial(_kept, under_way))
        # Other ranks of this host may have a step under way that is done here, or to come.
        self.never_began(call.key, call.head.seq)

    @override
    def never_began(self, key: str, seq: int) -> None:
        # Others may have begun its first step.
        self._backend.never_began(_key_of(key, Verb.REDUCE_SCATTER, 0), seq)

    @override
    def hurry(self) -> None:
        self._backend.hurry()
        self._staged.hurry()

    @override
    def close(self) -> None:
        self._backend.close()
        self._staged.close()
        self._mailbox.close("the group is closed")

    def _blocks(self, call: DeviceCall) -> list[_Block]:
        """The blocks of a call; all are multiples of the ranks of this host but the last, which may be padded."""
        (part,) = call.parts
        device, local = self._device, self._inside.view.size
        size, target = part.source.size, part.source if part.target is None else part.target
        per_block = max(1, self._share_nbytes // call.kind.dtype.itemsize) * local
        blocks = []
        for index, start in enumerate(range(0, max(size, 1), per_block)):
            stop = min(size, start + per_block)
            each = -(-(stop - start) // local)
            share = device.empty(each, call.kind.dtype, call.stream)
            source, place = part.source[start:stop], target[start:stop]
            if each * local == stop - start:
                blocks.append(_Block(index, source, place, share))
                continue
            padded = device.empty(each * local, call.kind.dtype, call.stream)
            device.copy(source, padded[: stop - start], call.stream)
            blocks.append(_Block(index, padded, padded, share, place))
        return blocks

    # ---------------------------------------------------------------- steps

    def _step(self, call: DeviceCall, block: _Block, verb: Verb, ready: Mark, then: Callable[[Mark], None]) -> None:
        group = self._across if verb is Verb.ALL_REDUCE else self._inside
        ended = partial(self._step_done, call)
        step = HierarchyStep(call, group, verb, block, ready, self._stream, then, ended)
        self._under_way[call].steps.add(step)
        self._path_of(step).begin(step)

    def _path_of(self, step: HierarchyStep) -> Any:
        return self._staged if step.verb is Verb.ALL_REDUCE else self._backend

    def _reduced(self, call: DeviceCall, block: _Block, mark: Mark) -> None:
        self._device.wait(self._stream, mark)
        self._step(call, block, Verb.ALL_REDUCE, mark, partial(self._exchanged, call, block))

    def _exchanged(self, call: DeviceCall, block: _Block, mark: Mark) -> None:
        self._step(call, block, Verb.ALL_GATHER, mark, partial(self._gathered, call, block))

    def _gathered(self, call: DeviceCall, block: _Block, mark: Mark) -> None:
        under_way, device, stream = self._under_way[call], self._device, self._stream
        device.wait(stream, mark)
        if block.unpadded is not None:
            device.copy(block.target[: block.unpadded.size], block.unpadded, stream)
        under_way.blocks_left -= 1
        if not under_way.blocks_left:
            mark = device.mark(stream)
            device.notify(stream, partial(tell, self._inside.engine.reactor, self._in_place, call, under_way))
            call.enqueued(mark)

    def _in_place(self, call: DeviceCall, under_way: _UnderWay, error: BaseException | None) -> None:
        """Finish: the results of all blocks are in the caller's memory, or the device has failed."""
        under_way.is_in_place = True
        if error is not None:
            call.failed(error)
        else:
            self._end_if_over(call)

    def _step_done(self, call: DeviceCall, step: HierarchyStep) -> None:
        if call in self._under_way:
            self._under_way[call].steps.remove(step)
            self._end_if_over(call)

    def _end_if_over(self, call: DeviceCall) -> None:
        under_way = self._under_way.get(call)
        if under_way is not None and under_way.is_in_place and not under_way.steps:
            del self._under_way[call]
            call.done()


def _kept(*_: object) -> None:
    """Release the arrays that this was bound to."""


def _key_of(key: str, verb: Verb, block: int) -> str:
    """The key of a step."""
    return f"{key}\0{verb} {block}"
