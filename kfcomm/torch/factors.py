"""Gradients of linear layers by their factors, instead of an average of a bucket.

The gradient of a layer's weight is AᵀB over K rows: A holds the gradients of the layer's output, B its input. Hooks
record both. If they are smaller than the gradient (Poseidon, see `kfcomm.train.factors`), they are gathered from all
ranks, and each rank multiplies them.

Invariant: a rank offers factors only if their product is its gradient, which it checks in every step. A weight that is
used elsewhere, or a gradient of more than this step's samples, travels as it is. All ranks make the same choice, from
the offers of all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from kfcomm.torch.compiling import uncompiled
from kfcomm.train.factors import Factors, averaged, takes_factors
from kfcomm.train.procedure import Comm, Pending

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

NO_FACTORS = 1 << 40
"""Number of samples with which a rank that has no factors makes all ranks send the gradient."""
TOLERANCE = {"float32": 1e-3, "float64": 1e-8}
"""Largest relative difference of a product of factors and the gradient that autograd has added up in another order."""


class RecordedRows:
    """A linear layer with the rows of the passes since its gradient was exchanged."""

    def __init__(self, module: torch.nn.Linear) -> None:
        self._weight = module.weight
        self._rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.hook = module.register_forward_hook(self._after_forward)

    @uncompiled
    def _after_forward(self, _: Any, given: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        if torch.is_grad_enabled() and out.requires_grad:
            if self._weight.grad is None:
                self._rows.clear()  # of a pass that has raised, or whose gradients were dropped
            out.register_hook(partial(self._came_back, given[0].detach()))

    @uncompiled
    def _came_back(self, given: torch.Tensor, gradient: torch.Tensor) -> None:
        self._rows.append((gradient.detach().flatten(0, -2), given.flatten(0, -2)))

    def taken(self, gradient: Array) -> Factors | None:
        """The factors of a gradient; None if they are not there, or are not all of it."""
        rows, self._rows = self._rows, []
        if not rows:
            # A rank without samples in this step has no rows, and zeros.
            empty = (np.zeros((0, count), gradient.dtype) for count in gradient.shape)
            return None if gradient.any() else Factors(*empty)
        outer, inner = (torch.cat([row[side] for row in rows]).cpu().numpy() for side in (0, 1))
        if outer.dtype != gradient.dtype or inner.dtype != gradient.dtype:
            return None  # autocast: the layer computes in another type
        # One pass over the gradient, where multiplying the factors of n ranks takes n·K.
        probe = np.random.default_rng(len(outer)).standard_normal(gradient.shape[1]).astype(gradient.dtype)
        wanted, found = gradient @ probe, outer.T @ (inner @ probe)
        error = np.linalg.norm(wanted - found)
        is_all = error <= TOLERANCE[str(gradient.dtype)] * np.linalg.norm(wanted)
        return Factors(outer, inner) if is_all else None


def linear_weights(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """Linear layers by the names of their weights, of types whose factors can be checked."""
    return {
        f"{place}.weight" if place else "weight": module
        for place, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and str(module.weight.dtype).removeprefix("torch.") in TOLERANCE
    }


class HybridAverage:
    """Average of the gradients of a bucket, by factors where these are smaller; made by ``Compression("factors")``."""

    def __init__(self) -> None:
        self._layers: dict[str, RecordedRows] = {}

    def watch(self, model: torch.nn.Module, names: Collection[str]) -> list[Any]:
        """Record the linear layers whose weights have these names; returns the hooks, to be removed in the end."""
        self._layers = {name: RecordedRows(one) for name, one in linear_weights(model).items() if name in names}
        return [one.hook for one in self._layers.values()]

    def average(self, comm: Comm, gradients: Mapping[str, Array], *, name: str) -> dict[str, Array]:
        """Return the mean of all ranks' gradients, by name; see ``kfcomm.compression``."""
        layers = [one for one in self._layers if one in gradients]
        offered = {one: self._layers[one].taken(gradients[one]) for one in layers}
        chosen = set[str]()
        if layers and comm.size > 1:
            counts = [NO_FACTORS if found is None else len(found.outer) for found in offered.values()]
            means = comm.all_reduce(np.array(counts, np.int64), f"{name}/samples") / comm.size
            chosen = {
                one
                for one, mean in zip(layers, means.tolist(), strict=True)
                if takes_factors(gradients[one].shape[0], gradients[one].shape[1], mean, comm.size)
            }
        factored = {one: found for one, found in offered.items() if found is not None and one in chosen}
        whole = {one: x for one, x in gradients.items() if one not in factored}
        return Pending(comm, averaged(comm, name, whole, factored, dict(gradients))).wait()
