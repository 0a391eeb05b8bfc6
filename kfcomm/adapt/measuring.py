"""Where the measurements of a step come from: the engine's totals, read at its begin and at its end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from kfcomm.adapt.metrics import Reading
from kfcomm.engine.load import Load

if TYPE_CHECKING:
    from kfcomm.world.communicator import Communicator


class StepMeter(Protocol):
    """What tells an ``Adaptation`` how its rank is doing."""

    def read(self) -> Reading:
        """The totals of this moment."""


class EngineMeter:
    """The totals of the engine below a communicator: all collectives of the rank, whatever their group.

    Where monitoring is off nobody is seen to be waited for; the rest is there all the same.
    """

    def __init__(self, comm: Communicator) -> None:
        comm = getattr(comm, "current", comm)  # of this epoch, where it lives through several
        engine = comm._session.engine
        self._comm = comm
        self._engine = engine
        if engine.load is None:
            engine.load = Load(engine.in_flight)
        self._load = engine.load

    def read(self) -> Reading:
        """See `StepMeter`."""
        now_s = time.monotonic()
        meter = self._engine.meter
        members = self._comm._group.view.members
        waited_s = (0.0,) * len(members) if meter is None else tuple(meter.waited_s[member] for member in members)
        return Reading(now_s, self._load.busy_s(now_s), self._load.nbytes, self._load.count, waited_s)
