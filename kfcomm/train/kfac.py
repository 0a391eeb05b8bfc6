"""K-FAC with layers spread over ranks: gradients preconditioned by the inverses of two small covariances.

A gradient G of an M×N layer becomes A⁻¹ G B⁻¹, with the covariance A of the gradients of the layer's outputs (M×M) and
that of its inputs, B (N×N). Each rank has both from its own samples. Inverting is the work, n³ for a covariance of size
n, and is shared out over the ranks: Pauloski et al., "KAISA: An Adaptive Second-Order Optimizer Framework for Deep
Neural Networks", SC 2021, https://arxiv.org/abs/2107.01739; Martens and Grosse, "Optimizing Neural Networks with
Kronecker-factored Approximate Curvature", ICML 2015, https://arxiv.org/abs/1503.05671.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kfcomm.common.arguments import checked_name
from kfcomm.errors import ConfigError
from kfcomm.train.procedure import Comm, Procedure, ProcedureCall, call, carried, together
from kfcomm.train.rules import count_problem

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


def cost(factors: Sequence[int]) -> int:
    """Cost of inverting factors of these sizes: Σ n³."""
    return sum(size**3 for size in factors)


def owners(layers: Mapping[str, Sequence[int]], size: int, *, group_size: int = 1) -> dict[str, tuple[int, ...]]:
    """Assign each factor of each layer to the rank that inverts it.

    Layers are assigned by their cost, the largest first, to the group of ranks with the least work; in it each factor,
    the largest first, to the rank with the least work. Ties go to the first, so that all ranks find the same.

    Args:
        layers: sizes of the factors of each layer.
        size: number of ranks.
        group_size: size of the groups, a divisor of ``size``. KAISA's share of workers with gradients: 1 needs the
            least memory (every layer has one owner), ``size`` spreads the factors of one layer as well.

    Returns:
        For each layer the ranks of its factors, in their order.

    Raises:
        ConfigError: ``group_size`` does not divide ``size``.
    """
    if group_size < 1 or size % group_size:
        raise ConfigError(f"groups of {group_size!r} ranks do not divide {size} ranks")
    loads = [0] * size
    groups = [range(first, first + group_size) for first in range(0, size, group_size)]
    found = {}
    for name in sorted(layers, key=lambda one: (-cost(layers[one]), one)):
        group = min(groups, key=lambda ranks: sum(loads[rank] for rank in ranks))
        chosen: dict[int, int] = {}
        for number in sorted(range(len(layers[name])), key=lambda one: -layers[name][one]):
            rank = min(group, key=loads.__getitem__)
            chosen[number] = rank
            loads[rank] += layers[name][number] ** 3
        found[name] = tuple(chosen[number] for number in range(len(layers[name])))
    return {name: found[name] for name in layers}


class Layer(NamedTuple):
    """A layer of K-FAC on this rank.

    Attributes:
        gradient: G, the mean over all ranks already: M×N.
        outer: the covariance of what comes back to the layer, of this rank's samples: M×M; for `KFAC` None in steps
            that do not take it.
        inner: the covariance of what goes into it: N×N; None likewise.
    """

    gradient: Array
    outer: Any
    inner: Any


def preconditioned(gradient: Array, outer: Array, inner: Array, damping: float) -> Array:
    """Product (A + λI)⁻¹ G (B + λI)⁻¹, for symmetric A and B."""
    left = np.linalg.solve(outer + damping * np.eye(len(outer), dtype=outer.dtype), gradient)
    return np.linalg.solve(inner + damping * np.eye(len(inner), dtype=inner.dtype), left.T).T


class LayerOwnership:
    """Preconditioner of gradients: each layer on its owner.

    Args:
        comm: whose ranks share the layers.
        damping: λ, above 0.
        name: its collectives begin with it.

    Raises:
        ConfigError: the damping is not above 0.

    Cost:
        For an M×N layer a ``reduce`` of M² + N² numbers to its owner, there 2(M³ + N³)/3 operations and some, and a
        ``broadcast`` of MN numbers. All layers are under way at once.
    """

    def __init__(self, comm: Comm, damping: float, *, name: str = "kfac") -> None:
        if not damping > 0:
            raise ConfigError(f"damping is above 0, not {damping!r}")
        self.comm = comm
        self.name = checked_name(name)
        self._damping = damping

    @carried
    def precondition(self, layers: Mapping[str, Layer]) -> Procedure[dict[str, Array]]:
        """Precondition gradients by name, the same on every rank; a `Pending` mapping.

        Args:
            layers: the same names and shapes on every rank.

        Raises:
            CollectiveError: from waiting: an exchange failed.
        """
        sizes = {name: (len(one.outer), len(one.inner)) for name, one in layers.items()}
        of = {name: ranks[0] for name, ranks in owners(sizes, self.comm.size).items()}
        told = yield from together(
            call("reduce", _factors(one), of[name], f"{self.name}/{name}/factors", op="avg")
            for name, one in layers.items()
        )
        shared: list[ProcedureCall] = []
        for (name, one), flat in zip(layers.items(), told, strict=True):
            # Only the owner has the reduced factors; the others give an array of the shape that they receive.
            result = one.gradient if flat is None else self._invert(one, flat)
            shared.append(call("broadcast", result, of[name], f"{self.name}/{name}/gradient"))
        return dict(zip(layers, (yield from together(shared)), strict=True))

    def _invert(self, layer: Layer, flat: Array) -> Array:
        rows = len(layer.outer)
        outer, inner = flat[: rows**2].reshape(rows, rows), flat[rows**2 :].reshape(layer.inner.shape)
        return np.ascontiguousarray(preconditioned(layer.gradient, outer, inner, self._damping))


def _factors(layer: Layer) -> Array:
    """Both factors of a layer, end to end."""
    return np.concatenate([layer.outer.ravel(), layer.inner.ravel()])


Damping: TypeAlias = float | Mapping[str, float]
"""λ, or λ by patterns of layers' names (``fnmatch``), where the first match holds."""


class KFAC:
    """K-FAC along training: covariances averaged over steps, and inverses that are kept between their renewals.

    In each ``covariances_every``-th step the covariances of all ranks are averaged, and added to their moving averages.
    In each ``inverses_every``-th step the inverses of (average + λI) are made, each by one rank (`owners`, where the
    factors of a layer are spread as well), and sent to all. So other steps need no message. The state is the same on
    all ranks, to the bit, and does not depend on their number: it can be in a ``State``.

    Args:
        comm: whose ranks share the work.
        damping: λ, above 0; or by layer, as patterns of names.
        decay: of the moving averages, which are corrected for their start; at least 0 and below 1.
        covariances_every: steps from one average of the covariances to the next.
        inverses_every: steps from one renewal of the inverses to the next, a multiple of ``covariances_every``.
        kl_clip: bound κ of the step: gradients are scaled by min(1, √(κ / Σ lr²·G·Ĝ)), as in KAISA; None: not scaled.
        name: its collectives begin with it.

    Attributes:
        num_steps: steps so far.

    Raises:
        ConfigError: a number is out of its range.

    Cost:
        For an M×N layer 2(M³ + N³) operations on one rank for each renewal, MN(M + N) on each rank in each step; an
        ``all_reduce`` of M² + N² numbers for each average, a ``broadcast`` of as many for each renewal.
    """

    def __init__(
        self, comm: Comm, damping: Damping = 0.003, *, decay: float = 0.95, covariances_every: int = 10,
        inverses_every: int = 100, kl_clip: float | None = None, name: str = "kfac",
    ) -> None:  # fmt: skip
        for one in damping.values() if isinstance(damping, Mapping) else (damping,):
            if not one > 0:
                raise ConfigError(f"damping is above 0, not {one!r}")
        if not 0 <= decay < 1:
            raise ConfigError(f"the decay of a moving average is at least 0 and below 1, not {decay!r}")
        if (problem := count_problem("covariances_every", covariances_every)) is not None:
            raise ConfigError(problem)
        if type(inverses_every) is not int or inverses_every < 1 or inverses_every % covariances_every:
            raise ConfigError(
                f"inverses_every is a multiple of covariances_every, {covariances_every}, not {inverses_every!r}"
            )
        if kl_clip is not None and not kl_clip > 0:
            raise ConfigError(f"kl_clip is above 0, not {kl_clip!r}")
        self.comm = comm
        self.name = checked_name(name)
        self.num_steps = 0
        self._damping: Mapping[str, float] = damping if isinstance(damping, Mapping) else {"*": damping}
        self._decay = decay
        self._every = covariances_every, inverses_every
        self._kl_clip = kl_clip
        self._sums: dict[str, Array] = {}  # moving averages by layer and side, before the correction
        self._weights: dict[str, float] = {}  # of the values in each: 1 - decay^t
        self._inverses: dict[str, Array] = {}

    @property
    def wants_covariances(self) -> bool:
        """Whether the next step takes covariances; the same on all ranks."""
        return self.num_steps % self._every[0] == 0

    @carried
    def precondition(self, layers: Mapping[str, Layer], *, lr: float = 1.0) -> Procedure[dict[str, Array]]:
        """Precondition the gradients of a step, by name; a `Pending` mapping of new arrays, the same on every rank.

        Args:
            layers: the same names and shapes on every rank. A step may leave some out; the gradient of a layer whose
                covariances are not known yet stays as it is.
            lr: learning rate, for ``kl_clip``.

        Raises:
            ConfigError: a layer lacks covariances that this step takes, or no damping is given for it.
            CollectiveError: from waiting: an exchange failed.
        """
        if self.wants_covariances:
            yield from self._average(layers)
        is_due = self.num_steps % self._every[1] == 0
        wanted = {
            name: one.gradient.shape
            for name, one in layers.items()
            if f"{name}/outer" in self._sums and (is_due or f"{name}/outer" not in self._inverses)
        }
        if wanted:
            yield from self._invert(wanted)
        self.num_steps += 1
        found = {name: self._preconditioned(name, one.gradient) for name, one in layers.items()}
        if self._kl_clip is None:
            return found
        total = lr**2 * sum(float(np.vdot(one, layers[name].gradient)) for name, one in found.items())
        scale = 1.0 if total <= self._kl_clip else (self._kl_clip / total) ** 0.5
        return {name: one * one.dtype.type(scale) for name, one in found.items()}

    def _average(self, layers: Mapping[str, Layer]) -> Procedure[None]:
        mine = {}
        for name, one in layers.items():
            self._damping_of(name)
            for side, covariance in (("outer", one.outer), ("inner", one.inner)):
                if covariance is None:
                    raise ConfigError(f"step {self.num_steps} takes the covariances of layer {name!r}: give both")
                mine[f"{name}/{side}"] = covariance
        means = yield call("all_reduce_many", mine, f"{self.name}/covariances", op="avg")
        # All ranks have the same means, so all leave out those of a step whose numbers are not finite.
        if not all(np.isfinite(one).all() for one in means.values()):
            return
        kept, new = self._decay, 1 - self._decay
        for one, mean in means.items():
            self._weights[one] = kept * self._weights.get(one, 0.0) + new
            self._sums[one] = kept * self._sums.get(one, 0) + new * mean

    def _preconditioned(self, name: str, gradient: Array) -> Array:
        outer, inner = (self._inverses.get(f"{name}/{side}") for side in ("outer", "inner"))
        return gradient.copy() if outer is None or inner is None else outer @ gradient @ inner

    def _invert(self, sizes: Mapping[str, Sequence[int]]) -> Procedure[None]:
        owned = owners(sizes, self.comm.size, group_size=self.comm.size)
        of = {f"{name}/{side}": rank for name, ranks in owned.items() for side, rank in
              zip(("outer", "inner"), ranks, strict=True)}  # fmt: skip
        # The owner's inverse for all: machines may calculate it differently in the last bits.
        inverses = yield from together(
            call("broadcast", self._inverse(one) if rank == self.comm.rank else self._sums[one], rank,
                 f"{self.name}/inverse/{one}")
            for one, rank in of.items()
        )  # fmt: skip
        self._inverses |= zip(of, inverses, strict=True)

    def _inverse(self, one: str) -> Array:
        average = self._sums[one] / self._sums[one].dtype.type(self._weights[one])
        damping = self._damping_of(one.rpartition("/")[0])
        inverse = np.linalg.inv(average + damping * np.eye(len(average), dtype=average.dtype))
        return np.ascontiguousarray((inverse + inverse.T) / 2)

    def _damping_of(self, layer: str) -> float:
        found = next((value for pattern, value in self._damping.items() if fnmatchcase(layer, pattern)), None)
        if found is None:
            raise ConfigError(f"no damping is given for layer {layer!r}: there are {', '.join(self._damping)}")
        return found

    def state_dict(self) -> dict[str, Any]:
        """Averages and inverses, the same on all ranks; arrays, and values that msgpack carries."""
        return {
            "num_steps": self.num_steps, "weights": dict(self._weights), "sums": dict(self._sums),
            "inverses": dict(self._inverses),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another rank, or of a checkpoint."""
        self.num_steps, self._weights = int(state["num_steps"]), dict(state["weights"])
        self._sums = {name: np.array(one) for name, one in state["sums"].items()}
        self._inverses = {name: np.array(one) for name, one in state["inverses"].items()}
