"""Data-parallel training in torch on CPUs: every gradient leaves from a hook, during the backward pass.

::

    kfcomm run -n 4 python examples/torch_cpu.py

Tensors go in, tensors come out. The blocking interface has an I/O thread of its own: it moves the gradients of
the last layers while torch computes those of the first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

try:
    import torch
    from torch import nn
except ModuleNotFoundError as error:
    raise SystemExit(f'this example needs {error.name}: pip install "kfcomm[torch]"') from None

import kfcomm

STEPS = 60
SAMPLES_PER_RANK = 128


def average_gradients(comm: kfcomm.sync.Communicator, model: nn.Module) -> Callable[[], None]:
    """Send every gradient on its way as soon as it is there; the function returned waits for all of them."""
    under_way: list[kfcomm.sync.Handle[Any]] = []

    def hook(name: str) -> Callable[[torch.Tensor], None]:
        def ready(parameter: torch.Tensor) -> None:
            grad = parameter.grad
            under_way.append(comm.all_reduce_async(grad, name=f"grad/{name}", op="avg", out=grad))

        return ready

    def wait() -> None:
        for handle in under_way:
            handle.wait()
        under_way.clear()

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(hook(name))
    return wait


def main() -> bool:
    """Learn where points lie within a circle; returns whether all replicas are the same, and good."""
    torch.set_num_threads(1)  # every rank has one core at best
    with kfcomm.sync.init() as comm:
        torch.manual_seed(comm.rank)
        x = 2 * torch.rand(SAMPLES_PER_RANK, 2) - 1
        y = (x.square().sum(dim=1, keepdim=True) < 0.6).float()

        model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
        for name, parameter in model.named_parameters():
            comm.broadcast(parameter.data, root=0, name=f"initial/{name}", out=parameter.data)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        wait_for_gradients = average_gradients(comm, model)

        for step in range(STEPS):
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
            loss.backward()
            wait_for_gradients()
            optimizer.step()
            if step % 20 == 19 and comm.rank == 0:
                print(f"step {step + 1}: loss {loss.item():.3f}")

        right = comm.all_reduce(((model(x) > 0) == (y > 0)).float().mean(), name="accuracy", op="avg")
        weights = nn.utils.parameters_to_vector(model.parameters()).detach()
        same = comm.consensus(weights, name="replicas")
        if comm.rank == 0:
            print(f"accuracy {right:.3f}; {'bit-identical' if same else 'DIFFERENT'} on {comm.size} ranks")
        return bool(same) and bool(right > 0.9)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
