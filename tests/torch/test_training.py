"""Unmodified training code of torch: each against a single process on the same data."""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import kfcomm
from kfcomm.torch import communicator
from kfcomm.torch import ddp as ddp_of_kfcomm
from kfcomm.torch.bases import IS_GROUP
from kfcomm.torch.ddp import SWAP
from kfcomm.torch.kept_works import KEEPS_WORKS, KEPT
from kfcomm.torch.registration import backend_of
from tests.sync.worlds import driver_of, until
from tests.torch.fleet import Fleet
from tests.torch.models import Wide, alone, assert_close, data, mine, net, parallel, sgd, trained, wide


def ddp() -> list[Any]:
    model = parallel(net())
    found = trained(model, sgd(model), mine, way=2)
    assert_close(found, alone(way=2))
    static = parallel(net(), static_graph=True, gradient_as_bucket_view=True)
    assert_close(trained(static, sgd(static), mine, way=2), found)
    unused = parallel(net(), find_unused_parameters=True)
    assert_close(trained(unused, sgd(unused), mine, way=1), alone(way=1))
    return [one.tolist() for one in found]


def test_ddp(fleet: Fleet) -> None:
    """The same bits on all ranks, and in a rerun."""
    first = fleet.run(ddp)
    assert first[0] == first[1] == first[2]
    assert fleet.run(ddp) == first


def shared() -> list[Any]:
    comm = communicator()
    before = comm.statistics().symmetric_nbytes
    model = wide()
    found = trained(model, sgd(model), mine)
    gradients = sum(one.numel() * one.element_size() for one in found)
    assert comm.statistics().symmetric_nbytes - before > gradients / 2
    single = Wide()
    assert_close(found, trained(single, sgd(single), lambda whole: whole))
    viewed = wide(gradient_as_bucket_view=True, static_graph=True)
    assert_close(trained(viewed, sgd(viewed), mine), found)
    return [float(one.double().sum()) for one in found]


def test_buckets_in_shared_memory(fleet: Fleet) -> None:
    """The same bits on all ranks."""
    first, *others = fleet.run(shared)
    assert all(one == first for one in others)


def kept_arrays() -> None:
    """Arrays of gradients that a program has kept stay readable when the memory of their bucket is moved."""
    arrays: list[Any] = []
    model = wide(gradient_as_bucket_view=True)
    for one in model.parameters():
        one.register_post_accumulate_grad_hook(lambda parameter: arrays.append(parameter.grad.numpy()))
    trained(model, sgd(model), mine)
    gradients = [one.grad for one in model.parameters()]
    expected = [one.clone() for one in gradients]
    del model
    gc.collect()
    assert sum(float(one.sum()) for one in arrays) < float("inf")
    dist.barrier()
    assert all(map(torch.equal, gradients, expected))


def test_arrays_of_gradients_outlive_their_bucket(fleet: Fleet) -> None:
    fleet.run(kept_arrays)


def freed() -> tuple[int, int]:
    comm = communicator()
    before = comm.statistics().symmetric_nbytes
    model = wide()
    trained(model, sgd(model), mine)
    most = comm.statistics().symmetric_nbytes - before
    del model
    gc.collect()
    dist.barrier()  # results are in memory of one rank, until no rank has them any more
    return most, comm.statistics().symmetric_nbytes - before


@pytest.mark.skipif(not hasattr(torch.UntypedStorage, SWAP), reason="this torch cannot move the memory of a bucket")
def test_moved_buckets_are_freed_with_their_model(fleet: Fleet) -> None:
    for most, left in fleet.run(freed):
        assert left < most / 2


def without_collections() -> list[int]:
    """Symmetric memory in use after each step."""
    comm, model = communicator(), wide()
    most: list[int] = []
    gc.disable()
    try:
        for step in range(12):
            model.zero_grad()
            model(mine(data(step))).square().mean().backward()
            dist.barrier()
            most.append(comm.statistics().symmetric_nbytes)
    finally:
        gc.enable()
    return most


def test_results_of_buckets_are_freed_without_a_garbage_collection(fleet: Fleet) -> None:
    for used in fleet.run(without_collections):
        assert max(used[8:]) <= max(used[:8])


def copied() -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ddp_of_kfcomm, "SWAP", "missing")
        model = wide()
        return [float(one.double().sum()) for one in trained(model, sgd(model), mine)]


def test_buckets_are_copied_where_torch_cannot_move_them(fleet: Fleet) -> None:
    """The same bits as with moved ones."""
    assert fleet.run(copied) == fleet.run(shared)


def uneven() -> None:
    """Rank r has r + 1 batches; a rank without further batches gives zeros for the others' buckets."""
    model = wide()
    with model.join(divide_by_initial_world_size=True):
        for step in range(dist.get_rank() + 1):
            model.zero_grad()
            model(mine(data(step))).square().mean().backward()
    single = Wide()
    single(mine(data(dist.get_world_size() - 1))).square().mean().backward()
    if dist.get_rank() == dist.get_world_size() - 1:
        expected = [one.grad / dist.get_world_size() for one in single.parameters() if one.grad is not None]
        assert_close([one.grad for one in model.parameters()], expected)


def test_uneven_inputs_of_shared_buckets(fleet: Fleet) -> None:
    fleet.run(uneven)


def broken_wide() -> str:
    model = wide()
    for step in range(3):
        model(mine(data(step))).square().mean().backward()
    loss = model(mine(data(3))).square().mean()
    with pytest.raises(kfcomm.CollectiveMismatch) as caught:
        (dist.barrier if dist.get_rank() == 1 else loss.backward)()
    return str(caught.value)


def test_a_failure_of_shared_buckets(fleet: Fleet) -> None:
    for told in fleet.run(broken_wide):
        assert "not the same on all ranks" in told


def interrupted() -> None:
    """Ctrl-C ends a backward pass that waits for other ranks, which learn of it."""
    model = wide()
    loss = model(mine(data(0))).square().mean()
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    if rank:
        store.wait(["interrupted"])
        with pytest.raises(kfcomm.CollectiveAborted):
            loss.backward()
        store.set(f"told {rank}", "")
        return

    turns = driver_of(communicator()).turns

    def interrupt() -> None:
        until(lambda: turns.leader and turns.is_resting)  # the pass waits
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    thread.join()
    store.set("interrupted", "")
    store.wait(["told 1", "told 2"])


@pytest.mark.skipif(not KEEPS_WORKS, reason="torch before 2.7 waits in C++")
def test_an_interrupt_ends_a_backward_pass(fleet: Fleet) -> None:
    fleet.run(interrupted)


class Inner(nn.Module):
    """Each layer is a checkpoint, so that its gradients come in a pass within the pass."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = Wide()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.wide.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def within() -> None:
    model = DistributedDataParallel(Inner(), bucket_cap_mb=1.2, static_graph=True)
    whole = Wide()
    found = trained(model, sgd(model), lambda batch: mine(batch).requires_grad_())
    assert_close(found, trained(whole, sgd(whole), lambda batch: batch))


@pytest.mark.filterwarnings("ignore")
def test_passes_within_a_pass(fleet: Fleet) -> None:
    fleet.run(within)


def two_models() -> None:
    models, whole = [wide(), wide()], [Wide(), Wide()]
    for step in range(3):
        for part, pair in ((mine, models), (lambda batch: batch, whole)):
            x = part(data(step))
            sum(one(x).square().mean() for one in pair).backward()
    for one, other in zip(models, whole, strict=True):
        assert_close([each.grad for each in one.parameters()], [each.grad for each in other.parameters()])


def test_two_models_in_one_pass(fleet: Fleet) -> None:
    fleet.run(two_models)


def failed_pass() -> None:
    """A pass that fails by itself, with buckets under way: the group goes on, and so does the next model."""
    model, calls = wide(), backend_of(None)._calls
    model(mine(data(0))).square().mean().backward()  # from the next pass on there are several buckets
    loss, before = model(mine(data(1))).square().mean(), calls.number

    def fail(_: torch.Tensor) -> None:
        assert calls.number > before
        raise ValueError("of the program")

    hook = model.module.layers[0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="of the program"):
        loss.backward()
    hook.remove()
    after, whole = wide(), Wide()
    assert_close(trained(after, sgd(after), mine), trained(whole, sgd(whole), lambda batch: batch))


def test_a_pass_that_fails_by_itself(fleet: Fleet) -> None:
    fleet.run(failed_pass)


def accumulated() -> None:
    model, single = parallel(net()), net()
    whole = data(0)
    with model.no_sync():
        model(mine(whole), way=2).square().mean().backward()
    model(mine(whole), way=2).square().mean().backward()
    (2 * single(whole, way=2).square().mean()).backward()
    assert_close([model.module.last.weight.grad], [single.last.weight.grad])


def test_gradients_that_are_accumulated(fleet: Fleet) -> None:
    fleet.run(accumulated)


def hooked() -> None:
    plain = parallel(net())
    expected = trained(plain, sgd(plain), mine, way=2)
    half = parallel(net())
    # Before 2.14 torch has its bfloat16 hook for NCCL alone.
    half.register_comm_hook(None, default_hooks.fp16_compress_hook if IS_GROUP else default_hooks.bf16_compress_hook)
    found = trained(half, sgd(half), mine, way=2)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.1, atol=0.05)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    low_rank = parallel(net())
    low_rank.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    after = trained(low_rank, sgd(low_rank), mine, way=2)
    assert all(bool(torch.isfinite(one).all()) for one in after)
    same = [one.clone() for one in after]
    for one in same:
        dist.broadcast(one, 0)
    assert all(map(torch.equal, same, after))


@pytest.mark.filterwarnings("ignore")
def test_communication_hooks(fleet: Fleet) -> None:
    """Communication hooks of torch; PowerSGD waits for a collective in the callback of another."""
    fleet.run(hooked)


def broken() -> str:
    """A failure in a backward pass reaches the program, and does not end the process."""
    model = parallel(net())
    model(mine(data(0)), way=2).square().mean().backward()
    if dist.get_rank() == 1:
        with pytest.raises(kfcomm.CollectiveMismatch) as caught:
            dist.barrier()
    else:
        with pytest.raises(kfcomm.CollectiveMismatch) as caught:
            model(mine(data(1)), way=2).square().mean().backward()
    return str(caught.value)


def test_a_failure_in_a_backward_pass(fleet: Fleet) -> None:
    for told in fleet.run(broken):
        assert "not the same on all ranks" in told
        assert "barrier, at " in told


def zero() -> None:
    model = parallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    assert_close(trained(model, optimizer, mine, way=2), alone(way=2))


@pytest.mark.filterwarnings("ignore")
def test_zero(fleet: Fleet) -> None:
    fleet.run(zero)


def functionally() -> None:
    group = dist.group.WORLD
    x = torch.full((6,), float(dist.get_rank()))
    assert functional.all_reduce(x, "sum", group).tolist() == [3.0] * 6
    assert functional.all_gather_tensor(x[:1], 0, group).tolist() == [0.0, 1.0, 2.0]
    assert functional.reduce_scatter_tensor(torch.ones(6), "avg", 0, group).tolist() == [1.0] * 2
    assert functional.all_to_all_single(torch.arange(3.0), None, None, group).tolist() == [float(dist.get_rank())] * 3
    assert functional.broadcast(x, 2, group).tolist() == [2.0] * 6
    summed = torch.compile(lambda one: functional.all_reduce(one * 2, "sum", group) + 1, backend="aot_eager")
    assert summed(x).tolist() == [7.0] * 6
    for _ in range(2):  # the second one meets what the first has left
        model = DistributedDataParallel(net())
        compiled = torch.compile(model, backend="aot_eager")
        assert_close(trained(compiled, sgd(model), mine, way=2), alone(way=2))
    assert not [work for work in KEPT if work.is_completed()]
    codes = [one() for one in torch._dynamo.convert_frame.input_codes.seen]
    ours = str(Path(kfcomm.__file__).parent)
    assert [one for one in codes if one is not None and one.co_filename.startswith(ours)] == []


@pytest.mark.filterwarnings("ignore")
def test_functional_collectives_and_compiled_programs(fleet: Fleet) -> None:
    fleet.run(functionally)
