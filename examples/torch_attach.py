"""Data-parallel training in torch: the plain loop of one process, and one line that attaches it to all ranks.

::

    kfcomm run -n 4 python examples/torch_attach.py

Gradients are averaged while the backward pass goes on; when it returns, every ``parameter.grad`` is the average.
"""

from __future__ import annotations

import sys

try:
    import torch
    from torch import nn
except ModuleNotFoundError as error:
    raise SystemExit(f'this example needs {error.name}: pip install "kfcomm[torch]"') from None

import kfcomm
import kfcomm.torch

STEPS = 60
SAMPLES_PER_RANK = 128


def main() -> bool:
    """Learn where points lie within a circle; returns whether all replicas are the same, and good."""
    torch.set_num_threads(1)  # every rank has one core at best
    with kfcomm.sync.init() as comm:
        torch.manual_seed(comm.rank)
        x = 2 * torch.rand(SAMPLES_PER_RANK, 2) - 1
        y = (x.square().sum(dim=1, keepdim=True) < 0.6).float()

        model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        kfcomm.torch.attach(model, optimizer, comm)

        for step in range(STEPS):
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
            loss.backward()
            optimizer.step()
            if step % 20 == 19 and comm.rank == 0:
                print(f"step {step + 1}: loss {loss.item():.3f}")

        right = comm.all_reduce(((model(x) > 0) == (y > 0)).float().mean(), name="accuracy", op="avg")
        weights = nn.utils.parameters_to_vector(model.parameters()).detach()
        same = comm.consensus(weights, name="replicas")
        steps = comm.statistics().steps[0]
        if comm.rank == 0:
            print(f"{steps.count} steps, {steps.nbytes} bytes of gradients")
            print(f"accuracy {right:.3f}; {'bit-identical' if same else 'DIFFERENT'} on {comm.size} ranks")
        return bool(same) and bool(right > 0.9)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
