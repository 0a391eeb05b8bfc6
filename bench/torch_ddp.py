"""An unmodified DistributedDataParallel or FSDP2 step over kfcomm's backend, beside the same over Gloo.

    torchrun --nproc-per-node 2 bench/torch_ddp.py
    torchrun --nproc-per-node 2 bench/torch_ddp.py --fsdp

The perceptron of ``bench/torch_step.py``, 12.6 million parameters in float32, one thread a rank; FSDP2 shards each
layer. Both take turns in the same processes; a round's time is that of the slowest rank, its processor time that of all
threads of all ranks, the ratio the median over rounds. Then ``dist.all_reduce`` of 1 KiB beside the same through
``kfcomm.sync``, in the median of calls. Needs torch 2.13.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import kfcomm.torch
from bench.torch_step import STEPS, WIDTHS, Turns, perceptron

CALLS = 2000


def slowest(seconds: float) -> float:
    """Of all ranks."""
    took = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def call_us(call: Callable[[], object]) -> float:
    """Median microseconds of a call, after a few."""
    took = []
    for _ in range(CALLS):
        begun = time.perf_counter()
        call()
        took.append(time.perf_counter() - begun)
    return 1e6 * statistics.median(took[CALLS // 10 :])


def of_all(seconds: float) -> float:
    """Of all ranks together."""
    took = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(took)
    return float(took)


def replicated(group: dist.ProcessGroup) -> nn.Module:
    """The model for DDP."""
    return DistributedDataParallel(perceptron(), process_group=group)


def sharded(group: dist.ProcessGroup) -> nn.Module:
    """The model for FSDP2."""
    model, mesh = perceptron(), DeviceMesh.from_group(group, "cpu")
    for one in [*(layer for layer in model if isinstance(layer, nn.Linear)), model]:
        fully_shard(one, mesh=mesh)
    return model


def steps(
    rounds: int, batch: int, make: Callable[[dist.ProcessGroup], nn.Module]
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of a step, and of processors on all ranks, of each round."""
    gloo = dist.new_group(backend="gloo")
    torch.manual_seed(dist.get_rank())
    x = torch.randn(batch, WIDTHS[0])
    turns = {
        "kfcomm": Turns(make(dist.group.WORLD), x),
        "gloo": Turns(make(gloo), x),
        "alone": Turns(perceptron(), x),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
    for number in range(rounds + 1):
        for name, one in turns.items():
            dist.barrier()
            begun = time.process_time()
            took = slowest(one.take())
            busy = of_all(time.process_time() - begun) / STEPS
            if number:
                seconds[name].append((took, busy))
    return seconds


def main() -> None:
    """Measure on every rank; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, default=16, help="samples of each rank")
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 in the place of DDP")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("kfcomm")
    seconds = steps(arguments.rounds, arguments.batch, sharded if arguments.fsdp else replicated)
    comm, x = kfcomm.torch.communicator(), torch.ones(256)
    array = x.numpy()
    ours = call_us(lambda: dist.all_reduce(x))
    below = call_us(lambda: comm.all_reduce(array, "x", op="sum", out=array))
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank:
        return
    for name, each in seconds.items():
        took, busy = (1e3 * statistics.median(one) for one in zip(*each, strict=True))
        print(f"{name:7} {took:7.1f} ms a step, {busy:7.1f} ms of processors")
    pairs = list(zip(seconds["kfcomm"], seconds["gloo"], strict=True))
    ratio, busy = (statistics.median(gloo[n] / ours[n] for ours, gloo in pairs) for n in (0, 1))
    print(f"{ratio:.2f} times as fast as Gloo, which takes {busy:.2f} times the processor time")
    print(f"all_reduce of 1 KiB: {ours:.0f} us by torch.distributed, {below:.0f} us by kfcomm.sync")


if __name__ == "__main__":
    main()
