"""Average of a model's gradients while the program computes them, by hooks: what `attach` does for synchronous SGD.

A step::

    backward pass     each gradient goes to its place as it comes; a full bucket is sent, under its own name
    its end           missing gradients are sent as zeros; ``backward()`` returns when all averages have arrived
    optimizer.step()  applies the averages, which are the same on all ranks

Invariants: each gradient is averaged once, on every rank; memory under way is not written to; a step applies only
gradients that were averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from kfcomm.arrays.devices.routes import Route
from kfcomm.errors import ConfigError
from kfcomm.torch.buckets import Bucket, BucketPlace, Named, share_out
from kfcomm.torch.compiling import has_compiled, uncompiled
from kfcomm.torch.compression import Compression, Given, GradientAverage
from kfcomm.torch.deferred import Deferred
from kfcomm.torch.exchange import GradientExchange
from kfcomm.torch.memory import DeviceMemory, HostGradients, is_on_device
from kfcomm.torch.reductions import aside, is_elastic
from kfcomm.torch.steps import Closure, Passes, hook_steps, mean_loss
from kfcomm.train.composite import CompositeState

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from kfcomm.torch.driver import StepDriver

BUCKET_NBYTES = 4 << 20
DEVICE_BUCKET_NBYTES = 25 << 20
"""Of buckets on a device, where a call costs more and a copy less."""
SHARED_DEVICE_BUCKET_NBYTES = 256 << 20
"""Where ranks share a device: each call waits for time slices of the others, 2 to 4 ms on an H200."""
LEAST_BUCKETS = 6
"""Where a backend works beside the backward pass: the exchange of the last bucket is not hidden."""
LEAST_NBYTES = 1 << 20


@dataclass(frozen=True)
class Parts:
    """An attached model and optimizer, the communicator, and the prefix of its collectives."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    comm: Any
    name: str


@dataclass(frozen=True)
class TrafficOptions:
    """How gradients travel; see `attach`."""

    defer: bool = False
    bucket_nbytes: int | None = None
    wire_dtype: Any = None
    compression: Given = None


class Method(Protocol):
    """How the ranks of an attachment agree, by hooks on the gradients and on the optimizer's steps."""

    syncs: bool
    """Whether backward passes exchange gradients: not within ``no_sync``."""

    @property
    def keeps_replicas(self) -> bool:
        """Whether the models of the ranks differ."""

    def finish(self) -> None:
        """Wait for everything that was deferred or is under way on this rank."""

    @uncompiled
    def wait(self) -> None:
        """Wait, and exchange what was gathered without an exchange; on all ranks."""

    def close(self) -> None:
        """Leave nothing undone, before the hooks are removed."""

    def remove(self) -> None:
        """Remove all hooks."""

    def state_dict(self) -> dict[str, Any]:
        """State between two steps, see `snapshot`."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""

    def merging(self) -> Mapping[str, str]:
        """Conversions of the values that differ between ranks."""


class GradientAveraging:
    """Synchronous SGD, or Adasum, by buckets.

    Args:
        parts: attached.
        traffic: how gradients travel.
        buckets: of all gradients.
        met: called at the beginning of each pass, see `Comparison`.
        driver: of the steps; None where nothing is measured or adapted.
    """

    keeps_replicas = False

    def __init__(
        self, parts: Parts, traffic: TrafficOptions, buckets: Sequence[Bucket], met: Callable[[], bool],
        driver: StepDriver | None = None,
    ) -> None:  # fmt: skip
        self.syncs = True
        self._parts = parts
        self._met = met
        self._optimizer = optimizer = parts.optimizer
        self._driver = driver
        watch = None if driver is None else driver.watch
        self.exchange = exchange = GradientExchange(parts.comm, parts.name, buckets, parts.model, watch)
        if driver is not None:
            driver.drive(exchange)
        self._averages = CompositeState({str(n): bucket.average for n, bucket in enumerate(buckets)})
        has_workers = any(bucket.memory.is_on_device for bucket in buckets)
        self._passes = Passes(self._leave, self._end_of_pass, exchange.fail, has_workers=has_workers)
        self._parameters = frozenset(place.parameter for place in exchange.places)
        self._deferred = Deferred(optimizer, exchange) if traffic.defer else None
        self._is_averaged = False
        """Whether a pass has been averaged since the latest step."""
        self._hooks: list[RemovableHandle] = [hook_steps(optimizer, self._before_step, self._around_step)]
        if self._deferred is not None:
            self._hooks += self._deferred.hooks(self._hooks[0])
        for bucket in exchange.buckets:
            self._hooks += bucket.watch(parts.model)
            for place in bucket.places:
                hook = partial(self._accumulated, bucket, place)
                self._hooks.append(place.parameter.register_post_accumulate_grad_hook(hook))

    def __repr__(self) -> str:
        return f"{len(self._parameters)} parameters in {len(self.exchange.buckets)} buckets"

    def wait(self) -> None:
        """Wait until nothing is under way, and every ``parameter.grad`` is the average, on all ranks."""
        self.finish()
        if any(place.has_come or place.is_foreign for place in self.exchange.places):
            self._leave()
            self.exchange.settle()

    close = wait

    def remove(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The number of steps, the options of the latest one, and what compressors keep."""
        steps = self.exchange.steps
        return {"steps": [steps.count, steps.text], **self._averages.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        steps = self.exchange.steps
        steps.count, steps.text = state["steps"]
        self._averages.load_state_dict(state)

    def merging(self) -> Mapping[str, str]:
        """Conversions of what compressors keep."""
        return self._averages.merging()

    # ---------------------------------------------------------------- backward

    @uncompiled
    def _accumulated(self, bucket: Bucket, place: BucketPlace, parameter: torch.Tensor) -> None:
        """Take a gradient that autograd has made, or added to."""
        is_inner = self.syncs and self._passes.join()
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise ConfigError(f"the gradient of {place.name} is sparse: only dense ones can be averaged here")
        if self.exchange.has_left:  # of an earlier pass: its memory is needed
            self.finish()
        place.has_come = True
        if self.syncs:
            self._look_at_ranks()
            self.exchange.came(bucket, place, is_inner=is_inner)

    def _look_at_ranks(self) -> None:
        """Exchange with the ranks that there are now; while a pass is under way they stay the same."""
        if self._met():
            self.exchange.renew()

    def _end_of_pass(self) -> None:
        # A compiled function takes all of its parameters at once, and takes them as they are.
        if self._deferred is None or has_compiled():
            self.exchange.settle()
        else:
            self._deferred.cover()

    def _leave(self) -> None:
        self._is_averaged = True
        try:
            self._look_at_ranks()
            self.exchange.leave()
        except BaseException:
            self.exchange.clear()
            raise

    def finish(self) -> None:
        """Wait for everything that was deferred or is under way."""
        if self._deferred is not None:
            self._deferred.finish()
            self._deferred.show()
        self.exchange.drain()

    # ---------------------------------------------------------------- the optimizer's step

    def _before_step(self) -> None:
        self._begin_step()
        is_good = self._driver is None or self._driver.begin(self.finish)
        if is_good and (self._deferred is None or not self._deferred.take()):
            self.finish()
            self._check()
        self._is_averaged = False
        self.exchange.steps.made(self._optimizer)

    def _around_step(self) -> Callable[[Closure], Any]:
        self._begin_step()
        self.finish()
        self.exchange.steps.made(self._optimizer)

        def settled(loss: Any) -> Any:
            self.finish()
            self._check()
            return mean_loss(self._parts.comm, loss, aside(self._parts.comm, f"{self._parts.name}/loss"))

        if self._driver is None:
            return lambda closure: settled(closure())
        return self._driver.around(self.finish, settled)

    def _begin_step(self) -> None:
        found = {one for group in self._optimizer.param_groups for one in group["params"] if one.requires_grad}
        if not found <= self._parameters:
            raise ConfigError("the optimizer has got parameters since it was attached: detach, and attach again")
        self.exchange.profile.stepped()

    def _check(self) -> None:
        """Refuse gradients that are not averages."""
        for place in self.exchange.places:
            if place.has_come and place.parameter.grad is not None:
                raise ConfigError(
                    f"the gradient of {place.name} was gathered in no_sync and not averaged: make the last backward "
                    "pass of a step outside of it, or call attached.wait() on all ranks"
                )
            if not self._is_averaged and place.is_foreign:
                raise ConfigError(
                    f"the program has put a gradient of {place.name} into parameter.grad itself, which is not "
                    "averaged: call attached.wait() on all ranks before it is used"
                )


Shares = list[tuple[list[Named], "Compression | None"]]
"""The parameters of each bucket, and the compression of their gradients."""


def shares(
    parameters: Sequence[Named], traffic: TrafficOptions, chosen: Mapping[str, Compression | None], comm: Any
) -> Shares:
    """Parameters by buckets; ``chosen``: the compression of each parameter's gradient."""
    # A backward pass makes gradients in about the reverse order of the model.
    found: Shares = []
    for is_far in (False, True):
        some = [(name, one) for name, one in parameters[::-1] if is_on_device(one) is is_far]
        nbytes = traffic.bucket_nbytes
        if nbytes is None:
            nbytes = _device_bucket_nbytes(some, comm) if is_far else BUCKET_NBYTES
        found += [(part, chosen[part[0][0]]) for part in share_out(some, nbytes, chosen)]
    return found


def _device_bucket_nbytes(parameters: Sequence[Named], comm: Any) -> int:
    """Largest size of buckets on a device, by the route of the ranks, which is the same on all."""
    route = None if is_elastic(comm) or comm.route is None else comm.route.route
    if route is Route.SLOTS:
        return SHARED_DEVICE_BUCKET_NBYTES
    if route in (Route.BACKEND, Route.HIERARCHY):
        whole_nbytes: int = sum(one.nbytes for _, one in parameters)
        return min(DEVICE_BUCKET_NBYTES, max(LEAST_NBYTES, -(-whole_nbytes // LEAST_BUCKETS)))
    return DEVICE_BUCKET_NBYTES


def buckets_of(parts: Parts, traffic: TrafficOptions, shared: Shares, op: str) -> list[Bucket]:
    """Buckets with their memory, whose gradients are combined by ``op``."""
    buckets, memories = [], dict[torch.device, HostGradients | DeviceMemory]()
    for part, kind in shared:
        name, device = title(parts.name, part), part[0][1].device
        if device not in memories:
            memories[device] = DeviceMemory(device) if is_on_device(part[0][1]) else HostGradients()
        begin_after = 0 if kind is None else kind.begin_after
        average = GradientAverage(name, kind, wire_dtype=traffic.wire_dtype, begin_after=begin_after, op=op)
        buckets.append(Bucket(parts.comm, part, name, average, memories[device]))
    return buckets


def title(name: str, part: Sequence[Named]) -> str:
    """The name of a bucket's collective, as errors and statistics show it."""
    first = f"{name}/{part[0][0]}"
    return first if len(part) == 1 else f"{first} and {len(part) - 1} more"
