"""Statistics of gradients measured in an exchange: squared norms for a monitor of ``kfcomm.train``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kfcomm.arrays.norms import squared_norm
from kfcomm.torch.watch import Array

if TYPE_CHECKING:
    from kfcomm.torch.buckets import Bucket
    from kfcomm.train import GradientMonitor


class Measuring:
    """Squared norms for a monitor: of this rank's gradients, and of its share of their mean.

    Measured is a step with one exchanged pass: with more of them a rank's contribution has gradients of the others.
    """

    def __init__(self, monitor: GradientMonitor) -> None:
        self.monitor = monitor
        self.num_numbers = len(monitor.tell(None))
        self._cost_s = 0.0
        self._share = 0.0
        self._has_looked = False
        """Whether the latest pass is measured."""
        self._owed: float | None = None
        """Square of the scale of the share that the monitor waits for."""
        self._awaited: float | None = None
        """Scale of a step whose rows have not come."""
        self._begin_step()

    def _begin_step(self) -> None:
        self._num_passes = 0
        self._sq_norm = 0.0
        self._has_exact = False
        self._rows: Array | None = None

    @property
    def is_looking(self) -> bool:
        """Whether the pass under way is measured."""
        return self._num_passes == 0 and self.monitor.is_due

    def left(self, bucket: Bucket, sq_norm: float, cost_s: float) -> None:
        """Add a bucket that is averaged exactly: of others the norm of the mean is not known."""
        if bucket.is_exact:
            self._has_exact = True
            self._sq_norm += sq_norm
        self._cost_s += cost_s

    def row(self) -> Sequence[float]:
        """Numbers of the monitor."""
        self._has_looked = self.is_looking and self._has_exact
        self._num_passes += 1
        self._share, self._owed = 0.0, None
        cost_s, self._cost_s = self._cost_s, 0.0
        return self.monitor.tell(self._sq_norm if self._has_looked else None, cost_s)

    def told(self, ranks: Sequence[int], numbers: Array) -> None:
        """Keep the numbers until the optimizer's step, or learn from them, if that was made."""
        scale, self._awaited = self._awaited, None
        if scale is None:
            self._rows = numbers
        else:
            self._learn(numbers, scale)

    def arrived(self, bucket: Bucket) -> None:
        """Square this rank's share of an average."""
        if not self._has_looked or not bucket.is_exact:
            return
        begun_s = time.perf_counter()
        flat, rank, size = bucket.content, self.monitor.comm.rank, self.monitor.comm.size
        self._share += squared_norm([flat[rank * flat.size // size : (rank + 1) * flat.size // size]])
        self._cost_s += time.perf_counter() - begun_s
        self._keep_share()

    def stepped(self, scale: float = 1.0) -> None:
        """Learn from a step that is made; its gradients were of a loss times ``scale``."""
        if self._rows is not None:
            self._learn(self._rows, scale)
        elif self._num_passes:  # the rows of deferred gradients may come later
            self._awaited = scale
        self._begin_step()

    def _learn(self, numbers: Array, scale: float) -> None:
        self._owed = scale * scale if self.monitor.learn(numbers.tolist(), scale) else None
        self._keep_share()

    def _keep_share(self) -> None:
        # Deferred averages arrive after the step, one by one.
        if self._owed is not None:
            self.monitor.keep_share(self._share / self._owed)

    def dropped(self) -> None:
        """Learn nothing from a step that is void."""
        self._begin_step()
