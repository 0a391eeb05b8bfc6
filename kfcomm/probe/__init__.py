"""Probing: how long it takes between every two ranks of a group, and how much goes through, measured live.

`record` is the result; `live` has ranks measure in turns, so that pairs do not disturb each other; `wire` measures one
way; `report` is for people.
"""

from kfcomm.probe.live import Prober
from kfcomm.probe.record import Probe

__all__ = ["Probe", "Prober"]
