"""One of three ranks that train; one is killed, and the others go on: ``survivors.py RANK LOST torch|kfcomm``."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import kfcomm
import kfcomm.torch

rank, lost, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


def summed(group=None):
    x = torch.full((2,), dist.get_rank(group) + 1.0)
    dist.all_reduce(x, group=group)
    return float(x[0])


def made():
    torch.manual_seed(0)
    return DistributedDataParallel(torch.nn.Linear(3, 1))


def trained(model):
    model(torch.full((2, 3), dist.get_rank() + 1.0)).sum().backward()
    return bool((model.module.weight.grad == 2.0 * (dist.get_world_size() + 1) / 2).all())


dist.init_process_group("kfcomm", init_method=f"file://{os.getcwd()}/meeting", rank=rank, world_size=3)
model = made()
assert trained(model)
Path(f"trained-{rank}").touch()
if rank == lost:
    # A rank may end its part of a call, and die, before the call has succeeded on the others.
    while not all(Path(f"trained-{other}").exists() for other in range(3)):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
with pytest.raises(kfcomm.PeerLost) as caught:  # in a backward pass, or a collective that the program calls
    trained(model) if how == "torch" else summed()
assert caught.value.rank == lost
assert isinstance(caught.value, dist.DistBackendError)
if how == "torch":
    dist.shrink_group([lost], shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
else:
    kfcomm.torch.shrink(timeout=60)
where = f"rank {dist.get_rank()} of {dist.get_world_size()}"
print(f"{where}: {summed()}, pair {summed(dist.new_group([0, 1]))}, model {trained(made())}")
dist.destroy_process_group()
