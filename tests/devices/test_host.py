"""The host as a device: everything is done when the call returns."""

from __future__ import annotations

import numpy as np

from kfcomm.arrays.devices import Device, DeviceReport
from kfcomm.arrays.devices.host import HostDevice


def test_copies_are_done_at_once_in_any_dtype():
    device: Device = HostDevice()
    stream = device.stream(urgent=True)
    device.wait(stream, device.mark(stream))
    block = device.pinned(24)
    x = np.arange(3.0)
    device.fetch(x, block, stream)
    y = device.empty(3, x.dtype, stream)
    device.put(block, y, stream)
    z = device.empty(3, x.dtype, stream)
    device.copy(y, z, stream)
    heard = []
    device.notify(stream, heard.append)
    assert heard == [None]
    assert z.tolist() == x.tolist()
    device.close()


def test_host_report_is_empty():
    device = HostDevice()
    assert device.report == DeviceReport()
    assert device.ordinal == 0
