"""Measurements of gradients as policies get them: the norms that ranks observe, each with its own batch, once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kfcomm.adapt.metrics import StepMetrics
from kfcomm.adapt.policy import Context, Policy
from kfcomm.train.noise_scale import DECAY, NoiseScale
from kfcomm.types import override

LOCAL_NORM, GRADIENT_NORM = "local_norm", "gradient_norm"
"""Names under which a program observes |g_i| of each rank's gradient, and |ḡ| of their mean."""
SMALL_BATCH, BIG_BATCH, MEASUREMENT = "small_batch", "big_batch", "measurement"
"""Names of the samples of a rank and of all, when the norms were measured, and of the measurement's number."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Norms of one step.

    Attributes:
        local_sq_norm: the mean over the ranks of |g_i|².
        global_sq_norm: |ḡ|².
        small_batch: samples of a rank's gradient.
        big_batch: samples of all.
        number: of the measurement; None where the program does not count them.
    """

    local_sq_norm: float
    global_sq_norm: float
    small_batch: float
    big_batch: float
    number: float | None = None

    @classmethod
    def of(cls, metrics: StepMetrics) -> Measurement | None:
        """Read what the ranks have observed; None where norms or batches are lacking, or there is one rank.

        Norms without batches are taken as those of the step, with its batch.
        """
        known = {name: [x for x in values if x is not None] for name, values in metrics.observed.items()}
        local, mean = known.get(LOCAL_NORM), known.get(GRADIENT_NORM)
        if not local or not mean:
            return None
        batch = metrics.hyperparameters.batch_size or 0
        small_batch = (known.get(SMALL_BATCH) or [batch / metrics.size])[0]
        big_batch = (known.get(BIG_BATCH) or [batch])[0]
        if not 0 < small_batch < big_batch:
            return None
        local_sq_norm = sum(norm * norm for norm in local) / len(local)
        number = next(iter(known.get(MEASUREMENT, ())), None)
        return cls(local_sq_norm, (sum(mean) / len(mean)) ** 2, small_batch, big_batch, number)


class GradientNoise:
    """The noise scale of what a program observes; see ``kfcomm.train.NoiseScale``."""

    def __init__(self, decay: float = DECAY) -> None:
        self._scale = NoiseScale(decay)
        self._last: float | None = None  # number of the measurement that was used last

    @property
    def num_updates(self) -> int:
        """Measurements in the averages."""
        return self._scale.num_updates

    def update(self, metrics: StepMetrics) -> bool:
        """Take a measurement that was not taken before; return whether there was one."""
        found = Measurement.of(metrics)
        if found is None or (found.number is not None and found.number == self._last):
            return False
        self._last = found.number
        self._scale.update(found.local_sq_norm, found.global_sq_norm, found.small_batch, found.big_batch)
        return True

    @property
    def signal(self) -> float | None:
        """|G|²; None while it is unknown, or came out negative."""
        value = self._scale.signal
        return None if value is None or value <= 0 else value

    @property
    def noise(self) -> float | None:
        """tr(Σ), at least 0; None before the first step."""
        value = self._scale.noise
        return None if value is None else max(value, 0.0)

    @property
    def scale(self) -> float | None:
        """The noise scale in samples; None while it is unknown."""
        return self._scale.value

    def interval(self, z: float = 1.96) -> tuple[float, float] | None:
        """Confidence interval of the noise scale; see ``kfcomm.train.NoiseScale.interval``."""
        return self._scale.interval(z)

    @property
    def evidence(self) -> dict[str, Any]:
        """Evidence for the log."""
        return {"noise_scale": self.scale, "signal": self.signal, "noise": self.noise}

    def state_dict(self) -> dict[str, Any]:
        """State for joining ranks."""
        return {"scale": self._scale.state_dict(), "last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another rank."""
        self._scale.load_state_dict(state["scale"])
        self._last = state["last"]


class GradientPolicy(Policy):
    """Base of policies that measure the noise of gradients."""

    _decay: ClassVar[float] = DECAY
    """Of the averages."""
    _shared: ClassVar[tuple[str, ...]] = ()
    """Attributes that ranks which join get, beside the averages."""

    def on_start(self, ctx: Context) -> None:
        """Begin to measure."""
        self._gradients = GradientNoise(self._decay)

    @override
    def state_dict(self) -> Any:
        return [self._gradients.state_dict(), *(getattr(self, one) for one in self._shared)]

    @override
    def load_state_dict(self, state: Any) -> None:
        self._gradients.load_state_dict(state[0])
        for one, value in zip(self._shared, state[1:], strict=True):
            setattr(self, one, value)
