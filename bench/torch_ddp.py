"""An unmodified DistributedDataParallel or FSDP2 step over kfcomm's backend, beside the same over Gloo.

    torchrun --nproc-per-node 2 bench/torch_ddp.py
    torchrun --nproc-per-node 2 bench/torch_ddp.py --fsdp
    torchrun --nproc-per-node 2 bench/torch_ddp.py --gpt

The perceptron of ``bench/torch_step.py``, 12.6 million parameters in float32, one thread a rank; FSDP2 shards each
layer. ``--gpt`` has a transformer of nanoGPT's size for CPUs in its place, 0.8 million parameters. All take turns in
the same processes: *unshared* is DDP whose hook exchanges nothing, *alone* the model without DDP. A round's time is
that of the slowest rank, its processor time that of all threads of all ranks, the ratio the median over rounds. Then
``dist.all_reduce`` of 1 KiB beside the same through ``kfcomm.sync``, in the median of calls. Needs torch 2.13.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import kfcomm.torch
from bench.torch_step import STEPS, WIDTHS, Turns, perceptron

CALLS = 2000
VOCABULARY, TOKENS, WIDTH = 65, 64, 128
"""Of the transformer."""


class Gpt(nn.Module):  # type: ignore[misc]
    """Four layers of 128 numbers for each of 64 tokens, four heads; from tokens to the logits of the next ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.TransformerEncoder(layer, 4, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.logits = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.logits.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens of shape (samples, ``TOKENS``) to logits."""
        mask = nn.Transformer.generate_square_subsequent_mask(TOKENS)
        return self.logits(self.layers(self.tokens(x) + self.places.weight, mask=mask, is_causal=True))


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


def replicated(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """The model for DDP."""
    return DistributedDataParallel(model, process_group=group)


def kept(bucket: Any) -> Any:
    """Result of a communication hook that exchanges nothing."""
    found = torch.futures.Future()
    found.set_result(bucket.buffer())
    return found


def unshared(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """The model for DDP, whose hook exchanges nothing."""
    parallel = replicated(model, group)
    parallel.register_comm_hook(None, lambda _, bucket: kept(bucket))  # an annotation has to be torch's own type
    return parallel


def sharded(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """The perceptron for FSDP2."""
    mesh = DeviceMesh.from_group(group, "cpu")
    for one in [*(layer for layer in model if isinstance(layer, nn.Linear)), model]:
        fully_shard(one, mesh=mesh)
    return model


def steps(
    rounds: int, x: torch.Tensor, make: Callable[[], nn.Module], parallel: Callable[..., nn.Module]
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of a step, and of processors on all ranks, of each round."""
    gloo = dist.new_group(backend="gloo")
    turns = {
        "kfcomm": Turns(parallel(make(), dist.group.WORLD), x),
        "gloo": Turns(parallel(make(), gloo), x),
        "unshared": Turns(unshared(make(), gloo), x),
        "alone": Turns(make(), x),
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
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--fsdp", action="store_true", help="FSDP2 in the place of DDP")
    which.add_argument("--gpt", action="store_true", help="a transformer in the place of the perceptron")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("kfcomm")
    torch.manual_seed(dist.get_rank())
    make: Callable[[], nn.Module] = Gpt if arguments.gpt else perceptron
    shape = arguments.batch, TOKENS
    x = torch.randint(VOCABULARY, shape) if arguments.gpt else torch.randn(arguments.batch, WIDTHS[0])
    seconds = steps(arguments.rounds, x, make, sharded if arguments.fsdp else replicated)
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
        print(f"{name:8} {took:7.1f} ms a step, {busy:7.1f} ms of processors")
    pairs = list(zip(seconds["kfcomm"], seconds["gloo"], strict=True))
    ratio, busy = (statistics.median(gloo[n] / ours[n] for ours, gloo in pairs) for n in (0, 1))
    print(f"{ratio:.2f} times as fast as Gloo, which takes {busy:.2f} times the processor time")
    print(f"all_reduce of 1 KiB: {ours:.0f} us by torch.distributed, {below:.0f} us by kfcomm.sync")


if __name__ == "__main__":
    main()
