"""A program that averages the gradients of VGG-16's dense layers: by ``HybridGradients``, and by all_reduce.

It is started by ``bench.netlab.hybrid`` with a folder, where each rank writes ``rank-R.json``: of each turn the times
by the monotonic clock, which the ranks of one machine share, and the bytes that the rank's links have sent meanwhile.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import kfcomm
from kfcomm.train import Factors, HybridGradients

LAYERS = {"fc6": (4096, 25088), "fc7": (4096, 4096), "fc8": (1000, 4096)}
"""Of Simonyan and Zisserman's VGG-16, 2015: outputs and inputs; 123.6 million weights."""
HYBRID, WHOLE, TOLD = "hybrid", "all_reduce", "factors alone"
WAYS = (HYBRID, WHOLE, TOLD)
_SHOWN = 64
"""Rows of each gradient that are compared between the two ways."""

Gradients: TypeAlias = dict[str, Any]


def layers_of(divisor: int) -> dict[str, tuple[int, int]]:
    """The shapes with both sides divided, for machines that are smaller."""
    return {name: (outputs // divisor, inputs // divisor) for name, (outputs, inputs) in LAYERS.items()}


def factors_of(layers: Mapping[str, tuple[int, int]], samples: int, rank: int) -> dict[str, Factors]:
    """Random factors of each layer's mean gradient on this rank, as a backward pass leaves them."""
    random = np.random.default_rng(rank)

    def normal(columns: int) -> Any:
        return random.standard_normal((samples, columns), np.float32)

    return {
        name: Factors(normal(outputs) / np.float32(samples), normal(inputs))
        for name, (outputs, inputs) in layers.items()
    }


def whole(comm: Any, factors: dict[str, Factors], room: Gradients) -> Gradients:
    """Each rank multiplies its own, and all_reduces it in place."""
    gradients = {name: np.matmul(one.outer.T, one.inner, out=room[name]) for name, one in factors.items()}
    found: Gradients = comm.all_reduce_many(gradients, "whole", op="avg", out=gradients)
    return found


def told(comm: Any, factors: dict[str, Factors]) -> Gradients:
    """Everybody has everybody's factors, and multiplies none: what of the hybrid way is the network's."""
    comm.all_gather([np.concatenate(one, axis=1) for one in factors.values()], "told")
    return {}


def turn(comm: Any, average: Callable[[], Gradients]) -> tuple[dict[str, Any], Gradients]:
    """One step: its figures, and the first rows of its gradients."""
    comm.barrier("turn")
    sent_nbytes = _sent_nbytes(comm)
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    found = average()
    figures = {"start_s": start_s, "end_s": time.monotonic(), "cpu_s": time.process_time() - start_cpu_s}
    comm.barrier("turned")
    figures["sent_nbytes"] = _sent_nbytes(comm) - sent_nbytes
    return figures, {name: one[:_SHOWN].copy() for name, one in found.items()}


def _sent_nbytes(comm: Any) -> int:
    return sum(peer.sent_nbytes for peer in comm.statistics().peers)


def main() -> None:
    """All turns of this rank.

    Raises:
        RuntimeError: the two ways differ by more than rounding.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--divisor", type=int, required=True)
    options = parser.parse_args()
    times: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with kfcomm.sync.init() as comm:
        layers = layers_of(options.divisor)
        factors = factors_of(layers, options.samples, comm.rank)
        room = {name: np.zeros(shape, np.float32) for name, shape in layers.items()}
        hybrid = HybridGradients(comm)
        ways: dict[str, Callable[[], Gradients]] = {
            HYBRID: lambda: hybrid.average({**factors}, out=room).wait(),
            WHOLE: lambda: whole(comm, factors, room),
            TOLD: lambda: told(comm, factors),
        }
        for _ in range(options.rounds):
            shown = {}
            for way, average in ways.items():
                figures, shown[way] = turn(comm, average)
                times[way].append(figures)
            for name, one in shown[WHOLE].items():
                if not np.allclose(one, shown[HYBRID][name], rtol=1e-3, atol=1e-5):
                    raise RuntimeError(f"rank {comm.rank}: the two ways differ in {name}")
        (options.output / f"rank-{comm.rank}.json").write_text(json.dumps({"rank": comm.rank, "times": times}))


if __name__ == "__main__":
    main()
