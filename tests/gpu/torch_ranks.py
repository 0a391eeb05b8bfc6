"""One rank of torch.distributed over kfcomm, whose ranks share a GPU: ``torch_ranks.py FILE RANK SIZE``."""

import sys

import torch
import torch.distributed as dist

meeting, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("kfcomm", init_method=f"file://{meeting}", rank=rank, world_size=size)
given = [torch.arange(4.0 * size, device="cuda") + one for one in range(size)]
x = given[rank].clone()
dist.all_reduce(x)
assert torch.equal(x, sum(given))
y = given[rank].clone()
dist.broadcast(y, size - 1)
assert torch.equal(y, given[-1])
each = [torch.empty_like(x) for _ in given]
dist.all_gather(each, given[rank])
assert all(map(torch.equal, each, given))
part = torch.empty(4, device="cuda")
dist.reduce_scatter_tensor(part, given[rank])
assert torch.equal(part, sum(given)[4 * rank :][:4])
swapped = torch.empty_like(x)
dist.all_to_all_single(swapped, given[rank])
assert torch.equal(swapped, torch.cat([one[4 * rank :][:4] for one in given]))
work = dist.all_reduce(y, async_op=True)
work.wait()
assert torch.equal(y, size * given[-1])
columns = torch.zeros(2, 3, device="cuda").t() + rank
dist.all_reduce(columns)
assert torch.equal(columns, torch.full((3, 2), float(sum(range(size))), device="cuda"))
print("right")
dist.destroy_process_group()
