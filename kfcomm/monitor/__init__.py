"""What a process knows of its own communication, for its program and for those who watch it.

The figures are kept by the runtime (``runtime.meter``, ``runtime.traffic``); this room reads them and makes records of
them. What always holds: reading happens on any thread, stops nobody, and changes nothing that others read.
"""

from kfcomm.monitor.records import KeyStatistics, PeerStatistics, Statistics, StrategyStatistics

__all__ = ["KeyStatistics", "PeerStatistics", "Statistics", "StrategyStatistics"]
