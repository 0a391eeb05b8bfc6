"""Repeated device calls that are launched at once: no operation, no marks, and one notice of the device for many.

A cached name of a backend's path (`repeated.CompiledLaunch`) launches its next use where it is called, on the
caller's own stream, if nothing is unusual: the array is like the first one, the launch order is known and this name is
next, nothing waits or has failed. Any other use takes the full path. Such a use is one entry of a list until the device
has passed it::

    entry of `Launches`     becomes
    ----------------------  ------------------------------------------------------------------------------------------
    a use, launched         complete, with all before it on its stream, by one notice of the device; or a call of the
                            full path, when it has to be known: a peer asks for it, is lost, or the device is late
    a call that was a use   complete by the same notice, or failed as any call

Its memory belongs to the caller's stream, as that of a kernel that the caller puts there: nothing keeps it alive. So
the memory of an array must be free again in the order of the stream on which the array is used, as CuPy and torch have
it for the stream on which it was made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, cast

from kfcomm.collectives.on_device import tell
from kfcomm.common import do_nothing
from kfcomm.engine.observer import BATCH

if TYPE_CHECKING:
    from kfcomm.arrays.devices import Device, Stream
    from kfcomm.collectives.on_device.calls import DeviceCall
    from kfcomm.collectives.on_device.repeated import CompiledLaunch
    from kfcomm.engine.engine import Engine
    from kfcomm.engine.operation import Operation
    from kfcomm.transports.reactor import Timer

WATCH_AFTER_S: Final = 20e-3
"""How long uses are collected before the device is asked for a notice of them all, which costs two threads a turn.
Nothing but statistics waits for that: callers have their results, and no memory is kept."""
WATCH_CALLS_AFTER_S: Final = 1e-3
"""The same for calls of the full path, whose memory is kept alive until then."""
MAX_USES: Final = 1 << 10
"""Uses on one stream that the device may not have passed; at each further one an event loop gets a turn."""
LATE_S: Final = 0.25
"""How long after the request for a notice a use is an ordinary call, with a deadline and questions to other ranks."""

LaunchedUse: TypeAlias = "tuple[CompiledLaunch, int, float]"
"""A cached name, the number of the use, and when it was posted."""


class LaunchPath(Protocol):
    """The path of the uses: what they need of it."""

    backend: Any
    """The present one, to which prepared launches belong; None without one."""
    launches: Launches
    """Uses that are launched."""

    def takes(self, name: CompiledLaunch) -> bool:
        """Whether a use may be launched now; then it has its place in the launch order."""

    def failure(self) -> str | None:
        """Reason why launched uses are not complete though the device has passed them."""

    def entered(self, call: DeviceCall) -> None:
        """Know a call that was launched as a use."""

    def passed(self, call: DeviceCall, reason: str | None) -> None:
        """End a call that was launched: the device has passed it, or has failed for this reason."""

    def launch_failed(self, call: DeviceCall, error: BaseException) -> None:
        """Fail a call whose launch was refused."""

    def look_later(self) -> None:
        """Look soon whether the backend has failed, and whether uses are late."""


class StreamUses:
    """The uses on one stream, in the order of their launches, up to the latest that the device has passed."""

    __slots__ = ("asked", "asked_s", "first", "owner", "stream", "uses")

    def __init__(self, stream: Any, owner: Stream) -> None:
        self.stream = stream  # as `Repeat` gives it
        self.owner = owner
        self.uses: list[LaunchedUse | DeviceCall] = []
        self.first = 0  # number of those before ``uses``
        self.asked = 0  # of how many, from the first on, a notice was asked for
        self.asked_s = 0.0

    @property
    def num(self) -> int:
        """Launches so far."""
        return self.first + len(self.uses)


class Launches:
    """The launched uses of one path, by stream.

    Attributes:
        current: those on the stream of the latest launch.
        settled: called when some are complete; set by the verbs.
    """

    def __init__(self, path: LaunchPath, device: Device, engine: Engine, timeout_s: float) -> None:
        self.current = StreamUses(None, None)
        self.settled: Callable[[], None] = do_nothing
        self.late_s = min(LATE_S, timeout_s / 8)
        self._path = path
        self._device = device
        self._engine = engine
        self._reactor = engine.reactor
        self._streams: dict[Any, StreamUses] = {}
        self._timer: Timer | None = None
        self._due_s = 0.0
        engine.launches.append(self)

    def __len__(self) -> int:
        """Uses that the device may not have passed, and that are no calls."""
        return sum(type(use) is tuple for one in self._streams.values() for use in one.uses)

    def on(self, stream: Any, owner: Callable[[], Stream]) -> StreamUses:
        """The uses on this stream, where the next launch is."""
        found = self._streams.get(stream)
        if found is None:
            found = self._streams[stream] = StreamUses(stream, owner())
        self.current = found
        return found

    def put(self, call: DeviceCall, stream: Stream) -> None:
        """Add a call of the full path, which is launched, or whose launch was refused."""
        self.on(stream, lambda: stream).uses.append(call)
        self.begin(WATCH_CALLS_AFTER_S)

    def begin(self, after_s: float | None = None) -> None:
        """Ask for a notice after this time at the latest; None for that of uses."""
        due_s = self._reactor.time() + (WATCH_AFTER_S if after_s is None else after_s)
        if self._timer is None or due_s < self._due_s:
            self._stop()
            self._timer, self._due_s = self._reactor.call_at(due_s, self.watch), due_s
        self._path.look_later()

    def watch(self) -> None:
        """Ask for a notice of all uses."""
        self._stop()
        for one in list(self._streams.values()):
            if one.num == one.asked:
                continue
            try:
                if self._device.is_capturing(one.owner):  # it would be captured as well
                    self.begin()
                    continue
                one.asked, one.asked_s = one.num, monotonic()
                done = partial(tell, self._reactor, self._passed, one, one.num)
                self._device.notify(one.owner, done)
            except Exception as error:  # noqa: BLE001  of the device's library: nothing more is to be heard of it
                self._passed(one, one.num, error)

    def enter(self) -> None:
        """Make calls of all uses."""
        for one in list(self._streams.values()):
            self._enter(one, one.num)

    def enter_name(self, name: CompiledLaunch) -> None:
        """Make calls of the uses of one name."""
        for one in list(self._streams.values()):
            for at, use in enumerate(one.uses):
                if type(use) is tuple and use[0] is name:
                    one.uses[at] = name.entered(use[1], use[2])

    def enter_late(self) -> None:
        """Make calls of uses for which a notice is overdue."""
        for one in list(self._streams.values()):
            if monotonic() - one.asked_s >= self.late_s:
                self._enter(one, one.asked)

    def operations(self) -> list[Operation]:
        """Read-only views of the uses as operations; for any thread."""
        streams = list(self._streams.values())
        uses = [use for one in streams for use in list(one.uses) if type(use) is tuple]
        return [name.as_operation(seq, posted_s) for name, seq, posted_s in uses]

    def close(self) -> None:
        """Ask for nothing any more; what is launched has been entered."""
        self._stop()
        if self in self._engine.launches:
            self._engine.launches.remove(self)

    def _stop(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _enter(self, one: StreamUses, until: int) -> None:
        for at in range(until - one.first):
            use = one.uses[at]
            if type(use) is tuple:
                one.uses[at] = use[0].entered(use[1], use[2])

    def _passed(self, one: StreamUses, number: int, error: BaseException | None) -> None:
        """Note that a stream is past its first uses."""
        reason = str(error) if error is not None else self._path.failure()
        if reason:
            self._enter(one, number)
        count = max(0, number - one.first)
        passed, one.uses[:count], one.first = one.uses[:count], [], one.first + count
        self._settle(cast("list[LaunchedUse]", [use for use in passed if type(use) is tuple]))
        for call in passed:
            if type(call) is not tuple:
                self._path.passed(cast("DeviceCall", call), reason)
        if not one.uses:
            self._streams.pop(one.stream, None)  # which may end now
            if self.current is one:
                self.current = StreamUses(None, None)
        elif one.num > one.asked:
            self.begin()
        self.settled()

    def _settle(self, uses: Sequence[LaunchedUse]) -> None:
        """Record completions."""
        engine, now_s = self._engine, monotonic()
        ended = engine.recorder.ended
        for name, seq, posted_s in uses:
            ended.append((name.series, seq, posted_s, now_s, name.nbytes))
            name.ended()
        if len(ended) >= BATCH:
            engine.recorder.settle()
        if engine.observers is not None:
            for name, seq, posted_s in uses:
                engine.tell_done(name.as_operation(seq, posted_s))
