"""Probing: how long it takes between every two ranks of a group, and how much goes through, measured live.

In `live` ranks measure in turns, so that pairs do not disturb each other; `record` is the result, `report` its words.
"""

from kfcomm.probe.live import Prober
from kfcomm.probe.record import Probe

__all__ = ["Probe", "Prober"]
