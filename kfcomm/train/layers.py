"""Gradients of dense layers by their factors: in the form with fewer bytes, and preconditioned on the layer's owner.

The gradient of an M×N layer over K samples is AᵀB, where A (K×M) is what comes back to the layer and B (K×N) what went
into it.

*Sufficient factors* send A and B where these have fewer bytes: Xie et al., "Lighter-Communication Distributed Machine
Learning via Sufficient Factor Broadcasting", UAI 2016; Zhang et al., "Poseidon", ATC 2017,
https://www.usenix.org/conference/atc17/technical-sessions/presentation/zhang, section 3.2: *hybrid communication*.

*K-FAC with distributed layers* preconditions a gradient G by the inverses of two small covariances, that of the
gradients of the layer's outputs (M×M) and of its inputs (N×N): A⁻¹ G B⁻¹. Each rank has both from its own samples; they
are averaged at the layer's owner only, and inverted there, and the preconditioned gradient is broadcast. Pauloski et
al., "KAISA: An Adaptive Second-Order Optimizer Framework for Deep Neural Networks", SC 2021,
https://arxiv.org/abs/2107.01739.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kfcomm.common.arguments import checked_name
from kfcomm.errors import ConfigError
from kfcomm.train.procedure import Comm, Procedure, ProcedureCall, call, carried, together


class Factors(NamedTuple):
    """Factors of a dense layer's gradient on this rank, AᵀB: summed over its samples, or averaged if A is divided by K.

    Attributes:
        outer: A, an array of K×M.
        inner: B, an array of K×N, of the same dtype.
    """

    outer: Any
    inner: Any


def all_reduce_numbers(rows: int, columns: int, size: int) -> float:
    """Numbers that a rank sends to all_reduce an M×N gradient among n ranks: 2MN(n−1)/n."""
    return 2 * rows * columns * (size - 1) / size


def factor_numbers(rows: int, columns: int, samples: int, size: int) -> float:
    """Numbers that a rank sends to gather the factors of all ranks: K(n−1)(M+N)."""
    return samples * (size - 1) * (rows + columns)


def most_samples(rows: int, columns: int, size: int) -> float:
    """Break-even K, 2MN / (n(M+N)): up to this number of samples of a rank, factors are not more than the gradient."""
    return 2 * rows * columns / (size * (rows + columns))


def takes_factors(rows: int, columns: int, samples: int, size: int) -> bool:
    """Whether a layer's factors have fewer numbers to send than its gradient."""
    return size > 1 and samples < most_samples(rows, columns, size)


class HybridGradients:
    """Average of gradients, some of them given as factors: each layer is sent in the form with fewer bytes.

    Args:
        comm: whose ranks average.
        name: its collectives begin with it.

    Cost:
        One all_gather of K(M+N) numbers for each layer that goes by factors, and the product of nK×M and nK×N; one
        ``all_reduce`` of the rest together.
    """

    def __init__(self, comm: Comm, *, name: str = "hybrid") -> None:
        self.comm = comm
        self.name = checked_name(name)

    @carried
    def average(self, gradients: dict[str, Any], *, out: Mapping[str, Any] | None = None) -> Procedure[dict[str, Any]]:
        """Average gradients over all ranks; a `Pending` mapping of arrays by name.

        Args:
            gradients: arrays, and `Factors` of two NumPy arrays; the same names and shapes on every rank. So each rank
                chooses the same way for each layer.
            out: where the results go, by the same names; an array may be its own. What is kept from step to step
                spares new memory, whose first use takes about as long as the product itself.

        Raises:
            ConfigError: factors do not fit together, or not to ``out``.
            CollectiveError: from waiting: an exchange failed.
        """
        size, found = self.comm.size, dict.fromkeys(gradients)
        factored = {name: _checked(name, one) for name, one in gradients.items() if isinstance(one, Factors)}
        room = dict.fromkeys(gradients) if out is None else _room(out, gradients)
        # By sizes alone, which are the same on all ranks: so all choose the same form.
        by_factors = {
            name: one
            for name, one in factored.items()
            if takes_factors(one.outer.shape[1], one.inner.shape[1], len(one.outer), size)
        }
        whole = {name: one for name, one in gradients.items() if name not in factored}
        whole |= {
            name: np.matmul(one.outer.T, one.inner, out=room[name])
            for name, one in factored.items()
            if name not in by_factors
        }
        rows = [np.concatenate([one.outer, one.inner], axis=1) for one in by_factors.values()]
        into = None if out is None else {name: room[name] for name in whole}
        calls = [call("all_reduce_many", whole, f"{self.name}/gradients", op="avg", out=into)]
        if rows:
            calls.append(call("all_gather", rows, f"{self.name}/factors"))
        means, *told = yield from together(calls)
        found.update(means)
        for (name, one), everybody in zip(by_factors.items(), told[0] if told else (), strict=True):
            found[name] = _product(everybody, one.outer.shape[1], size, room[name])
        return found


def _checked(name: str, factors: Factors) -> Factors:
    outer, inner = factors
    if outer.ndim != 2 or inner.ndim != 2 or len(outer) != len(inner) or outer.dtype != inner.dtype:
        raise ConfigError(
            f"factors of {name!r} are two matrices of one dtype with a row for each sample, not {outer.dtype} "
            f"{outer.shape} and {inner.dtype} {inner.shape}"
        )
    return factors


def _room(out: Mapping[str, Any], gradients: Mapping[str, Any]) -> dict[str, Any]:
    """Destination of each result."""
    if out.keys() != gradients.keys():
        raise ConfigError(f"out has the names of the gradients, {sorted(gradients)}, and not {sorted(out)}")
    for name, one in gradients.items():
        if isinstance(one, Factors):
            wanted, room = (one.outer.shape[1], one.inner.shape[1]), out[name]
            if room.shape != wanted or room.dtype != one.outer.dtype:
                raise ConfigError(f"out of {name!r} is {one.outer.dtype} {wanted}, not {room.dtype} {room.shape}")
    return {**out}


def _product(rows: Any, num_outer: int, size: int, room: Any) -> Any:
    """Mean over the ranks of AᵀB, from the rows of all ranks."""
    joined = rows.reshape(-1, rows.shape[-1])
    outer = joined[:, :num_outer] / joined.dtype.type(size)  # the smaller array: no pass over the gradient
    return np.matmul(outer.T, joined[:, num_outer:], out=room)


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
