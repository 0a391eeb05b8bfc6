"""What of a step's communication was hidden behind computation, and what was waited for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kfcomm.engine.meter import StepTally

if TYPE_CHECKING:
    from kfcomm.sync import Communicator
    from kfcomm.torch.buckets import Bucket

NS = 1e-9


class Profile:
    """Of one attached model: see ``kfcomm.monitor.StepStatistics``. Also tells the timeline, if there is one.

    A gradient has arrived when it is seen to have: the oldest of those under way is looked at whenever one is begun.
    """

    def __init__(self, comm: Communicator, name: str) -> None:
        self._engine = comm._session.engine
        self._tally = StepTally()
        meter = self._engine.meter
        if meter is not None:
            meter.steps[comm._inner._group.view.id, name] = self._tally
        self._under_way: deque[Bucket] = deque()
        self._since_ns = self._first_ns = 0

    def came(self) -> None:
        """A gradient has come; the first begins a backward pass."""
        self._first_ns = self._first_ns or time.monotonic_ns()

    def began(self, bucket: Bucket) -> None:
        """Gradients have left."""
        self.look()
        if not self._under_way:
            self._since_ns = time.monotonic_ns()
        self._under_way.append(bucket)
        self._tally.nbytes += bucket.nbytes

    def look(self) -> None:
        """See which have arrived."""
        if not self._under_way:
            return
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft()
        if not self._under_way:
            self._tally.in_flight_s += (time.monotonic_ns() - self._since_ns) * NS

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """The program stands still meanwhile, until the collective of this name is over."""
        begun_ns = time.monotonic_ns()
        try:
            yield
        finally:
            ended_ns = time.monotonic_ns()
            taken_s = (ended_ns - begun_ns) * NS
            tally = self._tally
            tally.waited_s += taken_s
            tally.waited_for[name] = tally.waited_for.get(name, 0.0) + taken_s
            self._tell(f"waiting for {name}", begun_ns, ended_ns)
            self.look()

    def stepped(self) -> None:
        """The program has asked for the optimizer's step."""
        self._tally.count += 1
        if self._first_ns:
            self._tell("backward", self._first_ns, time.monotonic_ns())
            self._first_ns = 0

    def _tell(self, name: str, since_ns: int, until_ns: int) -> None:
        tracer = self._engine.tracer
        if tracer is not None:
            tracer.span(name, since_ns, until_ns)
