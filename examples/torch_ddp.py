"""DistributedDataParallel over kfcomm, by the name of the backend.

::

    torchrun --nproc-per-node 4 examples/torch_ddp.py
"""

try:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
except ModuleNotFoundError as error:
    raise SystemExit(f'this example needs {error.name}: pip install "kfcomm[torch]"') from None

dist.init_process_group("kfcomm")
torch.manual_seed(dist.get_rank())
x = 2 * torch.rand(128, 2) - 1
y = (x.square().sum(dim=1, keepdim=True) < 0.6).float()
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for _ in range(60):
    optimizer.zero_grad()
    torch.nn.functional.binary_cross_entropy_with_logits(model(x), y).backward()
    optimizer.step()
right = ((model(x) > 0) == (y > 0)).float().mean()
dist.all_reduce(right, op=dist.ReduceOp.AVG)
if dist.get_rank() == 0:
    print(f"accuracy {right:.3f} on {dist.get_world_size()} ranks")
dist.destroy_process_group()
