"""One of four ranks; two are killed: the second in the group that survived the first."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import kfcomm
import kfcomm.torch

rank = int(sys.argv[1])
dist.init_process_group("kfcomm", init_method=f"file://{os.getcwd()}/meeting", rank=rank, world_size=4)
sizes = []
for killed, living in ((1, {0, 2, 3}), (2, {0, 3})):
    dist.all_reduce(torch.ones(2))
    Path(f"{killed}-{rank}").touch()
    if rank == killed:
        # A rank may end its part of a call, and die, before the call has succeeded on the others.
        while not all(Path(f"{killed}-{other}").exists() for other in living):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(2))
    except kfcomm.PeerLost:
        kfcomm.torch.shrink()
    sizes.append(f"{dist.get_rank()} of {dist.get_world_size()}")
assert kfcomm.torch.communicator().epoch == 2
print(", ".join(sizes))
dist.destroy_process_group()
