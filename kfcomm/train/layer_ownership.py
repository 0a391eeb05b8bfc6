"""K-FAC with distributed layers: assignment of factors to ranks, and the exchange of preconditioned gradients.

Pauloski et al., "KAISA: An Adaptive Second-Order Optimizer Framework for Deep Neural Networks", SC 2021,
https://arxiv.org/abs/2107.01739. A layer's gradient G is preconditioned by the inverses of two small covariances, that
of the gradients of its outputs (M×M) and of its inputs (N×N): A⁻¹ G B⁻¹. Each rank has both from its own samples; they
are averaged at the layer's owner only, and inverted there, and the preconditioned gradient is broadcast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kfcomm.common.arguments import checked_name
from kfcomm.errors import ConfigError
from kfcomm.train.procedure import Comm, Procedure, ProcedureCall, call, carried, together

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
        outer: the covariance of what comes back to the layer, of this rank's samples: M×M.
        inner: the covariance of what goes into it: N×N.
    """

    gradient: Array
    outer: Array
    inner: Array


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
