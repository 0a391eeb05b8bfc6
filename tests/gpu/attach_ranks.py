"""One rank of attached models on a GPU that ranks share: ``attach_ranks.py FILE`` prints results as JSON.

A case trains a small model on the device and on the CPU, or by ``DistributedDataParallel`` over Gloo. Its result is the
largest difference between parameters, or its error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch  # noqa: TID253  run where there is torch, by nothing else
import torch.distributed as dist  # noqa: TID253
from torch import nn  # noqa: TID253
from torch.utils.checkpoint import checkpoint  # noqa: TID253

import kfcomm.sync
import kfcomm.torch
from kfcomm.adapt.guard import GuardSteps
from kfcomm.errors import CollectiveAborted
from kfcomm.torch import Compression
from kfcomm.train import Algorithm

WIDTH, HIDDEN, ROWS, STEPS, CYCLES = 32, 96, 16, 5, 3_000_000
WITHIN_S = 15
SMALL = {"bucket_nbytes": 5000}


class Net(nn.Module):
    """Has buffers, and layers that are checkpointed or used in every other pass, as asked for."""

    def __init__(self, device: str, *, first: str = "", how: bool | None = None, partly: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm = nn.Linear(WIDTH, HIDDEN), nn.BatchNorm1d(HIDDEN)
        self.middle, self.sometimes = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.last = nn.Linear(HIDDEN, 8)
        self.device, self.first_device = device, first if first and device != "cpu" else device
        self.how, self.partly, self.calls = how, partly, 0
        self.to(device)
        self.first.to(self.first_device)

    def forward(self, x: Any) -> Any:
        self.calls += 1
        x = self.norm(self.first(x.to(self.first_device)).to(self.device)).tanh()
        x = self.middle(x) if self.how is None else checkpoint(self.middle, x, use_reentrant=self.how)
        x = x.tanh()
        return self.last(x if self.partly and self.calls % 2 else self.sometimes(x).tanh())


def batch(step: int, rank: int, device: str) -> tuple[Any, Any]:
    """Inputs and wanted outputs of one rank in one step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return tuple(torch.randn(ROWS, width, generator=generator).to(device) for width in (WIDTH, 8))  # type: ignore[return-value]


def numbers(model: nn.Module) -> Any:
    """All parameters in one vector, in host memory."""
    return torch.cat([one.detach().double().flatten().cpu() for one in model.parameters()])


class Loop:
    """A training loop.

    Args:
        comm: of the ranks.
        device: of the model.
        net: options of `Net`.
        amp, clip, accumulate: float16 with a scaler; clipped gradients; two passes a step.
        momentum: of the optimizer.
    """

    def __init__(
        self, comm: Any, device: str, net: dict[str, Any], *, amp: bool = False, clip: bool = False,
        accumulate: bool = False, momentum: float = 0.9,
    ) -> None:  # fmt: skip
        self.comm, self.device = comm, device
        self.amp, self.clip, self.accumulate = amp, clip, accumulate
        self.model = Net(device, **net)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=momentum)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, enabled=amp)

    def run(self, called: Any, no_sync: Callable[[], Any]) -> Any:
        """Train, and give the parameters."""
        for step in range(STEPS):
            self.optimizer.zero_grad()
            if self.accumulate:
                with no_sync():
                    self._loss(called, step + STEPS).backward()
            self.scaler.scale(self._loss(called, step)).backward()
            if self.clip:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def _loss(self, called: Any, step: int) -> Any:
        x, y = batch(step, self.comm.rank, self.device)
        with torch.autocast("cuda", torch.float16, enabled=self.amp):
            return nn.functional.mse_loss(called(x).float(), y)


def attached(comm: Any, device: str, net: dict[str, Any], loop: dict[str, Any], **options: Any) -> Any:
    """Parameters after training with ``attach``, and the attachment."""
    made = Loop(comm, device, net, **loop)
    held = kfcomm.torch.attach(made.model, made.optimizer, comm, **options)
    made.run(made.model, held.no_sync)
    held.state_dict()
    held.detach()
    return numbers(made.model), held


def beside_ddp(comm: Any, loop: dict[str, Any] | None = None, **options: Any) -> float:
    """Largest difference from ``DistributedDataParallel`` over Gloo."""
    found, _ = attached(comm, "cuda", {}, loop or {}, **options)
    made = Loop(comm, "cuda", {}, **(loop or {}))
    model = nn.parallel.DistributedDataParallel(made.model, broadcast_buffers=False)
    made.run(model, model.no_sync)
    return float((found - numbers(made.model)).abs().max())


def beside_cpu(comm: Any, net: dict[str, Any] | None = None, **options: Any) -> float:
    """Largest difference from the same training on the CPU."""
    loop = {"momentum": 0.0} if "algorithm" in options else {}
    found, _ = attached(comm, "cuda", net or {}, loop, **options)
    wanted, _ = attached(comm, "cpu", net or {}, loop, **options)
    return float((found - wanted).abs().max())


def monitored(comm: Any) -> float:
    """Largest relative difference of the monitor's figures from those on the CPU."""
    options = {"monitor": {"every": 1}, "batch_size": ROWS * comm.size}
    (_, far), (_, near) = (attached(comm, device, {}, {}, **options) for device in ("cuda", "cpu"))
    names = ("local_norm", "gradient_norm", "gradient_variance", "measurement")
    return float(max(abs(far.monitor.values[one] / near.monitor.values[one] - 1) for one in names))


def late_gradients(comm: Any, **options: Any) -> float:
    """Difference from DDP where the device makes each gradient late, and steps too: streams have to wait."""
    found = []
    for is_attached in (True, False):
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for one in model.parameters():
            one.register_hook(lambda gradient: (torch.cuda._sleep(CYCLES), gradient * 1.0)[1])
        called: Any = model if is_attached else nn.parallel.DistributedDataParallel(model)
        held = kfcomm.torch.attach(model, optimizer, comm, name="late", **options) if is_attached else None
        generator = torch.Generator().manual_seed(comm.rank)
        for _ in range(STEPS):
            optimizer.zero_grad()
            called(torch.randn(ROWS, 256, generator=generator).cuda()).square().mean().backward()
            torch.cuda._sleep(CYCLES)
            optimizer.step()
        if held is not None:
            held.detach()
        found.append(numbers(model))
    return float((found[0] - found[1]).abs().max())


def no_wait(comm: Any, **options: Any) -> float:
    """Raises where torch lets the host wait for the device within a step."""
    made = Loop(comm, "cuda", {})
    kfcomm.torch.attach(made.model, made.optimizer, comm, name="free", **options)
    for step in range(STEPS):
        x, y = batch(step, comm.rank, "cuda")
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            made.optimizer.zero_grad()
            nn.functional.mse_loss(made.model(x), y).backward()
            made.optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return 0.0


def same_memory(comm: Any) -> float:
    """Each step exchanges the same memory, so that calls are found in the cache; the number of addresses but one."""
    made = Loop(comm, "cuda", {})
    held = kfcomm.torch.attach(made.model, made.optimizer, comm, name="same", **SMALL)
    places = set()
    for step in range(STEPS):
        x, y = batch(step, comm.rank, "cuda")
        made.optimizer.zero_grad()
        nn.functional.mse_loss(made.model(x), y).backward()
        made.optimizer.step()
        places.add(tuple(bucket.tensor.data_ptr() for bucket in held._exchange.buckets))
    held.detach()
    return len(places) - 1.0


def void_step(comm: Any) -> float:
    """A NaN of one rank makes a guarded step void on all."""
    made = Loop(comm, "cuda", {})
    held = kfcomm.torch.attach(made.model, made.optimizer, comm, name="guard", policies=[GuardSteps(warmup=2)])
    voids = []
    for step in range(4):
        x, y = batch(step, comm.rank, "cuda")
        made.optimizer.zero_grad()
        nn.functional.mse_loss(made.model(x * float("nan") if (step, comm.rank) == (2, 1) else x), y).backward()
        made.optimizer.step()
        voids.append(held.last_void is not None)
    held.detach()
    assert voids == [False, False, True, False], voids
    return 0.0


def raising_pass(comm: Any) -> float:
    """A backward pass that raises on one rank raises on the others, and all continue."""
    made = Loop(comm, "cuda", {})
    held = kfcomm.torch.attach(made.model, made.optimizer, comm, name="raising", **SMALL)

    def fail(_: Any) -> None:
        raise ZeroDivisionError

    said = ""
    for step in range(3):
        x, y = batch(step, comm.rank, "cuda")
        made.optimizer.zero_grad()
        loss = nn.functional.mse_loss(made.model(x), y)
        hook = made.model.first.weight.register_hook(fail) if (step, comm.rank) == (1, 1) else None
        try:
            loss.backward()
        except (ZeroDivisionError, CollectiveAborted) as error:
            said = type(error).__name__
            continue
        finally:
            if hook is not None:
                hook.remove()
        made.optimizer.step()
    held.detach()
    assert said == ("ZeroDivisionError" if comm.rank == 1 else "CollectiveAborted"), said
    rows = comm.all_gather(numbers(made.model), name="raising/rows")
    return float((rows - rows[0]).abs().max())


CASES: dict[str, Callable[[Any], float]] = {
    "plain": beside_ddp,
    "small buckets": lambda comm: beside_ddp(comm, **SMALL),
    "deferred": lambda comm: beside_ddp(comm, defer=True, **SMALL),
    "amp, clipped": lambda comm: beside_ddp(comm, {"amp": True, "clip": True}),
    "amp, deferred": lambda comm: beside_ddp(comm, {"amp": True}, defer=True),
    "accumulated": lambda comm: beside_ddp(comm, {"accumulate": True}),
    "used sometimes": lambda comm: beside_cpu(comm, {"partly": True}),
    "re-entrant checkpoint": lambda comm: beside_cpu(comm, {"how": True}),
    "checkpoint": lambda comm: beside_cpu(comm, {"how": False}, defer=True),
    "partly on the CPU": lambda comm: beside_cpu(comm, {"first": "cpu"}),
    "partly on the CPU, re-entrant checkpoint": lambda comm: beside_cpu(comm, {"first": "cpu", "how": True}),
    "adasum": lambda comm: beside_cpu(comm, algorithm="adasum"),
    "powersgd": lambda comm: beside_cpu(comm, compression="powersgd"),
    "topk": lambda comm: beside_cpu(comm, compression=Compression("topk", share=0.5)),
    "factors": lambda comm: beside_cpu(comm, compression="factors"),
    "sma": lambda comm: beside_cpu(comm, algorithm="sma"),
    "diloco": lambda comm: beside_cpu(comm, algorithm=Algorithm("diloco", every=2)),
    "adasgd": lambda comm: beside_cpu(comm, algorithm=Algorithm("adasgd", after=2)),
    "local-adaalter": lambda comm: beside_cpu(comm, algorithm=Algorithm("local-adaalter", every=2)),
    "sma, partly on the CPU": lambda comm: beside_cpu(comm, {"first": "cpu"}, algorithm="sma"),
    "pair-averaging": lambda comm: 0.0 * beside_cpu(comm, algorithm="pair-averaging"),  # no two runs are alike
    "monitor": monitored,
    "late gradients": late_gradients,
    "late gradients, deferred": lambda comm: late_gradients(comm, defer=True, bucket_nbytes=1 << 18),
    "no wait": no_wait,
    "no wait, deferred": lambda comm: no_wait(comm, defer=True),
    "no wait, monitored": lambda comm: no_wait(comm, monitor={"every": 1}, batch_size=ROWS),
    "same memory": same_memory,
    "void step": void_step,
    "raising pass": raising_pass,
}


def main(meeting: str) -> None:
    """Run all cases, and print each result at once."""
    with kfcomm.sync.init(timeout=WITHIN_S) as comm:
        torch.cuda.set_device(0)
        file = Path(meeting).absolute()
        dist.init_process_group(
            "gloo", init_method=f"file://{file}", rank=comm.rank, world_size=comm.size, timeout=timedelta(0, WITHIN_S)
        )
        for name, case in CASES.items():
            try:
                result: Any = case(comm)
            except Exception as error:  # noqa: BLE001  of any kind: the test shows it
                result = f"{type(error).__name__}: {error}"
            sys.stdout.write(f"found {json.dumps([comm.rank, name, result])}\n")
            sys.stdout.flush()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
