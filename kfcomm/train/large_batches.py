"""Large batches: LARS, LAMB, AdaScale, and the learning rate for a batch.

LARS and LAMB measure the step of a layer against the layer itself, so that one learning rate serves all layers. Their
trust ratios are of whole layers: an array that holds several layers, or a part of one, gets another ratio.

AdaScale: Johnson, Agrawal, Gu, Guestrin, "AdaScale SGD: A User-Friendly Algorithm for Distributed Training", ICML 2020,
https://arxiv.org/abs/2007.05105; averages and bounds are those of fairscale's ``AdaScale``. A step with S times the
batch is worth r steps with the batch of the schedule, 1 ≤ r ≤ S: S where gradients are all noise, 1 where they are all
alike. The learning rate is multiplied by r, and the schedule is read at the sum of all r, not at the number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kfcomm.errors import ConfigError
from kfcomm.train.gradient_statistics import MovingAverage, gain

LEAST_VARIANCE = 1e-6
_LEAST_NBYTES = 4


class AdaScale:
    """The gain along training, with averages as fairscale keeps them.

    Args:
        num_gradients: cN, how many gradients make a step: ranks times accumulations; at least 2.
        scale: S, the batch of a step in batches of the schedule; None for ``num_gradients``.
        decay: of the averages; None for fairscale's max(1 − cN / 1000, 0).

    Attributes:
        scale: S.
        progress: the steps so far, in steps of the schedule: the sum of the gains.

    Raises:
        ConfigError: a number is out of its range.
    """

    def __init__(self, num_gradients: int, *, scale: float | None = None, decay: float | None = None) -> None:
        if num_gradients < 2:
            raise ConfigError(f"AdaScale compares at least 2 gradients, not {num_gradients!r}")
        self.scale = float(num_gradients) if scale is None else scale
        if not self.scale > 0:
            raise ConfigError(f"the scale of a batch is above 0, not {scale!r}")
        self.progress = 0.0
        self._num_gradients = num_gradients
        found = max(1 - num_gradients / 1000, 0.0) if decay is None else decay
        self._variance = MovingAverage(found)
        self._signal = MovingAverage(found)

    def update(self, local_sq_norm: float, global_sq_norm: float) -> float:
        """Take one step's norms; returns its gain, which is added to ``progress``.

        σ² = S (Σ|g_i|²/cN − |ḡ|²) / (cN − 1), at least 1e-6; μ² = |ḡ|² − σ²/S, at least 0. A step whose norms are not
        finite does not change the averages, and adds the same gain again.

        Args:
            local_sq_norm: the mean over the cN gradients of |g_i|².
            global_sq_norm: |ḡ|², of their mean.
        """
        variance = self.scale * (local_sq_norm - global_sq_norm) / (self._num_gradients - 1)
        signal = global_sq_norm - variance / self.scale
        if math.isfinite(variance) and math.isfinite(signal):
            self._variance.update(max(variance, LEAST_VARIANCE))
            self._signal.update(max(signal, 0.0))
        found = self.gain()
        self.progress += found
        return found

    def gain(self, scale: float | None = None) -> float:
        """r, by what is known so far; 1 before the first step.

        Args:
            scale: S of another batch; None for the present one.

        Raises:
            ConfigError: ``scale`` is not above 0.
        """
        if self._variance.value is None or self._signal.value is None:
            return 1.0
        return gain(self._variance.value, self._signal.value, self.scale if scale is None else scale)

    def state_dict(self) -> dict[str, Any]:
        """State for ranks that join, and for checkpoints: the same on all ranks."""
        return {
            "progress": self.progress, "scale": self.scale, "num_gradients": self._num_gradients,
            "variance": list(self._variance.state), "signal": list(self._signal.state),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state.

        Where the number of gradients of a step is another here, as when ranks have joined, the averages hold on: σ² and
        μ² are of the schedule's batch. ``scale`` is this object's own then.
        """
        self.progress = float(state["progress"])
        if state["num_gradients"] == self._num_gradients:
            self.scale = float(state["scale"])
        self._variance.state, self._signal.state = state["variance"], state["signal"]

    @property
    def variance(self) -> float | None:
        """The average of σ²; None before the first step."""
        return self._variance.value

    @property
    def signal(self) -> float | None:
        """The average of μ²; None before the first step."""
        return self._signal.value


Array: TypeAlias = Any
"""Of NumPy, torch or JAX, on any device, of any shape; or a number."""


def lars_rate(weights: Array, gradient: Array, *, trust: float = 0.001, weight_decay: float = 0.0) -> float:
    """LARS' local learning rate, trust·|w| / (|g| + wd·|w|).

    You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks", 2017, https://arxiv.org/abs/1708.03888,
    algorithm 1. It is 1 where the weights or the gradient are zero, as in PyTorch's and NVIDIA's implementations.
    """
    of_weights, of_gradient = _norm(weights), _norm(gradient)
    if of_weights == 0 or of_gradient == 0:
        return 1.0
    return trust * of_weights / (of_gradient + weight_decay * of_weights)


@dataclass(frozen=True, slots=True)
class Lars:
    """LARS with momentum: v ← μv + lr·local·(g + wd·w), w ← w − v.

    Arrays are of NumPy, torch or JAX. Those of 16 bits are computed in float32, and rounded once. The state is what
    the program keeps: v of each array.

    Attributes:
        lr: of all layers.
        momentum: μ.
        weight_decay: wd.
        trust: see `lars_rate`.

    Raises:
        ConfigError: a number is out of its range.
    """

    lr: float
    momentum: float = 0.9
    weight_decay: float = 0.0
    trust: float = 0.001

    def __post_init__(self) -> None:
        _check(lr=self.lr, trust=self.trust)
        _check_decay(self.momentum, self.weight_decay)

    def step(self, weights: Array, gradient: Array, velocity: Array) -> tuple[Array, Array]:
        """Return the weights and the velocity after a step, both new, each of the kind and dtype that was given."""
        w, g, v = _wide(weights), _wide(gradient), _wide(velocity)
        local = lars_rate(w, g, trust=self.trust, weight_decay=self.weight_decay)
        faster = self.momentum * v + self.lr * local * (g + self.weight_decay * w)
        return _like(weights, w - faster), _like(velocity, faster)


class LambState(NamedTuple):
    """Of one array between two steps of LAMB.

    Attributes:
        mean: moving average of the gradient.
        square: moving average of its square.
        num_steps: steps so far.
    """

    mean: Array
    square: Array
    num_steps: int = 0

    @classmethod
    def zeros_like(cls, weights: Array) -> LambState:
        """State at the beginning, of the kind and dtype of the weights; in float32 for weights of 16 bits."""
        wide = _wide(weights)
        return cls(_zeros(wide), _zeros(wide))


@dataclass(frozen=True, slots=True)
class Lamb:
    """LAMB: Adam's step with weight decay, as long as the trust ratio |w| / |step| makes it.

    You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020,
    https://arxiv.org/abs/1904.00962, algorithm 2, with φ the identity. The ratio is 1 where either norm is zero. Arrays
    are of NumPy, torch or JAX. Those of 16 bits are computed in float32, and rounded once.

    Attributes:
        lr: of all layers.
        beta1: decay of the moving average of gradients.
        beta2: of their squares.
        epsilon: added to the root of the latter.
        weight_decay: λ.

    Raises:
        ConfigError: a number is out of its range.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-6
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check(lr=self.lr, epsilon=self.epsilon)
        _check_decay(self.beta1, self.weight_decay)
        _check_decay(self.beta2, self.weight_decay)

    def step(self, weights: Array, gradient: Array, state: LambState) -> tuple[Array, LambState]:
        """Return the weights and the state after a step, all new, each of the kind and dtype that was given."""
        num_steps = state.num_steps + 1
        w, g = _wide(weights), _wide(gradient)
        mean = self.beta1 * _wide(state.mean) + (1 - self.beta1) * g
        square = self.beta2 * _wide(state.square) + (1 - self.beta2) * g**2
        unbiased, variance = mean / (1 - self.beta1**num_steps), square / (1 - self.beta2**num_steps)
        update = unbiased / (variance**0.5 + self.epsilon) + self.weight_decay * w
        of_weights, of_update = _norm(w), _norm(update)
        trust = of_weights / of_update if of_weights > 0 and of_update > 0 else 1.0
        kept = LambState(_like(state.mean, mean), _like(state.square, square), num_steps)
        return _like(weights, w - self.lr * trust * update), kept


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """The learning rate of a batch that is k times the one it was found for: k times as large, after a warm-up.

    Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017, https://arxiv.org/abs/1706.02677,
    sections 2.1 and 2.2: from the first step on the rate grows from that of the small batch to that of the large one,
    by the same amount at each step.

    Attributes:
        lr: that was found for ``initial_batch``.
        initial_batch: of all ranks.
        warm_up: steps until the rate is there; the paper has those of five epochs.

    Raises:
        ConfigError: a number is out of its range.
    """

    lr: float
    initial_batch: float
    warm_up: int = 0

    def __post_init__(self) -> None:
        _check(lr=self.lr, initial_batch=self.initial_batch)
        if type(self.warm_up) is not int or self.warm_up < 0:
            raise ConfigError(f"warm_up is a whole number of steps, not {self.warm_up!r}")

    def rate(self, step: int, batch: float) -> float:
        """Of step number ``step``, from 0, with ``batch`` samples of all ranks.

        Raises:
            ConfigError: the batch is not above 0.
        """
        _check(batch=batch)
        target = self.lr * batch / self.initial_batch
        if step >= self.warm_up:
            return target
        return self.lr + (target - self.lr) * step / self.warm_up


def _is_tensor(x: Any) -> bool:
    return hasattr(x, "new_zeros")


def _wide(x: Array) -> Any:
    """The array without its history of gradients, of at least 32 bits."""
    # 0.1 % of a square of 0.001 is zero in float16, and a sum of bfloat16 has three digits.
    if _is_tensor(x):
        return x.detach().float() if x.element_size() < _LEAST_NBYTES else x.detach()
    x = x if hasattr(x, "__array_namespace__") else np.asarray(x)
    return x.astype(np.float32) if x.dtype.itemsize < _LEAST_NBYTES else x


def _like(given: Array, x: Any) -> Any:
    """An array with the dtype that was given."""
    if _is_tensor(given):
        return x.to(given.dtype)
    if isinstance(x, (np.ndarray, np.generic)):  # NumPy makes a number of what has no dimensions
        return np.asarray(x, getattr(given, "dtype", None))
    return x.astype(given.dtype)


def _zeros(x: Any) -> Any:
    return x.new_zeros(x.shape) if _is_tensor(x) else x.__array_namespace__().zeros_like(x)


def _norm(x: Array) -> float:
    """Norm of all elements; in float64, which JAX has only where it is enabled."""
    x = _wide(x)
    if _is_tensor(x):
        return float(x.double().norm())
    wide = x.astype(np.float64) if isinstance(x, np.ndarray) else x
    return float(wide.__array_namespace__().linalg.norm(wide.reshape(-1)))


def _check(**positive: float) -> None:
    for name, value in positive.items():
        if not value > 0:
            raise ConfigError(f"{name} is above 0, not {value!r}")


def _check_decay(momentum: float, weight_decay: float) -> None:
    if not 0 <= momentum < 1:
        raise ConfigError(f"a decay is at least 0 and below 1, not {momentum!r}")
    if not weight_decay >= 0:
        raise ConfigError(f"weight_decay is at least 0, not {weight_decay!r}")
