"""Hugging Face Accelerate over kfcomm, on processors.

::

    torchrun --nproc-per-node 2 examples/accelerate_train.py

Accelerate makes a process group of Gloo or MPI on processors, unless there is one: the line before ``Accelerator``
makes it. All else is a program for Accelerate.
"""

try:
    import torch
    import torch.distributed as dist
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from torch.utils.data import DataLoader, TensorDataset
except ModuleNotFoundError as error:
    raise SystemExit(f'this example needs {error.name}: pip install "kfcomm[torch]" accelerate') from None

dist.init_process_group("kfcomm")
accelerator = Accelerator(cpu=True)

set_seed(0)
x = 2 * torch.rand(256, 2) - 1
y = (x.square().sum(dim=1, keepdim=True) < 0.6).float()
model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(40):
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.binary_cross_entropy_with_logits(model(inputs), targets))
        optimizer.step()

right = [accelerator.gather_for_metrics((model(inputs) > 0) == (targets > 0)) for inputs, targets in loader]
accelerator.print(f"accuracy {torch.cat(right).float().mean():.3f} of {accelerator.num_processes} ranks")
accelerator.print(f"backend {dist.get_backend()}")
accelerator.end_training()
