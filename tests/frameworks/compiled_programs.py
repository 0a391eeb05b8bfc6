"""Program of `test_attach_compiled`: attached models beneath ``torch.compile``, on the ranks of ``kfcomm run``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import kfcomm
import kfcomm.torch
from kfcomm.adapt import GuardSteps
from tests.frameworks.ranks import filled

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "deferred": {"defer": True},
    "guarded": {"policies": [GuardSteps()]},
    "factors": {"compression": "factors"},
    "sma": {"algorithm": "sma"},
    "measured": {"monitor": {"every": 1}, "batch_size": 32},
}


def frames_of_ours() -> list[str]:
    """Functions of kfcomm that the compiler has looked at."""
    codes = [one() for one in torch._dynamo.convert_frame.input_codes.seen]
    ours = str(Path(kfcomm.__file__).parent)
    return [one.co_qualname for one in codes if one is not None and one.co_filename.startswith(ours)]


def train(comm: Any, options: dict[str, Any], compiled: str = "", backend: str = "eager", from_step: int = 0) -> Any:
    """The weights after six steps; from ``from_step`` on a part of a step is compiled."""
    torch._dynamo.reset()
    # inductor compiles C++ for minutes where there is a norm
    norms = [torch.nn.BatchNorm1d(32)] if backend == "eager" else []
    model = filled(torch.nn.Sequential(torch.nn.Linear(8, 32), *norms, torch.nn.Tanh(), torch.nn.Linear(32, 1)), seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    attached = kfcomm.torch.attach(model, optimizer, comm, **options)
    data = torch.Generator().manual_seed(comm.rank)

    def loss_of(x: Any) -> Any:
        return (model(x) - x.sum(dim=1, keepdim=True)).square().mean()

    def step(x: Any) -> None:
        optimizer.zero_grad()
        parts["loss"](x).backward()
        parts["update"]()

    parts: dict[str, Any] = {"loss": loss_of, "update": optimizer.step, "step": step}
    for number in range(6):
        if compiled and number == from_step:
            parts[compiled] = torch.compile(parts[compiled], backend=backend)
        parts["step"](torch.randn(16, 8, generator=data))
    attached.wait()
    attached.detach()
    assert not compiled or torch._dynamo.convert_frame.input_codes.seen
    assert frames_of_ours() == []
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def by_dynamo(comm: Any) -> None:
    """All options with a whole step compiled; each part of one; a model that is compiled after some steps."""
    for options in OPTIONS.values():
        torch.testing.assert_close(train(comm, options, "step"), train(comm, options))
    wanted = train(comm, {})
    for part in ("loss", "update"):
        torch.testing.assert_close(train(comm, {"defer": True}, part), wanted)
    torch.testing.assert_close(train(comm, {"defer": True}, "loss", from_step=3), wanted)


def by_inductor(comm: Any) -> None:
    """Two models, one after the other."""
    wanted = train(comm, {}, backend="inductor")
    for name in ("first", "second"):
        torch.testing.assert_close(train(comm, {"name": name}, "loss", "inductor"), wanted)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with kfcomm.sync.init() as joined:
        {"dynamo": by_dynamo, "inductor": by_inductor}[sys.argv[1]](joined)
        sys.stdout.write(f"the same on rank {joined.rank}\n")
