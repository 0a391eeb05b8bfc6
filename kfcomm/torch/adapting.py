"""Policies of an attachment: an ``Adaptation`` that the optimizer's steps drive, and what its decisions change.

The learning rate of policies is that of the first group of parameters when attached. The quotient of a later rate
and that one is a factor, which all groups get for the time of each step. So schedulers read and write their own rates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kfcomm.adapt.hyperparameters import Hyperparameters
from kfcomm.adapt.metrics import EngineMeter, Reading, StepMeter
from kfcomm.errors import ConfigError
from kfcomm.sync.adaptation import Adaptation
from kfcomm.types import override

if TYPE_CHECKING:
    from kfcomm.adapt import Decision, Policy
    from kfcomm.elastic.sampler import ElasticSampler


WIRE_DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Adapted:
    """Arguments of `attach` about measuring and adapting.

    Attributes:
        monitor: True, a ``GradientMonitor``, or its options.
        policies: among them one ``GuardSteps`` at most.
        batch_size: samples of a step, over all ranks; that of the sampler, if left out.
        sampler: whose batch follows.
        hyperparameters: that policies may change; by default batch size, learning rate and wire dtype.
    """

    monitor: Any = False
    policies: tuple[Policy, ...] = ()
    batch_size: int | None = None
    sampler: ElasticSampler | None = None
    hyperparameters: Hyperparameters | None = None

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to do in a step."""
        return bool(self.monitor) or bool(self.policies)

    def described(self) -> dict[str, str]:
        """Description, which ranks compare."""
        policies = ", ".join(getattr(one, "name", repr(one)) for one in self.policies)
        return {"monitor": str(bool(self.monitor)), "policies": policies, "batch_size": str(self.batch_size)}

    def followed(self, optimizer: torch.optim.Optimizer) -> Hyperparameters:
        """Hyperparameters with their first values."""
        if self.hyperparameters is not None:
            return self.hyperparameters
        batch = self.batch_size if self.sampler is None else self.sampler.batch
        rate = float(optimizer.param_groups[0]["lr"])
        return Hyperparameters(batch_size=batch, learning_rate=rate, wire_dtypes=WIRE_DTYPES)


class RateFactors:
    """Learning rates of an optimizer, times a factor for the time of a step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._changed: list[tuple[dict[str, Any], Any, Any]] = []  # group, its own rate, and the rate of the step

    def begin(self, factor: float) -> None:
        """Multiply the rates."""
        self.end()
        if factor != 1.0:
            for group in self._optimizer.param_groups:
                own = group["lr"]
                group["lr"] = own * factor
                self._changed.append((group, own, group["lr"]))

    def end(self) -> None:
        """Make them what they were, unless the program has set others meanwhile."""
        for group, own, scaled in self._changed:
            if group["lr"] is scaled:
                group["lr"] = own
        self._changed.clear()


class ContinuousMeter(StepMeter):
    """Readings of the engine in which a step begins where the one before has ended."""

    # The policies' step begins and ends within ``optimizer.step()``, so that an error of the program elsewhere leaves
    # no step open. What they see is the time from one to the next.

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._of: Any = None  # births of the epoch of the meter
        self._meter: EngineMeter | None = None
        self._last: Reading | None = None
        self._goes_back = False

    def go_back(self) -> None:
        """Let the next reading be the last one again: the beginning of a step."""
        self._goes_back = True

    @override
    def read(self) -> Reading:
        if self._meter is None or self._comm.births != self._of:  # totals are of the engine of an epoch
            self._of, self._meter, self._last = self._comm.births, EngineMeter(self._comm), None
        goes_back, self._goes_back = self._goes_back, False
        if not goes_back or self._last is None:
            self._last = self._meter.read()
        return self._last


@dataclass(frozen=True)
class ChangeReceivers:
    """Receivers of decisions: called with the new value, between two steps, on all ranks alike.

    Attributes:
        batch_size: of all ranks.
        wire_dtype: of gradients.
        free: a free hyperparameter, with its name before the value.
    """

    batch_size: Callable[[int], object]
    wire_dtype: Callable[[str | None], object]
    free: Callable[[str, Any], object]


@dataclass(slots=True)
class StepSamples:
    """A step for ``Adaptation.step``: its samples, none of a void one, and the sampler that gave them."""

    batch: Any
    sampler: Any = None

    def void(self) -> None:
        """Nothing: the driver has given the samples back."""


class Policies:
    """Policies and the hyperparameters that they set.

    Args:
        comm: of the ranks.
        policies: of ``kfcomm.adapt``.
        hyperparameters: that they may change.
        changes: where the changes go to.
    """

    def __init__(
        self, comm: Any, policies: Sequence[Policy], hyperparameters: Hyperparameters, changes: ChangeReceivers
    ) -> None:
        self._comm = comm
        self._given = policies
        self._hyperparameters = self._first = hyperparameters
        self._rate = hyperparameters.learning_rate
        self._changes = changes
        self._meter = ContinuousMeter(comm._inner)
        self._adaptation: Adaptation | None = None
        self._loaded: Any = None  # state of an adaptation that is not made yet
        self._past: list[Decision] = []  # of adaptations that are over

    @property
    def adaptation(self) -> Adaptation:
        """The adaptation, which is made when it is first needed: in an elastic job that is within the ``Elastic``."""
        if self._adaptation is None:
            self._adaptation = Adaptation(
                self._comm, self._given, meter=self._meter, hyperparameters=self._hyperparameters
            )
            if self._loaded is not None:
                self._adaptation.load_state_dict(self._loaded)
        return self._adaptation

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Hyperparameters in force."""
        return self._hyperparameters if self._adaptation is None else self._adaptation.hyperparameters

    @property
    def changes_algorithms(self) -> bool:
        """Whether policies may change the algorithm, or options of it."""
        return bool(self.hyperparameters.agreements or self.hyperparameters.free)

    @property
    def changed(self) -> dict[str, Any]:
        """Free hyperparameters that do not have their first values any more."""
        free = self.hyperparameters.free
        return {name: one.value for name, one in free.items() if one.value != self._first.free[name].value}

    @property
    def factor(self) -> float:
        """Factor of the learning rates."""
        rate = self.hyperparameters.learning_rate
        return rate / self._rate if rate is not None and self._rate else 1.0

    @property
    def decisions(self) -> list[Decision]:
        """Decisions so far."""
        return [*self._past, *([] if self._adaptation is None else self._adaptation.decisions)]

    def observe(self, values: Mapping[str, float]) -> None:
        """Share numbers of this rank at the next meeting."""
        if values:
            self.adaptation.observe(**values)

    @property
    def is_over(self) -> bool:
        """Whether a policy has asked for the end of training."""
        return self._adaptation is not None and self._adaptation.is_over

    def end_step(self, samples: StepSamples) -> None:
        """Meet the other ranks, and make the changes that the policies have decided on."""
        before = self.hyperparameters
        self._meter.go_back()
        with self.adaptation.step(samples):
            pass
        self.follow(before)

    def follow(self, before: Hyperparameters) -> None:
        """Make the changes from former hyperparameters to those in force."""
        now = self.hyperparameters
        if now is before:
            return
        if now.batch_size is not None and now.batch_size != before.batch_size:
            self._changes.batch_size(now.batch_size)
        if now.wire_dtype != before.wire_dtype:
            self._changes.wire_dtype(now.wire_dtype)
        for name, one in now.free.items():
            if one.value != before.value(name):
                self._changes.free(name, one.value)

    def state_dict(self) -> dict[str, Any]:
        """Hyperparameters in force, the learning rate that is factor 1, and the state of the policies."""
        inner = self._loaded if self._adaptation is None else self._adaptation.state_dict()
        return {"rate": self._rate, "hyperparameters": self.hyperparameters.as_json(), "adaptation": inner}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; an adaptation that has met the other ranks knows better."""
        if self._adaptation is not None:
            return
        before = self._hyperparameters
        try:
            self._hyperparameters = Hyperparameters.from_json(state["hyperparameters"])
        except (KeyError, TypeError) as error:
            raise ConfigError(f"the hyperparameters of a state cannot be read: {error}") from error
        self._rate, self._loaded = state["rate"], state["adaptation"]
        self.follow(before)

    def close(self) -> None:
        """End the meetings; another step begins them anew, with the state that the policies had."""
        if self._adaptation is not None:
            ended, self._adaptation = self._adaptation, None
            self._hyperparameters, self._loaded = ended.hyperparameters, ended.state_dict()
            self._past += ended.decisions
            ended.__exit__(None, None, None)
