"""Launches of NCCL that are repeated with the same memory, as CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kfcomm.transports.base import Launch

logger = logging.getLogger("kfcomm")

FREE_CAPTURES = 3
REPLAYS_FOR_ONE = 64
"""Captures that are made in any case, and replays that pay for each further one: a capture of 214 arrays takes some ten
times as long as a launch, so memory that changes all the time is launched plainly."""


class Replayed:
    """Launches that become a CUDA graph when they come twice with the same memory, and are captured anew with other.

    Args:
        cuda: see `Nccl`.
        put: puts a launch with these sources and targets on a stream.
        failed: called with the reason why nothing can be captured.
    """

    def __init__(self, cuda: Any, put: Launch, failed: Callable[[str], None]) -> None:
        self._cuda = cuda
        self._failed = failed
        self._put = put
        self._latest: tuple[list[int], list[int]] = ([], [])
        self._graph: Any = None
        self._stream: Any = None
        self._on: Any = None
        self._is_possible = True
        self._num_captures = self._num_replays = 0

    def launch(self, sources: list[int], targets: list[int], pointer: int) -> None:
        """Launch, or replay the latest launch."""
        if sources != self._latest[0] or targets != self._latest[1]:
            self._latest, self._graph = (sources, targets), None
        elif self._graph is None and self._is_possible and self._num_captures < self._allowed():
            self._num_captures += 1
            self._graph = self._captured()
        if self._graph is None:
            self._put(sources, targets, pointer)
            return
        if self._on is None or self._on.ptr != pointer:
            self._on = SimpleNamespace(ptr=pointer)
        self._num_replays += 1
        self._graph.launch(self._on)

    def drop(self) -> None:
        """Replay no more: NCCL does not end while a graph of it is there."""
        self._graph, self._is_possible = None, False

    def _allowed(self) -> int:
        return FREE_CAPTURES + self._num_replays // REPLAYS_FOR_ONE

    def _captured(self) -> Any:
        """Return a graph of the latest launch; None where CUDA or NCCL cannot capture."""
        if self._stream is None:
            self._stream = self._cuda.Stream(non_blocking=True)
        graph = None
        try:
            self._stream.begin_capture()
            try:
                self._put(*self._latest, self._stream.ptr)
            finally:
                graph = self._stream.end_capture()
        except Exception as error:  # noqa: BLE001  launches go on as they are
            self._is_possible = False
            self._failed(f"NCCL could not capture one: {error}")
            logger.warning(
                "a batch is launched each time, not replayed as a CUDA graph: NCCL could not capture it: %s", error
            )
            return None
        return graph
