"""A training step in torch: kfcomm with a hook for each gradient, beside DistributedDataParallel over Gloo.

    kfcomm run -n 4 python bench/torch_step.py

A perceptron of 12.6 million parameters in float32, one thread a rank. A step is forward, backward and SGD. With kfcomm
each gradient's average begins when the gradient is there, by name, and is waited for before the optimizer's step;
``kfcomm.torch.attach`` waits at the end of the backward pass, and with ``defer=True`` when the next forward pass needs
a parameter. All take turns in the same processes. A round's figure is that of the slowest rank, the ratio the median
over rounds.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import kfcomm.sync
import kfcomm.torch
from kfcomm.bench.harness import take_turns

WIDTHS = (1024, 2048, 2048, 2048, 1024)
RATE = 1e-3
STEPS = 5
"""Of a turn."""


def perceptron() -> nn.Sequential:
    """The same weights on every rank."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for wide, narrow in zip(WIDTHS, WIDTHS[1:], strict=False):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Averaged:
    """Gradients that are averaged as they come."""

    def __init__(self, comm: kfcomm.sync.Communicator, model: nn.Module) -> None:
        self._comm = comm
        self._pending: list[kfcomm.sync.Handle[np.ndarray]] = []
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(partial(self._begin, name))

    def _begin(self, name: str, parameter: torch.Tensor) -> None:
        gradient = parameter.grad.numpy()
        self._pending.append(self._comm.all_reduce_async(gradient, name, op="avg", out=gradient))

    def wait(self) -> None:
        """All are averaged."""
        for handle in self._pending:
            handle.wait()
        self._pending.clear()


class Turns:
    """Steps of one model, its own way."""

    def __init__(self, model: nn.Module, x: torch.Tensor, wait: Callable[[], None] = lambda: None) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        self.end: Callable[[], None] = lambda: None
        """Waits until all parameters are updated."""
        self._x, self._wait = x, wait

    def take(self) -> float:
        """Seconds of a step."""
        begun = time.perf_counter()
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            self.model(self._x).square().mean().backward()
            self._wait()
            self.optimizer.step()
        self.end()
        return (time.perf_counter() - begun) / STEPS


def free_port(comm: kfcomm.sync.Communicator) -> int:
    """On this host, the same on every rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(comm.broadcast_object(probe.getsockname()[1], name="port"))


def main() -> None:
    """Measure on every rank; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, default=32, help="samples of each rank")
    parser.add_argument("--bucket-nbytes", type=int, default=4 << 20, help="see kfcomm.torch.attach")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with kfcomm.sync.init() as comm:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port(comm)))
        dist.init_process_group("gloo", rank=comm.rank, world_size=comm.size)
        torch.manual_seed(comm.rank)
        x = torch.randn(arguments.batch, WIDTHS[0])
        hooked = perceptron()
        turns = {
            "kfcomm": Turns(hooked, x, Averaged(comm, hooked).wait),
            "attach": Turns(perceptron(), x),
            "deferred": Turns(perceptron(), x),
            "gloo": Turns(DistributedDataParallel(perceptron()), x),
            "alone": Turns(perceptron(), x),
        }
        for name, defer in (("attach", False), ("deferred", True)):
            one = turns[name]
            options = {"name": name, "defer": defer, "bucket_nbytes": arguments.bucket_nbytes}
            one.end = kfcomm.torch.attach(one.model, one.optimizer, comm, **options).wait
        seconds = take_turns(comm, {name: one.take for name, one in turns.items()}, arguments.rounds)
        weights = [
            nn.utils.parameters_to_vector(turns[name].model.parameters())
            for name in ("attach", "deferred", "gloo", "kfcomm")
        ]
        same = all(torch.allclose(one, weights[0], atol=1e-5) for one in weights)
        dist.destroy_process_group()
        if comm.rank:
            return
        for name, all_of_it in seconds.items():
            print(f"{name:8} {1e3 * statistics.median(all_of_it):7.1f} ms a step")
        for name in ("kfcomm", "attach", "deferred"):
            ratio = statistics.median(b / a for a, b in zip(seconds[name], seconds["gloo"], strict=True))
            print(f"{name:8} {ratio:.2f} times as fast as Gloo")
        print(f"the weights are {'alike' if same else 'NOT alike'}")


if __name__ == "__main__":
    main()
