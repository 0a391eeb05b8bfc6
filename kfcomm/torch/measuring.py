"""Statistics of gradients measured in an exchange: squared norms for a monitor of ``kfcomm.train``.

For gradients on a device two numbers stay there: |g|² of this rank, which all ranks gather, and that of its share of
the mean. The host reads both when the next pass begins, from the stream of the exchanges, which has no work of that
pass yet. So the host does not wait for the device, and the monitor learns one step later.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kfcomm.arrays.norms import squared_norm
from kfcomm.torch.memory import squared_norm_on_device
from kfcomm.torch.reductions import aside, is_elastic
from kfcomm.torch.watch import Array

if TYPE_CHECKING:
    from kfcomm.torch.buckets import Bucket
    from kfcomm.train import GradientMonitor


class Measuring:
    """Squared norms for a monitor: of this rank's gradients, and of its share of their mean.

    Measured is a step with one exchanged pass: with more of them a rank's contribution has gradients of the others.

    Args:
        monitor: learns from them.
        name: of the collective of norms on devices.
    """

    def __init__(self, monitor: GradientMonitor, name: str) -> None:
        self.monitor = monitor
        self._name = aside(monitor.comm, f"{name}/norms")
        self.num_numbers = len(monitor.tell(None))
        self._cost_s = 0.0
        self._share: Any = 0.0
        self._memory: Any = None
        """Of buckets on a device."""
        self._norms: Any = None
        """Handle of all ranks' |g|² on the device, of the latest pass, if that is measured there."""
        self._unread: tuple[Array, float, Any] | None = None
        """Rows, scale, and such a handle, of a step that the monitor has not learned from."""
        self._has_looked = False
        """Whether the latest pass is measured."""
        self._owed: float | None = None
        """Square of the scale of the share that the monitor waits for."""
        self._awaited: float | None = None
        """Scale of a step whose rows have not come."""
        self._begin_step()

    def _begin_step(self) -> None:
        self._num_passes = 0
        self._sq_norm: Any = 0.0
        self._has_exact = False
        self._rows: Array | None = None

    @property
    def is_looking(self) -> bool:
        """Whether the pass under way is measured."""
        return self._num_passes == 0 and self.monitor.is_due

    def catch_up(self) -> None:
        """Let the monitor learn from a step whose numbers were left on the device."""
        if self._unread is None:
            return
        (rows, scale, norms), self._unread = self._unread, None
        numbers, share = norms.wait(), self._share
        with self._memory.aside():
            both = torch.cat([numbers, share.reshape(1)]) if isinstance(share, torch.Tensor) else numbers
        found = self._memory.fetched(both).tolist()
        if isinstance(share, torch.Tensor):
            self._share = found.pop()
        rows = rows.copy()
        rows[:, 0] = found
        self.monitor.amend(found[self.monitor.comm.rank])
        self._owed = scale * scale if self.monitor.learn(rows.tolist(), scale) else None
        self._keep_share()
        self._owed = None

    def left(self, bucket: Bucket, sq_norm: float | torch.Tensor, cost_s: float) -> None:
        """Add a bucket that is averaged exactly: of others the norm of the mean is not known."""
        if bucket.is_exact:
            self._has_exact = True
            self._sq_norm += sq_norm
            if isinstance(sq_norm, torch.Tensor):
                self._memory = bucket.memory
        self._cost_s += cost_s

    def row(self) -> Sequence[float]:
        """Numbers of the monitor."""
        self._has_looked = self.is_looking and self._has_exact
        self._num_passes += 1
        self._share, self._owed, self._norms = 0.0, None, None
        cost_s, self._cost_s = self._cost_s, 0.0
        sq_norm = self._sq_norm if self._has_looked else None
        if isinstance(sq_norm, torch.Tensor) and is_elastic(self.monitor.comm):
            sq_norm = float(sq_norm)  # collectives of device memory do not survive the loss of a rank
        elif isinstance(sq_norm, torch.Tensor):
            with self._memory.leaving():
                self._norms = self.monitor.comm.all_gather_async(sq_norm, self._name)
            sq_norm = 0.0  # until ``catch_up``
        return self.monitor.tell(sq_norm, cost_s)

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
        count = bucket.tensor.numel()
        part = flat[rank * count // size : (rank + 1) * count // size]
        if isinstance(part, torch.Tensor):
            with bucket.memory.aside():
                self._share += squared_norm_on_device(part)
            bucket.memory.arrived()  # before the program writes to it
        else:
            self._share += squared_norm([part])
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
        if self._norms is not None:
            self._unread, self._norms = (numbers, scale, self._norms), None
            return
        self._owed = scale * scale if self.monitor.learn(numbers.tolist(), scale) else None
        self._keep_share()

    def _keep_share(self) -> None:
        # Deferred averages arrive after the step, one by one.
        if self._owed is not None:
            self.monitor.keep_share(float(self._share) / self._owed)

    def dropped(self) -> None:
        """Learn nothing from a step that is void."""
        self._begin_step()
