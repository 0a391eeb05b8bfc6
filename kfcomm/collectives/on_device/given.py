"""Arrays that callers give, on devices or in host memory, and memory for their results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kfcomm import arrays
from kfcomm.arrays import HostArray, OutArray, adapt, adapt_out, on_device
from kfcomm.arrays.devices import Device, Stream
from kfcomm.arrays.devices.host import HOST
from kfcomm.arrays.kinds import NUMPY, ArrayKind, host_kind_of
from kfcomm.arrays.on_device import DeviceArray, DeviceOut, adapt_device, adapt_device_out, is_on_device
from kfcomm.collectives.on_device.through_host import Fetched, Out, OutOfHost, Returned
from kfcomm.collectives.specs import Shape, row_elements
from kfcomm.errors import ConfigError

if TYPE_CHECKING:
    from kfcomm.collectives.on_device.calls import Paths

AnyArray: TypeAlias = "HostArray | DeviceArray"
AnyOut: TypeAlias = "OutArray | DeviceOut"


class GivenArrays:
    """Arrays of one rank in one group.

    ``lack``: reason for which this rank has no device, where others have one.
    """

    def __init__(self, paths: Paths, lack: str) -> None:
        self._group = paths.group
        self._device = paths.device
        self._lack = lack
        self._paths = paths

    def read(self, x: Any, stream: Stream | None) -> AnyArray:
        """Read the caller's array.

        Raises:
            ConfigError: it cannot be exchanged; see ``adapt`` and ``adapt_device``.
        """
        if type(x) is DeviceArray:
            return x
        if not is_on_device(x):
            if stream is not None:
                raise ConfigError("stream= expects arrays in device memory, got arrays of the host")
            return adapt(x)
        return adapt_device(x, self.own_device(), stream)

    def out(self, out: Any, like: AnyArray, shape: Shape) -> AnyOut | None:
        """The caller's memory for the result, if ``out`` was given."""
        if out is None:
            return None
        place: AnyOut
        if isinstance(like, HostArray):
            place = adapt_out(out, shape, like.dtype)
            shares = arrays.overlaps(place.flat, like.flat)
        else:
            place = adapt_device_out(out, shape, like.dtype, self.device_of(like), like.stream)
            shares = on_device.overlaps(like, place)
        if shares:
            raise ConfigError("out shares some of the memory of x: give separate memory, or x itself")
        return place

    def kind_like(self, like: Any, stream: Stream | None = None) -> ArrayKind:
        """Return the kind of ``like`` for results; NumPy's for None.

        Raises:
            ConfigError: it is on a device that this rank does not use.
        """
        if like is None:
            return NUMPY
        if not is_on_device(like):
            return host_kind_of(like)
        array = adapt_device(like, self.own_device(), stream)
        device = self.device_of(array)
        return Returned(array.kind, device, array.stream, self._paths.pool_of(device))

    def on_host(self, x: Any, stream: Stream | None) -> tuple[HostArray, Fetched | None]:
        """The caller's array in host memory, and its transfer if it comes from the device."""
        array = self.read(x, stream)
        if isinstance(array, HostArray):
            return array, None
        return self._on_host(array)

    def joined(self, parts: Sequence[Any], stream: Stream | None) -> tuple[HostArray, list[int], Fetched | None]:
        """Return the arrays of a list, end to end in host memory, their rows, and their transfer if there is one.

        Raises:
            ConfigError: they differ in more than their first dimensions, or in where they are.
        """
        read = [self.read(part, stream) for part in parts]
        first = read[0]
        for part in read:
            row_elements(part.shape)
            if part.dtype != first.dtype or part.shape[1:] != first.shape[1:]:
                raise ConfigError(
                    f"the arrays of a list may differ in their first dimension only, got {first.dtype} {first.shape} "
                    f"and {part.dtype} {part.shape}"
                )
        there = [part for part in read if isinstance(part, DeviceArray)]
        if there and len(there) != len(read):
            raise ConfigError("expected a list of arrays of the host or of a device, got both")
        rows = [part.shape[0] for part in read]
        shape = (sum(rows), *first.shape[1:])
        if isinstance(first, HostArray):
            return HostArray(np.concatenate([part.flat for part in read]), shape, first.kind, False), rows, None
        array, fetched = self._on_host(self._end_to_end(there, shape))
        fetched.keep(read)
        return array, rows, fetched

    def stacked(self, read: Sequence[AnyArray]) -> AnyArray:
        """Stack arrays of one shape and dtype along a new first axis.

        Raises:
            ConfigError: some are on the device and some are not.
        """
        there = [part for part in read if isinstance(part, DeviceArray)]
        here = [part for part in read if isinstance(part, HostArray)]
        shape = (len(read), *read[0].shape)
        if not there:
            return HostArray(np.concatenate([part.flat for part in here]), shape, here[0].kind, False)
        if len(there) != len(read):
            raise ConfigError("expected a list of arrays of the host or of a device, got both")
        return self._end_to_end(there, shape)

    def _end_to_end(self, parts: Sequence[DeviceArray], shape: Shape) -> DeviceArray:
        """Concatenate all of them by a copy, on the stream of the first."""
        first = parts[0]
        device = self.device_of(first)
        flat = device.empty(math.prod(shape), first.dtype, first.stream)
        at = 0
        for part in parts:
            device.wait(first.stream, device.mark(part.stream))
            device.copy(part.flat, flat[at : at + part.flat.size], first.stream)
            at += part.flat.size
        return DeviceArray(flat, shape, first.dtype, first.kind, first.stream)

    def _on_host(self, array: DeviceArray) -> tuple[HostArray, Fetched]:
        group, device = self._group, self.device_of(array)
        pool = self._paths.pool_of(device)
        fetched = Fetched(array, device, pool, group.engine, group.timeout_s)
        return HostArray(fetched.flat, array.shape, Returned(array.kind, device, array.stream, pool), False), fetched

    def out_of_host(self, out: Any, shape: Shape, dtype: np.dtype[Any], stream: Stream | None) -> Out | None:
        """The caller's memory for a result that is made in host memory, if ``out`` was given."""
        if out is None or not is_on_device(out):
            return None if out is None else adapt_out(out, shape, dtype)
        device = self.own_device()
        place = adapt_device_out(out, shape, dtype, device, stream)
        return OutOfHost(place, dtype, device, self._paths.pool_of(device))

    def own_device(self) -> Device:
        """The device of this rank.

        Raises:
            ConfigError: this rank has joined without one.
        """
        if self._device is None:
            raise ConfigError(
                f"{self._group.view.called(self._group.view.rank)} has joined without a device: {self._lack}"
            )
        return self._device

    def device_of(self, array: AnyArray) -> Device:
        """The device whose memory an array is in."""
        return HOST if isinstance(array, HostArray) or self._device is None else self._device
