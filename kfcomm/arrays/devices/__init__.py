"""Accelerators: what the runtime needs of one, and memory of the host that one can reach by itself."""

from kfcomm.arrays.devices.base import Device, DeviceReport, Flat, Mark, Stream

__all__ = ["Device", "DeviceReport", "Flat", "Mark", "Stream"]
