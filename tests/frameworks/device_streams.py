"""Streams for tensors in host memory that are treated as those of a device: what attach does with CUDA models, here.

torch computes at once, so no stream holds back any work. What is checked is the order: which streams have waited for
which, and on which one a collective was called.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kfcomm.torch import memory


class DeviceStream:
    """A stream that counts its work, and the work of others that it has waited for.

    Attributes:
        priority: as torch counts; below 0 for urgent ones.
        place: number of the work on it.
        seen: by stream, the work that this one has waited for.
    """

    def __init__(self, priority: int = 0) -> None:
        self.priority = priority
        self.place = 0
        self.seen: dict[DeviceStream, int] = {}

    def wait_stream(self, other: DeviceStream) -> None:
        """Wait for all work that is on another stream now, and what that has waited for."""
        for one, place in {**other.seen, other: other.place}.items():
            self.seen[one] = max(self.seen.get(one, 0), place)

    def has_seen(self, other: DeviceStream) -> bool:
        """Whether it has waited for all work of another stream."""
        return other is self or self.seen.get(other, 0) >= other.place


class DeviceEvent:
    """A place in a stream, which the host may wait for: torch has computed at once."""

    def __init__(self, *, blocking: bool = False) -> None:
        self._is_recorded = False

    def record(self, stream: DeviceStream) -> None:
        """Take the present place of a stream."""
        self._is_recorded = True

    def synchronize(self) -> None:
        """Wait on the host."""
        assert self._is_recorded


class DeviceStreams:
    """Replacement of ``torch.cuda``: streams of a device. Each thread has a default stream, as ranks are threads."""

    Event = DeviceEvent

    def __init__(self) -> None:
        self._chosen = threading.local()

    def Stream(self, device: Any = None, priority: int = 0) -> DeviceStream:  # noqa: N802  as torch calls it
        """Make a stream."""
        return DeviceStream(priority)

    def current_stream(self, device: Any = None) -> DeviceStream:
        """The stream on which the calling thread works."""
        if not hasattr(self._chosen, "stream"):
            self._chosen.stream = DeviceStream()
        found: DeviceStream = self._chosen.stream
        return found

    @contextmanager
    def stream(self, stream: DeviceStream) -> Iterator[None]:
        """Let the calling thread work on another stream."""
        before = self.current_stream()
        self._chosen.stream = stream
        try:
            yield
        finally:
            self._chosen.stream = before


def on_device(patch: pytest.MonkeyPatch) -> DeviceStreams:
    """Treat all tensors as in the memory of a device until the end of the test."""
    streams = DeviceStreams()
    patch.setattr(memory, "streams_of", lambda device: streams)
    return streams
