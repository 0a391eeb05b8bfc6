"""Observation of a process's communication: statistics, metrics, timelines, dumps, and tools that read them.

The figures are kept by the engine (``engine.meter``, ``engine.traffic``); this layer reads them and makes records of
them. Invariants: reading happens on any thread, stops no rank, and changes nothing that others read.
"""

from typing import TYPE_CHECKING

from kfcomm.common.imports import imported_when_used

if TYPE_CHECKING:
    from kfcomm.monitor.statistics import (
        KeyStatistics,
        PeerStatistics,
        RecentEvent,
        Statistics,
        StepStatistics,
        StrategyStatistics,
    )
    from kfcomm.transports.tcp_path import TcpPath
else:  # type checkers would take any name for one that is there
    __getattr__ = imported_when_used(
        __name__,
        dict.fromkeys(
            ("KeyStatistics", "PeerStatistics", "RecentEvent", "Statistics", "StepStatistics", "StrategyStatistics"),
            "kfcomm.monitor.statistics",
        )
        | {"TcpPath": "kfcomm.transports.tcp_path"},
    )

__all__ = [
    "KeyStatistics",
    "PeerStatistics",
    "RecentEvent",
    "Statistics",
    "StepStatistics",
    "StrategyStatistics",
    "TcpPath",
]
