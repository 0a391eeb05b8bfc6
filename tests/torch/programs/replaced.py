"""One of three ranks (0, 1, 2), or the process (3) that takes the place of rank 1, which is killed."""

import os
import pathlib
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import kfcomm

number = int(sys.argv[1])
rank = 1 if number == 3 else number
handles = [pathlib.Path(f"handle-{one}") for one in (0, 3, 2)]
if number == 3:
    dist.init_process_group("kfcomm", store=dist.HashStore(), rank=1, world_size=3, enable_reconfigure=True)
    with pytest.raises(kfcomm.ConfigError, match=r"call dist\._reconfigure first"):
        dist.all_reduce(torch.ones(2))
else:
    dist.init_process_group("kfcomm", init_method=f"file://{os.getcwd()}/meeting", rank=rank, world_size=3)
    dist.all_reduce(torch.ones(2))
    pathlib.Path(f"met-{number}").touch()
    if number == 1:
        # A rank may end its part of a call, and die, before the call has succeeded on the others.
        while not all(pathlib.Path(f"met-{other}").exists() for other in (0, 2)):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(kfcomm.PeerLost):
        dist.all_reduce(torch.ones(2))
draft = pathlib.Path(f"draft-{number}")
draft.write_text(c10d._get_reconfigure_handle())
draft.rename(f"handle-{number}")
while not all(one.exists() for one in handles):
    time.sleep(0.01)
c10d._reconfigure(7, [one.read_text() for one in handles]).wait()
x = torch.full((2,), dist.get_rank() + 1.0)
dist.all_reduce(x)
print(f"{dist.get_rank()} of {dist.get_world_size()}: {float(x[0])}")
dist.destroy_process_group()
