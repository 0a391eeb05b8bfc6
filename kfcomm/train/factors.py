"""Gradients of dense layers as factors, sent in the form with fewer bytes.

The gradient of an M×N layer over K samples is AᵀB, where A (K×M) is what comes back to the layer and B (K×N) what went
into it. *Sufficient factors* send A and B where these have fewer bytes: Xie et al., "Lighter-Communication Distributed
Machine Learning via Sufficient Factor Broadcasting", UAI 2016; Zhang et al., "Poseidon", ATC 2017,
https://www.usenix.org/conference/atc17/technical-sessions/presentation/zhang, section 3.2: *hybrid communication*.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

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


def takes_factors(rows: int, columns: int, samples: float, size: int) -> bool:
    """Whether a layer's factors have fewer numbers to send than its gradient."""
    return size > 1 and samples < most_samples(rows, columns, size)


RENEWED_EVERY = 100
"""Averages for which the ranks keep the forms on which they have agreed."""


class HybridGradients:
    """Average of gradients, some of them given as factors: each layer is sent in the form with fewer bytes.

    Ranks may have unlike numbers of samples, none too: they agree on each layer's form by their mean number at the
    first call, and again every 100 calls, for other layers, and after a change of the ranks.

    Args:
        comm: whose ranks average.
        name: its collectives begin with it.

    Cost:
        One all_gather of K(M+N) numbers for each layer that goes by factors, and the product of nK×M and nK×N; one
        ``all_reduce`` of the rest together. Every 100 calls one of 8 bytes for each layer.
    """

    def __init__(self, comm: Comm, *, name: str = "hybrid") -> None:
        self.comm = comm
        self.name = checked_name(name)
        self._agreed: tuple[Any, frozenset[str]] | None = None  # layers and ranks, and the layers that go by factors
        self._num_left = 0

    @carried
    def average(
        self, gradients: dict[str, Any], *, out: Mapping[str, Any] | None = None, weight: float | None = None
    ) -> Procedure[dict[str, Any]]:
        """Average gradients over all ranks; a `Pending` mapping of arrays by name.

        Args:
            gradients: arrays, and `Factors` of two NumPy arrays; the same names, shapes and dtypes on every rank, but
                for the number of samples.
            out: where the results go, by the same names; an array may be its own. What is kept from step to step
                spares new memory, whose first use takes about as long as the product itself.
            weight: the result is Σ weight·g / Σ weight, as of ``all_reduce``: the number of samples, where each rank
                gives the mean over its own. Given by all ranks or by none.

        Raises:
            ConfigError: factors do not fit together, or not to ``out``; or the weight is negative.
            CollectiveError: from waiting: an exchange failed.
        """
        if weight is not None and not (np.isfinite(weight) and weight >= 0):
            raise ConfigError(f"expected a finite weight of at least 0, got {weight!r}")
        factored = {name: _checked(name, one) for name, one in gradients.items() if isinstance(one, Factors)}
        buffers = dict.fromkeys(gradients) if out is None else _buffers(out, gradients)
        by_factors = yield from self._chosen(factored)
        whole = {name: one for name, one in gradients.items() if name not in factored}
        whole |= {
            name: np.matmul(one.outer.T, one.inner, out=buffers[name])
            for name, one in factored.items()
            if name not in by_factors
        }
        found = yield from averaged(
            self.comm, self.name, whole, {name: factored[name] for name in by_factors}, buffers, weight
        )
        return {name: found[name] for name in gradients}

    def _chosen(self, factored: Mapping[str, Factors]) -> Procedure[list[str]]:
        """The layers that go by factors: the same on all ranks."""
        forms = {name: (one.outer.shape[1], one.inner.shape[1]) for name, one in factored.items()}
        now = forms, self.comm.births
        if self._agreed is None or self._agreed[0] != now or not self._num_left:
            self._num_left = RENEWED_EVERY
            chosen = list[str]()
            if forms and self.comm.size > 1:
                mine = np.array([len(one.outer) for one in factored.values()], np.int64)
                # A rank's own number would let ranks with unlike ones choose unlike forms.
                samples = (yield call("all_reduce", mine, f"{self.name}/samples")) / self.comm.size
                chosen = [
                    name
                    for (name, form), count in zip(forms.items(), samples.tolist(), strict=True)
                    if takes_factors(*form, count, self.comm.size)
                ]
            self._agreed = now, frozenset(chosen)
        self._num_left -= 1
        return [name for name in factored if name in self._agreed[1]]


def averaged(
    comm: Comm, prefix: str, whole: Mapping[str, Any], factored: Mapping[str, Factors], buffers: Mapping[str, Any],
    weight: float | None = None,
) -> Procedure[dict[str, Any]]:  # fmt: skip
    """Average gradients in forms on which all ranks have agreed; ``buffers``: memory of each result, or None."""
    calls = [_gathered(prefix, name, one, weight) for name, one in factored.items()]
    if whole:
        into = None if any(one is None for one in buffers.values()) else {name: buffers[name] for name in whole}
        calls.append(call("all_reduce_many", whole, f"{prefix}/gradients", op="avg", out=into, weight=weight))
    if factored and weight is not None:
        calls.append(call("all_reduce", np.float64(weight), f"{prefix}/weights"))
    told = yield from together(calls)
    total = comm.size if weight is None else float(told.pop()) if factored else 0.0
    found = dict(told.pop()) if whole else {}
    for (name, one), rows in zip(factored.items(), told, strict=True):
        found[name] = _product(rows, one.outer.shape[1], total, buffers[name])
    return found


def _gathered(prefix: str, name: str, factors: Factors, weight: float | None) -> ProcedureCall:
    outer, inner = factors
    # The weight goes into the smaller factor: no pass over the gradient.
    scaled = outer if weight is None else outer * outer.dtype.type(weight)
    return call("all_gather", np.concatenate([scaled, inner], axis=1), f"{prefix}/factors/{name}", concat=True)


def _checked(name: str, factors: Factors) -> Factors:
    outer, inner = factors
    if outer.ndim != 2 or inner.ndim != 2 or len(outer) != len(inner) or outer.dtype != inner.dtype:
        raise ConfigError(
            f"factors of {name!r} are two matrices of one dtype with a row for each sample, not {outer.dtype} "
            f"{outer.shape} and {inner.dtype} {inner.shape}"
        )
    return factors


def _buffers(out: Mapping[str, Any], gradients: Mapping[str, Any]) -> dict[str, Any]:
    """Destination of each result."""
    if out.keys() != gradients.keys():
        raise ConfigError(f"out has the names of the gradients, {sorted(gradients)}, and not {sorted(out)}")
    for name, one in gradients.items():
        if isinstance(one, Factors):
            wanted, place = (one.outer.shape[1], one.inner.shape[1]), out[name]
            if place.shape != wanted or place.dtype != one.outer.dtype:
                raise ConfigError(f"out of {name!r} is {one.outer.dtype} {wanted}, not {place.dtype} {place.shape}")
    return {**out}


def _product(rows: Any, num_outer: int, total: float, out: Any) -> Any:
    """Mean over the ranks of AᵀB, from the rows of all ranks."""
    outer = rows[:, :num_outer] / rows.dtype.type(total)  # the smaller array: no pass over the gradient
    return np.matmul(outer.T, rows[:, num_outer:], out=out)
