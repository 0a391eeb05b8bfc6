"""Probing: how long it takes between every two ranks of a group, and how much goes through, measured live.

`record` is what comes out; `schedule` says who measures when, so that probes don't disturb each other; `wire` measures
one way; `live` brings them together. `report` and `page` are for people.
"""

from kfcomm.probe.live import Prober
from kfcomm.probe.record import Probe

__all__ = ["Probe", "Prober"]
