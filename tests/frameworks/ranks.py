"""Ranks of a world in memory, as threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kfcomm import testing


def each(main: Callable[[Any], Any], size: int = 2) -> list[Any]:
    """Results of ``main(comm)`` on every rank."""

    import torch

    def rank(comm: Any) -> Any:
        torch.set_num_threads(1)  # it is each thread's own
        return main(comm)

    with testing.sync_world(size) as comms:
        return testing.run_threads(comms, rank)


def filled(model: Any, seed: int, scale: float = 1.0) -> Any:
    """The model with random parameters that are the same in each thread, which torch's own generator does not give."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(scale * torch.randn(one.shape, generator=generator, dtype=one.dtype))
    return model
