"""Lightning over kfcomm, by one argument of its strategy.

::

    python examples/lightning_train.py

Lightning starts the second process itself.
"""

try:
    import lightning
    import torch
    import torch.distributed as dist
    from lightning.pytorch.strategies import DDPStrategy
    from torch.utils.data import DataLoader, TensorDataset
except ModuleNotFoundError as error:
    raise SystemExit(f'this example needs {error.name}: pip install "kfcomm[torch]" lightning') from None


class Disc(lightning.LightningModule):
    """Tells points in a disc from those around it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """The loss of a batch."""
        x, y = batch
        return torch.nn.functional.binary_cross_entropy_with_logits(self.net(x), y)

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        """The accuracy of a batch."""
        x, y = batch
        self.log("accuracy", ((self.net(x) > 0) == (y > 0)).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """See Lightning."""
        return torch.optim.Adam(self.parameters(), lr=0.05)


def main() -> None:
    """Train on two processes."""
    lightning.seed_everything(0, verbose=False)
    x = 2 * torch.rand(256, 2) - 1
    data = TensorDataset(x, (x.square().sum(dim=1, keepdim=True) < 0.6).float())
    trainer = lightning.Trainer(
        strategy=DDPStrategy(process_group_backend="kfcomm"), accelerator="cpu", devices=2, max_epochs=40, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
    )  # fmt: skip
    model = Disc()
    trainer.fit(model, DataLoader(data, batch_size=64, shuffle=True))
    (found,) = trainer.validate(model, DataLoader(data, batch_size=64), verbose=False)
    if trainer.is_global_zero:
        print(f"accuracy {found['accuracy']:.3f} of {trainer.world_size} ranks")
        print(f"backend {dist.get_backend()}")
    trainer.strategy.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
