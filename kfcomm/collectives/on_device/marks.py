"""Marks on streams for which this rank waits: polled like shared memory, and left to the device before a rest.

A notice of the device (``Device.notify``) costs two threads a turn, and an interrupt wakes the device's thread. So
marks are polled as long as the driver of the reactor polls anyway (see ``transports.reactor``). Before it rests, it
asks the device for one notice for each stream. No call waits for a *lazy* mark: it is checked together with others, and
after a moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from kfcomm.collectives.on_device import tell
from kfcomm.transports.reactor import Poller
from kfcomm.types import override

if TYPE_CHECKING:
    from kfcomm.arrays.devices import Device, Mark, Stream
    from kfcomm.transports.reactor import Reactor, Timer

LAZY_S = 1e-3
"""From a lazy mark until it is looked at, if no other is before that."""


_Awaited: TypeAlias = "tuple[Mark, Callable[[BaseException | None], None], bool]"
"""A mark, what to call once it is passed, and whether it is lazy."""


class _Queue:
    """The awaited marks of one stream, which passes them in order."""

    __slots__ = ("awaited", "device", "end", "promised", "stream")

    def __init__(self, device: Device, stream: Stream) -> None:
        self.device = device
        self.stream = stream
        self.awaited: deque[_Awaited] = deque()
        self.end = 0  # marks that were ever awaited
        self.promised = 0  # of these, those up to the last that the device will tell of


class Marks(Poller):
    """The awaited marks of this rank on the streams of one path. Everything runs on the engine's loop."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._queues: dict[int, _Queue] = {}
        self._num_urgent = 0
        self._is_parked = self._is_closing = False
        self._timer: Timer | None = None

    def watch(
        self, device: Device, stream: Stream, then: Callable[[BaseException | None], None], *, mark: Mark = None,
        lazily: bool = False,
    ) -> None:  # fmt: skip
        """Call ``then``, later, when a stream has passed a mark on it, or has failed.

        ``mark``: behind all marks of the stream that are awaited already; by default the present end of the stream.
        """
        if mark is None:
            try:
                mark = device.mark(stream)
            except Exception as error:  # noqa: BLE001  of the device's library: nothing more is to be heard of it
                self._reactor.call_soon(then, error)
                return
        if self not in self._reactor.pollers:
            self._reactor.pollers.append(self)
        queue = self._queues.get(id(stream))
        if queue is None:
            queue = self._queues[id(stream)] = _Queue(device, stream)
        queue.awaited.append((mark, then, lazily))
        queue.end += 1
        if not lazily:
            self._num_urgent += 1
            self._is_parked = False
            self._reactor.wake()
        elif self._timer is None:
            self._timer = self._reactor.call_later(LAZY_S, self._lazy_due)

    def hurry(self) -> None:
        """Let a caller wait for all marks."""
        for queue in self._queues.values():
            queue.awaited = deque((mark, then, False) for mark, then, _ in queue.awaited)
        self._num_urgent = sum(len(queue.awaited) for queue in self._queues.values())
        if self._num_urgent:
            self._is_parked = False
            self._reactor.wake()

    def close(self) -> None:
        """Stop polling when all marks are passed; no others follow."""
        self._is_closing = True
        self.hurry()
        self._leave()

    def _leave(self) -> None:
        if self._is_closing and not self._queues and self in self._reactor.pollers:
            self._reactor.pollers.remove(self)

    # ---------------------------------------------------------------- as a poller

    @property
    @override
    def is_awake(self) -> bool:  # type: ignore[override]
        return self._num_urgent > 0 and not self._is_parked

    @property
    @override
    def is_needed(self) -> bool:
        return self._num_urgent > 0

    @override
    def progress(self) -> bool:
        if not self._queues:
            return False
        moved = False
        for queue in tuple(self._queues.values()):
            moved = self._look(queue) or moved
        return moved

    @override
    def park(self) -> bool:
        self._is_parked = True
        if self._num_urgent:
            self._promise()
        return True

    @override
    def unpark(self) -> None:
        self._is_parked = False

    # ---------------------------------------------------------------- inside

    def _look(self, queue: _Queue) -> bool:
        """Poll a stream for its next marks; return whether it has passed one."""
        moved = False
        while queue.awaited:
            error: BaseException | None = None
            try:
                if not queue.device.passed(queue.awaited[0][0]):
                    break
            except Exception as raised:  # noqa: BLE001  of the device's library: it belongs to the call
                error = raised
            self._next(queue, error)
            moved = True
        return moved

    def _next(self, queue: _Queue, error: BaseException | None) -> None:
        """Call back for the first mark of a stream."""
        _, then, is_lazy = queue.awaited.popleft()
        if not queue.awaited:
            del self._queues[id(queue.stream)]
        if not is_lazy:
            self._num_urgent -= 1
        if self._is_closing:
            self._reactor.call_soon(self._leave)
        then(error)

    def _promise(self) -> None:
        """Ask the device for a notice behind all marks of each stream."""
        for queue in tuple(self._queues.values()):
            end = queue.end
            if queue.promised == end:
                continue
            queue.promised = end
            try:
                queue.device.notify(queue.stream, partial(tell, self._reactor, self._told, queue, end))
            except Exception as error:  # noqa: BLE001  as of ``mark``
                self._reactor.call_soon(self._told, queue, end, error)

    def _told(self, queue: _Queue, end: int, error: BaseException | None) -> None:
        """Handle a notice: the stream has passed the marks before this one, or has failed at one of them."""
        self._look(queue)
        while error is not None and queue.awaited and queue.end - len(queue.awaited) < end:
            self._next(queue, error)

    def _lazy_due(self) -> None:
        self._timer = None
        self.progress()
        self._promise()
