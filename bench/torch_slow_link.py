"""Training steps over a slow link: ``kfcomm.torch.attach`` beside what DistributedDataParallel does.

    python -m bench.netlab run --hosts 2 --rate 1gbit -- python bench/torch_slow_link.py --picture steps.svg

Layers of one size whose computation is a sleep, as a device computes while its host waits: a third of a step forward,
two thirds backward, and all of it as long as the gradients travel alone. In turns, in the same processes:

- *attach*: with deferred updates;
- *in order*: the same engine and hooks, with what DistributedDataParallel does: buckets of 25 MiB that leave in the
  order of the backward pass, and a step of the optimizer that waits for all;
- *gloo*: DistributedDataParallel over Gloo.

A round's figure is that of the slowest rank, a ratio the median over rounds. The picture shows one step of the first
two, on rank 0.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import socket
import statistics
import struct
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import kfcomm.sync
import kfcomm.torch
from bench.step_picture import Recorder, draw
from kfcomm.bench.harness import slowest_s, take_turns

RATE = 1e-3
IN_ORDER_NBYTES = 25 << 20
SIOCGIFADDR = 0x8915


class Sleep(torch.autograd.Function):  # type: ignore[misc]  # torch may not be here
    """Computes for a while, and gives the weight a gradient of its size."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, forward_s: float) -> torch.Tensor:
        """Half as long as backward."""
        ctx.save_for_backward(weight)
        ctx.forward_s = forward_s
        time.sleep(forward_s)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Twice as long as forward."""
        (weight,) = ctx.saved_tensors
        time.sleep(2 * ctx.forward_s)
        return gradients[0], torch.full_like(weight, float(gradients[0].sum())), None


class Layer(nn.Module):  # type: ignore[misc]
    """So many numbers, and so much time."""

    def __init__(self, count: int, forward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(count))
        self._forward_s = forward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sleep."""
        found: torch.Tensor = Sleep.apply(x, self.weight, self._forward_s)
        return found


class Turns:
    """Steps of one way."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.wait: Callable[[], None] = lambda: None
        """Until all parameters are updated."""
        self.optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def take(self, count: int) -> float:
        """Seconds of a step."""
        x = torch.ones(1)
        begun = time.perf_counter()
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(x).sum().backward()
            self.optimizer.step()
        self.wait()
        return (time.perf_counter() - begun) / count


def address() -> str:
    """Of this host, on the interface that is not the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            if name != "lo":
                try:
                    answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
                except OSError:
                    continue
                os.environ["GLOO_SOCKET_IFNAME"] = name
                return socket.inet_ntoa(answer[20:24])
    return "127.0.0.1"


def begin_gloo(comm: kfcomm.sync.Communicator) -> None:
    """Rank 0 says where they meet."""
    here = address()
    with socket.socket() as probe:
        probe.bind((here, 0))
        port = probe.getsockname()[1]
    where = comm.broadcast_object([here, port], name="where")
    os.environ.update(MASTER_ADDR=where[0], MASTER_PORT=str(where[1]))
    dist.init_process_group("gloo", rank=comm.rank, world_size=comm.size)


def exchange_s(comm: kfcomm.sync.Communicator, count: int) -> float:
    """How long all gradients travel alone, on the slowest rank."""
    gradients = np.ones(count, np.float32)
    times = []
    for _ in range(4):
        comm.barrier("exchange")
        begun = time.perf_counter()
        comm.all_reduce(gradients, "all", out=gradients, op="avg")
        times.append(time.perf_counter() - begun)
    return slowest_s(comm, statistics.median(times[1:]))


def made(layers: int, count: int, forward_s: float) -> nn.Sequential:
    """A model; one of its own for each way."""
    return nn.Sequential(*(Layer(count, forward_s) for _ in range(layers)))


def main() -> None:
    """Measure on every rank; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--nbytes", type=int, default=6 << 20, help="of the gradient of a layer")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6, help="of a turn")
    parser.add_argument("--bucket-nbytes", type=int, default=4 << 20, help="of attach")
    parser.add_argument("--picture", type=Path, help="an SVG of one step")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with kfcomm.sync.init() as comm:
        begin_gloo(comm)
        count = arguments.nbytes // 4
        alone_s = exchange_s(comm, arguments.layers * count)
        forward_s = alone_s / 3 / arguments.layers
        shape = (arguments.layers, count, forward_s)
        turns = {
            "attach": Turns(made(*shape)),
            "in order": Turns(made(*shape)),
            "gloo": Turns(DistributedDataParallel(made(*shape))),
        }
        for name, options in (
            ("attach", {"bucket_nbytes": arguments.bucket_nbytes, "defer": True}),
            ("in order", {"bucket_nbytes": IN_ORDER_NBYTES}),
        ):
            one = turns[name]
            one.wait = kfcomm.torch.attach(one.model, one.optimizer, comm, name=name, **options).wait
        works = {name: partial(one.take, arguments.steps) for name, one in turns.items()}
        seconds = take_turns(comm, works, arguments.rounds)
        if arguments.picture is not None:
            picture(comm, {name: turns[name] for name in ("attach", "in order")}, arguments.picture)
        dist.destroy_process_group()
        if comm.rank == 0:
            report(comm, seconds, alone_s)


def picture(comm: kfcomm.sync.Communicator, turns: dict[str, Turns], path: Path) -> None:
    """Record three steps of each way and draw them."""
    recorded = {}
    for name, one in turns.items():
        comm.barrier("picture")
        with Recorder(comm) as recorder:
            one.take(3)
        recorded[name] = recorder
    if comm.rank == 0:
        path.write_text(draw(recorded), "utf-8")


def report(comm: kfcomm.sync.Communicator, seconds: dict[str, list[float]], alone_s: float) -> None:
    """For people."""
    print(f"gradients alone {1e3 * alone_s:.0f} ms; computation the same")
    for name, of_way in seconds.items():
        ratio = statistics.median(b / a for a, b in zip(seconds["attach"], of_way, strict=True))
        print(f"{name:9} {1e3 * statistics.median(of_way):7.1f} ms a step, {ratio:.2f} times as long as attach")
    for one in comm.statistics().steps:
        print(f"{one.name:9} gradients under way {1e3 * one.in_flight_s / one.count:.0f} ms a step, "
              f"waited for {1e3 * one.waited_s / one.count:.0f}")  # fmt: skip
    sys.stdout.flush()


if __name__ == "__main__":
    main()
