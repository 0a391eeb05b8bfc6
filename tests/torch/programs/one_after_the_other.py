"""One of four ranks; two are killed: the second in the group that survived the first."""

import os
import signal
import sys

import torch
import torch.distributed as dist

import kfcomm
import kfcomm.torch

rank = int(sys.argv[1])
dist.init_process_group("kfcomm", init_method=f"file://{os.getcwd()}/meeting", rank=rank, world_size=4)
sizes = []
for killed in (1, 2):
    dist.all_reduce(torch.ones(2))
    if rank == killed:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(2))
    except kfcomm.PeerLost:
        kfcomm.torch.shrink()
    sizes.append(f"{dist.get_rank()} of {dist.get_world_size()}")
assert kfcomm.torch.communicator().epoch == 2
print(", ".join(sizes))
dist.destroy_process_group()
