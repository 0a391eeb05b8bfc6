"""Processes that share one GPU: kfcomm beside torch.distributed's Gloo with CUDA tensors, in turns.

    python -m bench.gpu.shared --scale F --meeting FILE        (a rank, under kfcomm run)

In each round all ranks begin each work together, and its time is that of the slowest, up to where its device is done.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import cupy

import kfcomm
from bench import ROOT
from bench.gpu.device import Torch, filled, timed
from bench.gpu.figures import KFCOMM, TORCH
from kfcomm.bench.harness import run_job, said_json, take_turns
from kfcomm.common.sizes import show_size

ROUNDS = {1 << 10: 150, 1 << 16: 100, 1 << 20: 60, 64 << 20: 10}
"""By bytes."""
WARMUP, WARMUP_CALLS = 5, 100
PATIENCE_S = 60.0
"""For the whole run of one world."""


def member(options: argparse.Namespace) -> None:
    """One rank; rank 0 prints the times of all rounds."""
    with kfcomm.sync.init() as comm:
        torch = Torch("gloo", options.meeting, comm.rank, comm.size) if Torch.is_here() else None
        _measured(comm, torch, 1 << 20, WARMUP_CALLS)  # the device's clocks rise meanwhile
        times_s = {
            show_size(nbytes): _measured(comm, torch, nbytes, max(1, round(rounds * options.scale)))
            for nbytes, rounds in ROUNDS.items()
        }
        if comm.rank == 0:
            print(json.dumps({"route": str(comm.route), "times_s": times_s}), flush=True)
        if torch is not None:
            torch.close()


def _measured(comm: Any, torch: Torch | None, nbytes: int, rounds: int) -> dict[str, list[float]]:
    count, name = nbytes // 4, show_size(nbytes)
    x, out, stream = filled(count, comm.rank + 1), filled(count, 0), cupy.cuda.Stream(non_blocking=True)

    def call() -> None:
        with stream:
            comm.all_reduce(x, name, out=out)

    works = {KFCOMM: lambda: timed(call, stream)}
    if torch is not None:
        tensors = torch.tensors([count])
        works[TORCH] = lambda: torch.all_reduce(tensors)
    found = take_turns(comm, works, rounds, warmup=WARMUP)
    total = comm.size * (comm.size + 1) / 2
    if not (out.get() == total).all():
        raise SystemExit(f"wrong sums of {name} on rank {comm.rank}")
    return found


def measure(num_ranks: int, transport: str, scale: float) -> dict[str, Any]:
    """Run processes on the first GPU; returns the route, and the times of every round by size.

    Raises:
        JobFailed: they failed, or took too long.
    """
    options = ("--device", "cuda:0", "--transport", transport)
    with tempfile.TemporaryDirectory(prefix="kfcomm-bench-") as folder:
        output = run_job(
            num_ranks, ["-m", "bench.gpu.shared"], "--scale", scale, "--meeting", Path(folder) / "meeting",
            options=options, env={"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}, timeout_s=PATIENCE_S,
        )  # fmt: skip
    found: dict[str, Any] = said_json(output)
    return found


def main() -> None:
    """A rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of rounds")
    parser.add_argument("--meeting", required=True, help="a file that is not there, where the ranks of torch meet")
    member(parser.parse_args())


if __name__ == "__main__":
    main()
