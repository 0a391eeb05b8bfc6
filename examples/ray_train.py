"""Ray Train over kfcomm, by one argument of its configuration.

::

    python examples/ray_train.py
"""

try:
    import ray
    import ray.train
    import torch
    import torch.distributed as dist
    from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
except ModuleNotFoundError as error:
    raise SystemExit(f'this example needs {error.name}: pip install "kfcomm[torch]" "ray[train]"') from None


def train() -> None:
    """Program of each worker."""
    torch.manual_seed(ray.train.get_context().get_world_rank())
    x = 2 * torch.rand(128, 2) - 1
    y = (x.square().sum(dim=1, keepdim=True) < 0.6).float()
    model = prepare_model(torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(model(x), y).backward()
        optimizer.step()
    right = ((model(x) > 0) == (y > 0)).float().mean()
    dist.all_reduce(right, op=dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        print(f"accuracy {right:.3f} of {dist.get_world_size()} ranks, backend {dist.get_backend()}")


def main() -> None:
    """Train on two workers."""
    ray.init(num_cpus=2, include_dashboard=False)
    TorchTrainer(
        train, torch_config=TorchConfig(backend="kfcomm"), scaling_config=ray.train.ScalingConfig(num_workers=2)
    ).fit()


if __name__ == "__main__":
    main()
