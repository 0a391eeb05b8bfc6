"""Launches of one backend, in order: at once where they cannot block, else on a thread.

A backend may join two ranks only at the first launch that needs it, which then waits until both have come; the event
loop must not, since others may be waiting for what it has to tell them. So the first launch of a kind is made on a
thread, and so is whatever comes while such a one is under way. All others, which are what a loop is made of, are made
where they are.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from kfcomm.collectives.on_device import tell
from kfcomm.errors import TransportError

if TYPE_CHECKING:
    from kfcomm.arrays.devices import Device, Mark, Stream
    from kfcomm.collectives.on_device.calls import Call
    from kfcomm.transports.base import CollectiveBackend
    from kfcomm.transports.reactor import Reactor

Launched: TypeAlias = "Callable[[Call, Mark, BaseException | None], None]"


class Launcher:
    """Puts calls on a stream; everything but the thread runs on the loop.

    Args:
        backend: of one formation.
        device: of this rank.
        stream: where all goes.
        reactor: told of what the thread has done.
        launched: called on the loop with each call, and the mark behind which its result is complete, or an error.
    """

    def __init__(
        self, backend: CollectiveBackend, device: Device, stream: Stream, reactor: Reactor, launched: Launched
    ) -> None:
        self.backend = backend
        self._device = device
        self._stream = stream
        self._reactor = reactor
        self._launched = launched
        self._kinds: set[str] = set()
        self._under_way = 0
        self._queue: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def launch(self, call: Call, kind: str, *, alone: bool) -> None:
        """The next launch; once one of a ``kind`` was made, others of that kind do not block."""
        if not self._under_way and (alone or kind in self._kinds):
            self._launched(call, *self._put(call))
            return
        self._kinds.add(kind)
        self._under_way += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kfcomm-launches", daemon=True)
            self._thread.start()
        self._queue.put(call)

    def close(self) -> None:
        """Nothing is launched any more; what is being launched ends by itself, or by the backend's abort."""
        self._queue.put(None)

    def _put(self, call: Call) -> tuple[Mark, BaseException | None]:
        try:
            self._device.wait(self._stream, call.ready)
            self.backend.launch(call.verb, call.parts, call.op, call.root, self._stream)
            return self._device.mark(self._stream), None
        except Exception as error:  # noqa: BLE001  of the device's libraries: it belongs to the call
            return None, error if isinstance(error, TransportError) else TransportError(str(error))

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            mark, error = self._put(call)
            tell(self._reactor, self._back, call, mark, error)
            del call, mark, error  # this thread keeps no memory alive while it waits for the next one

    def _back(self, call: Call, mark: Mark, error: BaseException | None) -> None:
        self._under_way -= 1
        self._launched(call, mark, error)
