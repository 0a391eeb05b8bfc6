"""Models and tensors that torch shards: each against a single process on the same data."""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not hasattr(torch.cpu.Stream, "record_event"):
    pytest.skip("FSDP2 needs torch 2.7 on CPUs", allow_module_level=True)

import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp_collectives
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from kfcomm.torch import communicator
from kfcomm.torch.tensors import read
from kfcomm.transports.shm.heap import NOWHERE
from tests.torch.fleet import Fleet
from tests.torch.models import Wide, alone, assert_close, mine, net, sgd, trained


def sharded() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = net()
    for layer in (model.first, model.last, model.other):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    found = trained(model, sgd(model), mine, way=2)
    assert_close([one.full_tensor() for one in found], alone(way=2))


def test_fsdp(fleet: Fleet) -> None:
    fleet.run(sharded)


def sharded_wide(memory: str) -> list[Any]:
    """The parameters after some steps, with long shards, and buffers of FSDP2 in this memory."""
    model = Wide()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in [*model.layers[::2], model]:
        fully_shard(layer, mesh=mesh)
        if memory == "torch":
            # Of classes that the backend does not know.
            layer.set_custom_all_gather(type("Gather", (fsdp_collectives.DefaultAllGather,), {})())
            layer.set_custom_reduce_scatter(type("Scatter", (fsdp_collectives.DefaultReduceScatter,), {})())
        elif memory == "asked":
            layer.set_allocate_memory_from_process_group_for_comm(True)
    trained(model, sgd(model), mine)
    groups = [layer._get_fsdp_state()._fsdp_param_group for layer in model.layers[::2]]
    for caller in [one for group in groups for one in (group._all_gather_comm, group._reduce_scatter_comm)]:
        tensor = caller.allocate((1 << 19,), dtype=torch.float32, device=torch.device("cpu"))
        heaps = communicator()._session.network.heaps()
        assert (heaps.place_of(read(tensor)) == NOWHERE) == (memory == "torch")
        small = caller.allocate((6,), dtype=torch.int64, device=torch.device("cpu"))
        assert heaps.place_of(read(small)) == NOWHERE
    return [one.full_tensor() for one in model.parameters()]


def sharded_in_place() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kfcomm.strategies.base.DIRECT_NBYTES", 1 << 14)
        found = {memory: sharded_wide(memory) for memory in ("torch", "found", "asked")}
    for memory in ("found", "asked"):
        assert all(torch.equal(one, other) for one, other in zip(found[memory], found["torch"], strict=True))
    whole = Wide()
    assert_close(found["torch"], trained(whole, sgd(whole), lambda batch: batch))


@pytest.mark.skipif(not hasattr(FSDPModule, "set_allocate_memory_from_process_group_for_comm"), reason="an older torch")
def test_fsdp_in_memory_that_peers_read(fleet: Fleet) -> None:
    """The same bits wherever its buffers are."""
    fleet.run(sharded_in_place)


def sharded_flat() -> None:
    """Its first kind frees what it has gathered by resizing it."""
    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True)
    trained(model, sgd(model), mine, way=2)
    with FullyShardedDataParallel.summon_full_params(model):
        assert_close([one.detach() for one in model.parameters()], alone(way=2))


@pytest.mark.filterwarnings("ignore")
def test_flat_fsdp(fleet: Fleet) -> None:
    fleet.run(sharded_flat)


def sharded_rows() -> list[Any]:
    """Torch gathers them where a device of the group is."""
    placed = ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(dist.get_world_size())])
    rows = sharded_tensor.full(placed, (6, 2), float(dist.get_world_size()))
    whole = torch.zeros(6, 2) if dist.get_rank() == 0 else None
    rows.gather(out=whole)
    return [] if whole is None else whole.unique().tolist()


@pytest.mark.filterwarnings("ignore")
def test_sharded_tensors(fleet: Fleet) -> None:
    assert fleet.run(sharded_rows) == [[3.0], [], []]


def distributed_tensors() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(36.0).reshape(6, 6)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    assert isinstance(rows, DTensor)
    columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.full_tensor(), whole)
    assert torch.equal((rows @ columns.redistribute(mesh, [Replicate()])).full_tensor(), whole @ whole)
    assert float(rows.sum().full_tensor()) == float(whole.sum())


def test_distributed_tensors(fleet: Fleet) -> None:
    fleet.run(distributed_tensors)
