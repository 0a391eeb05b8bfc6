"""Sufficient factors: a dense layer's gradient as two factors, where these have fewer bytes.

Xie et al., "Lighter-Communication Distributed Machine Learning via Sufficient Factor Broadcasting", UAI 2016; Zhang et
al., "Poseidon: An Efficient Communication Architecture for Distributed Deep Learning on GPU Clusters", ATC 2017,
https://www.usenix.org/conference/atc17/technical-sessions/presentation/zhang, section 3.2: *hybrid communication*. The
gradient of an M×N layer over K samples is AᵀB, where A (K×M) is what comes back to the layer and B (K×N) what went
into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from kfcomm.common.arguments import checked_name
from kfcomm.errors import ConfigError
from kfcomm.train.procedure import Comm, Procedure, call, carried, together


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
