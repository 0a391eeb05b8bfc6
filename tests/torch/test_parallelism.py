"""Programs that divide a model in other ways: tensors, sequences, stages, checkpoints, and a small GPT."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tests.torch.fleet import Fleet
from tests.torch.models import assert_close

WIDTH, LENGTH = 12, 6
"""Both divide by the three ranks of a fleet."""


class Block(nn.Module):
    """One layer of a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.before, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(self.before(x)).chunk(3, -1)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Gpt(nn.Module):
    """Two layers, with embeddings whose weights are also those of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(17, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.ModuleList([Block(), Block()]), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 17, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Any) -> Any:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Mlp(nn.Module):
    """The half of a layer that tensor parallelism divides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return self.down(functional.gelu(self.up(self.norm(x))))


def seeded(make: type[nn.Module]) -> Any:
    torch.manual_seed(3)
    return make()


def texts(rank: int, step: int) -> Any:
    return torch.randint(17, (4, LENGTH), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: Any, tokens: Any) -> Any:
    return functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def parameters(model: Any) -> list[Any]:
    return [whole(one.detach()) for one in model.parameters()]


def gpt() -> None:
    model, alone = DistributedDataParallel(seeded(Gpt)), seeded(Gpt)
    size, rank = dist.get_world_size(), dist.get_rank()
    for one in (model, alone):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            mine = [rank] if one is model else range(size)
            torch.stack([loss_of(one, texts(other, step)) for other in mine]).mean().backward()
            nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            optimizer.step()
    assert_close(parameters(model), parameters(alone))


def test_gpt(fleet: Fleet) -> None:
    fleet.run(gpt)


def tensors(in_sequence: bool) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, alone = seeded(Mlp), seeded(Mlp)
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if in_sequence:
        plan = {
            "norm": SequenceParallel(),
            "up": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(model, mesh, {"up": ColwiseParallel()})
    parallelize_module(model, mesh, plan)
    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    for one in (model, alone):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            given: Any = x
            if in_sequence and one is model:
                part = LENGTH // dist.get_world_size()
                given = x[:, dist.get_rank() * part : (dist.get_rank() + 1) * part]
            made = one(given)
            if in_sequence and one is model:
                made = DTensor.from_local(made, mesh, [Shard(1)]) if not isinstance(made, DTensor) else made
            (whole(made) ** 2).sum().backward()
            optimizer.step()
    assert_close(parameters(model), parameters(alone))


@pytest.mark.parametrize("in_sequence", [False, True])
def test_tensor_and_sequence_parallelism(in_sequence: bool, fleet: Fleet) -> None:
    fleet.run(tensors, in_sequence)


def stages(schedule: str) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(size)]
    alone = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(size)))
    alone.load_state_dict(nn.Sequential(*layers).state_dict())
    x, y = (torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"), input_args=(x[:2],))
    makes = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
    # torch 2.5 adds up the gradients of parts of a batch; later ones take their mean.
    parts = 1 if "scale_grads" in signature(ScheduleGPipe).parameters else 4
    pipeline = makes[schedule](stage, 4, loss_fn=lambda made, wanted: functional.mse_loss(made, wanted) / parts)
    optimizer = torch.optim.SGD(layers[rank].parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        if rank == 0:
            pipeline.step(x)
        elif rank == size - 1:
            losses: list[Any] = []
            pipeline.step(target=y, losses=losses)
            assert len(losses) == 4
        else:
            pipeline.step()
        optimizer.step()
    whole_optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
    for _ in range(3):
        whole_optimizer.zero_grad()
        functional.mse_loss(alone(x), y).backward()
        whole_optimizer.step()
    assert_close(parameters(layers[rank]), parameters(alone[rank]))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_pipelines(schedule: str, fleet: Fleet) -> None:
    fleet.run(stages, schedule)


def saved(folder: str) -> None:
    from torch.distributed.fsdp import fully_shard  # not in torch 2.5

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = seeded(Gpt)
    fully_shard(model, mesh=mesh)
    loss_of(model, texts(0, 0)).backward()
    before = parameters(model)
    checkpoint.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
    state = {"model": get_model_state_dict(model)}
    checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    assert_close(parameters(model), before)


@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 needs torch 2.7 on CPUs")
def test_checkpoints(fleet: Fleet, tmp_path: Path) -> None:
    fleet.run(saved, str(tmp_path))
