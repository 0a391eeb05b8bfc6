"""DistributedDataParallel with the gradients of ResNet-50 and VGG-16 over kfcomm's backend, beside the same over Gloo.

    torchrun --nproc-per-node 4 bench/torch_models.py
    KFCOMM_TRANSPORT=tcp torchrun --nproc-per-node 4 bench/torch_models.py

The tensors have the shapes of the models; computing a gradient is one addition to what it was, so that a step is next
to nothing but DDP's own copies and the exchange; *unshared* is a DDP whose hook exchanges nothing. One thread a rank.
All take turns in the same processes, with a DDP made anew whose first steps are not counted. A turn's time is that of
the slowest rank, its processor time that of all threads of all ranks; the ratio is the median over rounds. VGG-16 takes
5 GB a rank, a third of it shared. Needs torch 2.13.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from bench.torch_ddp import kept, of_all, slowest
from kfcomm.bench.workloads import WORKLOADS
from kfcomm.types import override

FIRST_STEPS = 5
"""Of a DDP, in which it makes its buckets, and kfcomm finds their names and takes its memory."""
NAMES = ("resnet50", "vgg16")
BACKENDS = ("kfcomm", "gloo", "unshared")


class Touch(torch.autograd.Function):  # type: ignore[misc]
    """A number that depends on all parameters; the gradients are ones, which take no memory."""

    @staticmethod
    @override
    def forward(context: Any, *parameters: torch.Tensor) -> torch.Tensor:
        context.shapes = [one.shape for one in parameters]
        return torch.ones(())

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    @override
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(gradient.expand(shape) for shape in context.shapes)


class Shapes(nn.Module):  # type: ignore[misc]
    """A model of these tensors, in the order of its layers, each used by itself; their values are not read."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.tensors = nn.ParameterList([nn.Parameter(torch.zeros(()).expand(shape)) for shape in WORKLOADS[name]()])
        for one in self.tensors:
            one.grad = torch.zeros(one.shape)

    def forward(self) -> torch.Tensor:
        """The sum of a number for each tensor: so their gradients come one after the other, the last layer's first."""
        total = torch.zeros(())
        for one in self.tensors:
            total = total + Touch.apply(one)
        return total


def turn(model: Shapes, backend: str, gloo: Any, steps: int) -> tuple[float, float]:
    """Seconds of a step on the slowest rank, and of processors on all ranks."""
    group = gloo if backend == "gloo" else None
    parallel = DistributedDataParallel(model, process_group=group, init_sync=False)
    if backend == "unshared":
        parallel.register_comm_hook(None, lambda _, bucket: kept(bucket))  # an annotation has to be torch's own type
    for _ in range(FIRST_STEPS):
        parallel().backward()
    dist.barrier()
    begun, begun_cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        parallel().backward()
    took, took_cpu = time.perf_counter() - begun, time.process_time() - begun_cpu
    del parallel
    gc.collect()
    return slowest(took / steps), of_all(took_cpu / steps)


def main() -> None:
    """Measure on every rank; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(NAMES), help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="of a turn that are counted")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("kfcomm")
    gloo = dist.new_group(backend="gloo")
    for name in arguments.models:
        model = Shapes(name)
        found: dict[str, list[tuple[float, float]]] = {backend: [] for backend in BACKENDS}
        for _ in range(arguments.rounds):
            for backend in BACKENDS:
                found[backend].append(turn(model, backend, gloo, arguments.steps))
        if dist.get_rank():
            continue
        for backend, turns in found.items():
            wall, busy = (1e3 * statistics.median(each) for each in zip(*turns, strict=True))
            print(f"{name:9} {backend:8} {wall:7.1f} ms a step, {busy:7.1f} ms of processors")
        ratio = statistics.median(b / a for (a, _), (b, _) in zip(found["kfcomm"], found["gloo"], strict=True))
        print(f"{name:9} {ratio:.2f} times as fast as Gloo", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
