"""Averages of gradients in fewer bytes than the gradients have: PowerSGD and top-k, with error feedback.

Each rank adds the error of its compressed gradient to its next gradient (Seide et al., 2014; Karimireddy et al., ICML
2019): for any compressor C, c_t = C(g_t + e_t), e_{t+1} = g_t + e_t − c_t. So at every step Σg = Σc + e: nothing is
lost, only delayed. When the ranks change, the sum of the errors is divided among the new ranks (``state_dict``,
``merging``), so that this holds on. Both work on NumPy arrays, or arrays that NumPy reads in place, over any blocking
communicator. (For half of the bytes, without a state, use ``wire_dtype`` of ``all_reduce``.)

**PowerSGD** (Vogels, Karimireddy, Jaggi, NeurIPS 2019): gradients that are matrices travel as products of thin ones.
A gradient of shape (n, a, b, ...) is a matrix M of n × m, m = a·b·..., with the error of the step before added. One
step of the power method, begun where the last has ended (*warm start*)::

    P = M·orthogonal(Q)      all_reduce
    P = orthogonal(P)
    Q = Mᵀ·P                 all_reduce, mean
    M ≈ P·Qᵀ                 error: this rank's M − P·Qᵀ

All of it is linear in M, so what many ranks get is what one rank would get of the mean of their gradients; and it is
exact where M has no more than ``rank`` directions. (n + m)·rank numbers travel for n·m: a gradient is compressed
where that is less by ``min_rate``, and else averaged as it is, as are vectors. torch's ``powerSGD_hook`` does the
same.

**Top-k** (Aji and Heafield, 2017; Lin et al., ICLR 2018): of each gradient the largest numbers travel, and their
places. Each rank gives the k numbers of largest absolute value of its gradient, with the error of the step before
added; what is left is the next error. All ranks add what all give, in the order of the ranks, so all get the same
bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np

from kfcomm.common.arguments import checked_name
from kfcomm.errors import ConfigError

__all__ = ["PowerSGD", "TopK"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class Averaging(Protocol):
    """Part of ``kfcomm.sync.Communicator`` that compression needs."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_reduce_many(self, arrays: Mapping[str, Any], *, op: Any) -> dict[str, Any]:
        """Reduce arrays by name."""

    def all_gather(self, x: Any, name: str) -> Any:
        """Stack the arrays of all ranks."""


class Errors:
    """Errors of compressed gradients, which were not sent yet, by name."""

    def __init__(self) -> None:
        self._kept: dict[str, Array] = {}

    def corrected(self, name: str, gradient: Any) -> Array:
        """Return a C-contiguous copy of a gradient, plus its error.

        Raises:
            ConfigError: its dtype is not one of NumPy's floating-point types, or its shape has changed.
        """
        given = np.asarray(gradient)
        if given.dtype.kind != "f":
            raise ConfigError(f"gradient {name!r} is of {given.dtype}: float16, float32 and float64 can be compressed")
        error = self._kept.get(name)
        if error is None:
            return given.copy(order="C")
        if (error.shape, error.dtype) != (given.shape, given.dtype):
            raise ConfigError(f"gradient {name!r} was {error.dtype} {error.shape}, and is {given.dtype} {given.shape}")
        return np.asarray(np.add(given, error, order="C"))  # else a scalar for an array without axes

    def keep(self, name: str, error: Array) -> None:
        """Set the error of a gradient."""
        self._kept[name] = error

    def of(self, name: str) -> Array | None:
        """Return the error of a gradient; None if it was never compressed."""
        return self._kept.get(name)

    def all(self) -> dict[str, Array]:
        """Return all errors by name; they are replaced at the next step, and not modified."""
        return dict(self._kept)

    def replace(self, errors: Mapping[str, Any]) -> None:
        """Continue with copies of these errors, in place of all."""
        self._kept = {name: np.array(error) for name, error in errors.items()}


def is_worth(shape: tuple[int, ...], rank: int, min_rate: float) -> bool:
    """Whether a gradient of this shape is compressed: (n + m)·rank·min_rate < n·m."""
    if len(shape) < 2:
        return False
    rows, columns = shape[0], math.prod(shape[1:])
    return (rows + columns) * rank * min_rate < rows * columns


def orthogonal(matrix: Array) -> Array:
    """Orthonormal columns that span those of ``matrix``, which has no more columns than rows."""
    found: Array = np.linalg.qr(matrix)[0]
    return found


def is_finite(x: Array) -> bool:
    """Whether an array holds neither infinities nor NaN."""
    return bool(np.isfinite(x).all())


class PowerSGD:
    """Averages gradients by PowerSGD; it has the state of a training, and every rank one like it.

    ::

        compressed = kfcomm.compression.PowerSGD(rank=2)
        for step in range(steps):
            averages = compressed.average(comm, {name: gradient for ...})

    An infinity or NaN in a gradient is in the average of that step, as ``all_reduce`` gives it; nothing of it stays.

    Args:
        rank: columns of P and Q; more are more exact, and more bytes.
        min_rate: gradients are compressed that become smaller by more than this factor.
        begin_after: so many steps average the gradients as they are, while these change most.
        seed: of the first Q; the same on every rank.
        first: the first Q by name, where it is not to be drawn: (m, rank).

    Raises:
        ConfigError: such a rank, or rate, cannot be.

    Cost:
        Of a compressed gradient (n + m)·rank numbers in two all_reduces, 2·(n−1)/n times; 4·n·m·rank operations, and
        its error is kept. Ranks get the same bits where their machines calculate products of matrices alike.
    """

    def __init__(
        self, rank: int = 1, *, min_rate: float = 2.0, begin_after: int = 0, seed: int = 0,
        first: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        if rank < 1 or min_rate <= 0:
            raise ConfigError(f"PowerSGD needs a rank of at least 1 and a positive rate, not {rank} and {min_rate}")
        self._rank, self._min_rate = rank, min_rate
        self._left = begin_after
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._qs: dict[str, Array] = {name: np.array(q) for name, q in (first or {}).items()}
        self.errors = Errors()

    def state_dict(self) -> dict[str, Any]:
        """Return the state: Q, the generator and the steps without compression, alike on all ranks; and the errors."""
        generator = self._random.bit_generator.state["state"]
        return {
            "rank": self._rank,
            "left": self._left,
            "generator": {name: str(number) for name, number in generator.items()},  # of 128 bits
            "q": dict(self._qs),
            "errors": self.errors.all(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; its arrays are copied.

        Raises:
            ConfigError: it is one of another rank of matrices.
        """
        if state["rank"] != self._rank:
            raise ConfigError(f"this PowerSGD has rank {self._rank}; the state is of one with rank {state['rank']}")
        self._left = int(state["left"])
        now: Any = self._random.bit_generator.state
        now["state"] = {name: int(number) for name, number in state["generator"].items()}
        self._random.bit_generator.state = now
        self._qs = {name: np.array(q) for name, q in state["q"].items()}
        self.errors.replace(state["errors"])

    def merging(self) -> dict[str, str]:
        """Return what differs between ranks: their errors, whose sum is divided among the new ranks."""
        return {"errors": "sum"}

    def average(self, comm: Averaging, gradients: Mapping[str, Any], *, name: str = "power") -> dict[str, Array]:
        """Return the approximate mean of all ranks' gradients, by name; the same on all ranks.

        Args:
            comm: blocking communicator.
            gradients: float arrays by name; the same names and shapes on every rank, in every step.
            name: prefix of the collectives' names.

        Raises:
            ConfigError: a gradient is not an array of floating-point numbers, or its shape has changed.
            CollectiveError: an exchange has failed; the errors are unchanged.
        """
        name = checked_name(name)
        if self._left > 0:
            whole = self._whole(comm, gradients, name)
            self._left -= 1
            return whole
        shapes = {one: np.shape(gradient) for one, gradient in gradients.items()}
        thin = [one for one, shape in shapes.items() if is_worth(shape, self._rank, self._min_rate)]
        matrices = {one: self.errors.corrected(one, gradients[one]) for one in sorted(thin)}
        flat = {one: matrix.reshape(len(matrix), -1) for one, matrix in matrices.items()}
        qs = {one: orthogonal(self._q(one, matrix)) for one, matrix in flat.items()}
        first = {f"{name}/p/{one}": matrix @ qs[one] for one, matrix in flat.items()}
        first |= {f"{name}/{one}": np.asarray(gradients[one]) for one in gradients if one not in flat}
        sums = comm.all_reduce_many(first, op="avg") if first else {}
        ps = {one: orthogonal(sums[f"{name}/p/{one}"]) for one in flat if is_finite(sums[f"{name}/p/{one}"])}
        second = {f"{name}/q/{one}": flat[one].T @ p for one, p in ps.items()}
        means = comm.all_reduce_many(second, op="avg") if second else {}
        found = {one: sums[f"{name}/{one}"] for one in gradients if one not in flat}
        for one, p in ps.items():
            q = means[f"{name}/q/{one}"]
            product = p @ q.T
            if is_finite(product):
                self._qs[one] = q
                self.errors.keep(one, (flat[one] - product).reshape(shapes[one]))
                found[one] = product.reshape(shapes[one])
        found |= self._whole(comm, {one: gradients[one] for one in gradients if one not in found}, name)
        return {one: found[one] for one in gradients}

    def _whole(self, comm: Averaging, gradients: Mapping[str, Any], name: str) -> dict[str, Array]:
        """Average gradients without compression: those with values that are not finite, or too large.

        All ranks choose the same gradients, by the sums that they share. The errors and Q do not change.
        """
        if not gradients:
            return {}
        whole = comm.all_reduce_many({f"{name}/whole/{one}": np.asarray(g) for one, g in gradients.items()}, op="avg")
        return {one: whole[f"{name}/whole/{one}"] for one in gradients}

    def _q(self, name: str, matrix: Array) -> Array:
        """Start of the power method; random ones are drawn in one order of names on all ranks."""
        known = self._qs.get(name)
        if known is None:
            columns = min(self._rank, *matrix.shape)
            known = self._qs[name] = self._random.standard_normal((matrix.shape[1], columns)).astype(matrix.dtype)
        return known


def largest(x: Array, count: int) -> Array:
    """Places of the ``count`` numbers of largest absolute value in a flat array, in ascending order."""
    if count >= x.size:
        return np.arange(x.size)
    found: Array = np.argpartition(np.abs(x), x.size - count)[x.size - count :]
    found.sort()
    return found


class TopK:
    """Averages gradients by their largest numbers; it has the state of a training, and every rank one.

    An infinity or NaN in a gradient is in the average of that step: they are the largest, and none is kept for later.

    Args:
        share: of the numbers of each gradient that travel, at least one; more than 0, at most 1.

    Raises:
        ConfigError: such a share cannot be.

    Cost:
        (n − 1)·k·(4 + the bytes of a number) are received by each rank, so it pays where k is less than a (1 + 4 /
        bytes of a number)·n / 2-th of all; the error of each gradient is kept.
    """

    def __init__(self, share: float = 0.01) -> None:
        if not 0 < share <= 1:
            raise ConfigError(f"the share of numbers that travel is more than 0 and at most 1, not {share}")
        self._share = share
        self.errors = Errors()

    def state_dict(self) -> dict[str, Any]:
        """Return the state: the errors of this rank."""
        return {"errors": self.errors.all()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with copies of these errors."""
        self.errors.replace(state["errors"])

    def merging(self) -> dict[str, str]:
        """Return what differs between ranks: their errors, whose sum is divided among the new ranks."""
        return {"errors": "sum"}

    def average(self, comm: Averaging, gradients: Mapping[str, Any], *, name: str = "top") -> dict[str, Array]:
        """Return the approximate mean of all ranks' gradients, by name; the same on all ranks.

        Args:
            comm: blocking communicator.
            gradients: float arrays by name; the same names, shapes and dtypes on every rank, in every step.
            name: prefix of the collectives' names.

        Raises:
            ConfigError: a gradient is not an array of floating-point numbers, or its shape has changed.
            CollectiveError: an exchange has failed; the errors are unchanged.
        """
        name = checked_name(name)
        found = {one: self.errors.corrected(one, gradients[one]) for one in sorted(gradients)}
        places = {one: largest(whole.reshape(-1), self._count(whole)) for one, whole in found.items()}
        averages: dict[str, Array] = {}
        for dtype in dict.fromkeys(whole.dtype for whole in found.values()):
            alike = {one: whole for one, whole in found.items() if whole.dtype == dtype}
            averages |= self._exchange(comm, f"{name}/{dtype}", alike, places)
        for one, whole in found.items():
            whole.reshape(-1)[places[one]] = 0
            self.errors.keep(one, np.where(np.isfinite(whole), whole, whole.dtype.type(0)))
        return {one: averages[one] for one in gradients}

    def _count(self, whole: Array) -> int:
        return math.ceil(self._share * whole.size)

    def _exchange(
        self, comm: Averaging, name: str, found: Mapping[str, Array], places: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Averages of gradients of one dtype, all at once."""
        values = np.concatenate([whole.reshape(-1)[places[one]] for one, whole in found.items()])
        index = np.int32 if max(whole.size for whole in found.values()) < 1 << 31 else np.int64
        everywhere = np.concatenate([places[one] for one in found]).astype(index)
        # Together: in an elastic job a rank that is lost in this step has a row in both, or in none.
        both = comm.all_gather(np.concatenate([values.view(np.uint8), everywhere.view(np.uint8)]), f"{name}/largest")
        all_values = [row[: values.nbytes].view(values.dtype) for row in both]
        all_places = [row[values.nbytes :].view(everywhere.dtype) for row in both]
        averages, begin = {}, 0
        for one, whole in found.items():
            end = begin + len(places[one])
            total = np.zeros(whole.size, values.dtype)
            for row_places, row_values in zip(all_places, all_values, strict=True):
                total[row_places[begin:end]] += row_values[begin:end]
            averages[one] = (total / len(all_values)).astype(values.dtype, copy=False).reshape(whole.shape)
            begin = end
        return averages
