"""Device memory for verbs on host memory: copied in before the first step with data, and back at the end.

This is for calls of two steps, and for messages: their shapes differ between ranks, and the first step needs no data.
So a call has its place in the program at once, and the host does not wait for the device while there is pinned memory.
For large arrays use verbs whose calls overlap copies and links.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kfcomm.collectives.handle import Handle
from kfcomm.collectives.on_device import tell
from kfcomm.errors import CollectiveTimeout

if TYPE_CHECKING:
    from kfcomm.arrays import OutArray, OutList
    from kfcomm.arrays.devices import Device, Flat, Stream
    from kfcomm.arrays.devices.host import PinnedPool, PooledBlock
    from kfcomm.arrays.kinds import DeviceKind
    from kfcomm.arrays.on_device import DeviceArray, DeviceOut
    from kfcomm.engine.engine import Engine

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Out: TypeAlias = "OutArray | OutList | OutOfHost"


class Fetched:
    """An array on its way to host memory.

    Args:
        array: on the device; kept alive until it is copied.
        device, pool: of the array, and of pinned memory for it.
        engine: a blocking caller may do its work.
        timeout_s: bound of the wait, in seconds.

    Attributes:
        flat: the host memory.
        here: done when the copy is; fails if the device does, or does not come to it in time.
    """

    def __init__(self, array: DeviceArray, device: Device, pool: PinnedPool, engine: Engine, timeout_s: float) -> None:
        self.here: Handle[None] = Handle(loop=engine.loop)
        self._kept: list[Any] = [array.flat]
        self._block = pool.take(array.flat.nbytes)
        self._is_copied = self._is_unwanted = False
        self.flat: Array = self._block.view.view(array.dtype)
        try:
            device.fetch(array.flat, self._block.view, array.stream)
            device.notify(array.stream, partial(tell, engine.reactor, self._arrived))
        except BaseException:
            self._block.release()
            raise
        self._timer = engine.reactor.call_later(timeout_s, self._expired, timeout_s)

    def keep(self, what: Any) -> None:
        """Keep something else alive until it is here."""
        self._kept.append(what)

    def release(self, _: Any = None) -> None:
        """Return the memory: it is read no more."""
        self._is_unwanted = True
        self._timer.cancel()
        if self._is_copied:
            self._block.release()

    def _arrived(self, error: BaseException | None) -> None:
        self._is_copied = True
        self._kept.clear()
        self._end(error)
        if self._is_unwanted:
            self._block.release()

    def _expired(self, timeout_s: float) -> None:
        self._end(CollectiveTimeout(f"the device did not finish the array to send within {timeout_s:.1f} s"))

    def _end(self, error: BaseException | None) -> None:
        self._timer.cancel()
        if self.here.done():
            return
        if error is None:
            self.here.set_result(None)
        else:
            self.here.set_exception(error)
            self.here.exception()  # who waits for it raises it; nobody has to wait


@dataclass(frozen=True, slots=True)
class Returned:
    """Array kind of results made in host memory for arrays on a device. Implements ``ArrayKind``."""

    kind: DeviceKind
    device: Device
    stream: Stream
    pool: PinnedPool

    @property
    def name(self) -> str:
        """Name of the kind."""
        return self.kind.name

    def read(self, x: Any) -> tuple[Array, bool]:
        """Never called: arrays are read by their own kind."""
        raise TypeError(x)

    def write_into(self, out: Any) -> Array:
        """Never called: see ``OutOfHost``."""
        raise TypeError(out)

    def written(self, out: Any) -> None:
        """Never called: see ``OutOfHost``."""

    def restore(self, array: Array) -> Any:
        """An array of the caller's kind, made on the caller's stream."""
        flat = self.device.empty(array.size, array.dtype, self.stream)
        _put(self.device, self.pool, array.reshape(-1), flat, self.stream)
        return self.kind.restore(flat, array.shape, self.stream)


class OutOfHost:
    """An ``out`` on a device for a result that is made in host memory; see ``OutArray``."""

    __slots__ = ("_device", "_place", "_pool", "flat", "original")

    def __init__(self, place: DeviceOut, dtype: np.dtype[Any], device: Device, pool: PinnedPool) -> None:
        self.flat: Array = np.empty(place.flat.size, dtype)
        self.original = place.original
        self._place = place
        self._device = device
        self._pool = pool

    def finish(self) -> Any:
        """Copy the result to the caller's memory, on the caller's stream."""
        _put(self._device, self._pool, self.flat, self._place.flat, self._place.stream)
        return self._place.finish()


def _put(device: Device, pool: PinnedPool, source: Array, target: Flat, stream: Stream) -> None:
    """Copy to the device, by way of pinned memory: a copy from other memory may wait for the whole stream."""
    block = pool.take(source.nbytes)
    block.view[:] = source.view(np.uint8)
    device.put(block.view, target, stream)
    device.notify(stream, partial(_copied, block, target))


def _copied(block: PooledBlock, _: Flat, __: BaseException | None) -> None:
    """Release both, on a thread of the device: neither is in use any more."""
    block.release()
