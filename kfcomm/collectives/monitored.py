"""The verb that also says how fast it was: for programs, and policies, that choose their strategy by that."""

from __future__ import annotations

import time
from typing import Any, TypeVar

import numpy as np

from kfcomm.collectives.group import Group
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.messages import Messages
from kfcomm.collectives.options import CallOptions
from kfcomm.collectives.specs import ALL_REDUCE
from kfcomm.engine.meter import Meter
from kfcomm.types import Op, Seconds, override

T = TypeVar("T")


class Timed(Handle[T]):
    """A handle that tells a meter, when its collective is complete, how long that took since its post."""

    __slots__ = ("_nbytes", "_posted_s", "_under")

    def begin(self, group: Group, meter: Meter, nbytes: int) -> None:
        """It is posted now, under the strategy in force."""
        self._nbytes = nbytes
        self._under = meter.throughput(group.view, group.strategy.name)
        self._posted_s = time.monotonic()

    @override
    def set_result(self, result: T) -> None:
        self._under.note(self._nbytes, time.monotonic() - self._posted_s)
        super().set_result(result)


class Monitored(Messages):
    """``monitored_all_reduce``, and all other verbs."""

    def monitored_all_reduce(
        self, x: Any, name: str | None = None, *, op: Any = Op.SUM, out: Any = None,
        timeout: Seconds | None = None, priority: int = 0, wire_dtype: Any = None, stream: Any = None,
    ) -> Handle[Any]:  # fmt: skip
        """The same as ``all_reduce``, whose calls it meets on other ranks; its throughput on this rank is recorded.

        That is the bytes of ``x`` over the seconds from post to completion, under the strategy in force: see
        ``StrategyStatistics``, also for the reference, which means something if monitored calls are of one size: one in
        each step, say. Calls that fail are not recorded, and none are while monitoring is off. Cost: 1 µs more.
        """
        group = self._group
        meter = group.engine.meter
        if meter is None:
            return self.all_reduce(
                x, name, op=op, out=out, timeout=timeout, priority=priority, wire_dtype=wire_dtype, stream=stream
            )
        handle: Timed[Any] = Timed(loop=group.engine.loop)
        options = CallOptions(op, None, out, timeout, priority, wire_dtype, stream)
        if type(x) is np.ndarray:
            nbytes = x.nbytes
        else:
            with self._checks(name, options, on_device=True) as (name, options):
                x = self._devices.read(x, stream)
            nbytes = x.flat.nbytes
        group.in_order(lambda: handle.begin(group, meter, nbytes))
        if timeout is None and wire_dtype is None and stream is None and not priority:
            again = self._again(x, name, (ALL_REDUCE, op), out, handle)
            if again is not None:
                return again
        return self._collective(ALL_REDUCE, x, name, options, handle)
