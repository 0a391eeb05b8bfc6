"""Every collective of torch.distributed, against what it has to give; on three ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import kfcomm.torch
from kfcomm.torch import tensors
from tests.torch.fleet import Fleet

DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "complex64")
OPS = {
    "SUM": lambda parts: sum(parts[1:], parts[0]),
    "PRODUCT": lambda parts: parts[0] * parts[1] * parts[2],
    "MIN": lambda parts: torch.stack(parts).amin(0),
    "MAX": lambda parts: torch.stack(parts).amax(0),
    "BAND": lambda parts: parts[0] & parts[1] & parts[2],
    "BOR": lambda parts: parts[0] | parts[1] | parts[2],
    "BXOR": lambda parts: parts[0] ^ parts[1] ^ parts[2],
}


def part(rank: int, dtype: str = "float32", count: int = 6) -> torch.Tensor:
    """Contribution of a rank: small integers, exact in every dtype."""
    return (torch.arange(count) % 5 + rank + 1).to(getattr(torch, dtype))


def parts(dtype: str = "float32", count: int = 6) -> list[torch.Tensor]:
    return [part(rank, dtype, count) for rank in range(dist.get_world_size())]


def reduced(op: str, dtype: str) -> None:
    x = part(dist.get_rank(), dtype)
    dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
    assert torch.equal(x, OPS[op](parts(dtype))), x
    y = part(dist.get_rank(), dtype)
    work = dist.reduce(y, dst=1, op=getattr(dist.ReduceOp, op), async_op=True)
    assert work.wait()
    assert dist.get_rank() != 1 or torch.equal(y, x)
    z = torch.zeros(2, dtype=y.dtype)
    dist.reduce_scatter_tensor(z, part(dist.get_rank(), dtype), op=getattr(dist.ReduceOp, op))
    assert torch.equal(z, x[2 * dist.get_rank() :][:2])


def each_reduced() -> None:
    for dtype in DTYPES:
        reduced("SUM", dtype)
        if dtype != "complex64":  # which torch itself refuses
            reduced("PRODUCT", dtype)
    for dtype in ("float32", "bfloat16", "int64"):
        reduced("MIN", dtype)
        reduced("MAX", dtype)
    for op in ("BAND", "BOR", "BXOR"):
        reduced(op, "int32")
        reduced(op, "uint8")


def test_every_op_of_every_type(fleet: Fleet) -> None:
    fleet.run(each_reduced)


def bools() -> None:
    rank = dist.get_rank()
    for op, expected in (
        ("SUM", [True, True]),
        ("MAX", [True, True]),
        ("PRODUCT", [False, True]),
        ("MIN", [False, True]),
    ):
        x = torch.tensor([rank == 1, True])
        dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
        assert x.tolist() == expected, op


def test_bools(fleet: Fleet) -> None:
    fleet.run(bools)


def scaled() -> None:
    rank = dist.get_rank()
    x = part(rank)
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    assert torch.equal(x, sum(parts()) / 3)
    for whole in (torch.tensor([rank, -rank]), torch.zeros(2, 2, dtype=torch.int32).t() - rank):
        dist.all_reduce(whole, op=dist.ReduceOp.AVG)
        assert whole.flatten()[-1] == -1
        later = torch.tensor([rank + 1])
        assert dist.all_reduce(later, op=dist.ReduceOp.AVG, async_op=True).wait()
        assert later.tolist() == [2]
    y = part(rank)
    dist.all_reduce(y, op=dist._make_nccl_premul_sum(0.5))
    assert torch.equal(y, sum(parts()) / 2)
    z = torch.zeros(2)
    dist.reduce_scatter_tensor(z, part(rank), op=dist._make_nccl_premul_sum(2.0))
    assert torch.equal(z, 2 * sum(parts())[2 * rank :][:2])


def test_averages_and_scaled_sums(fleet: Fleet) -> None:
    fleet.run(scaled)


def laid_out() -> None:
    """Tensors that are not contiguous, or require gradients, or differ in shape with the same number of elements."""
    rank = dist.get_rank()
    x = torch.zeros(3, 2).t()
    x += rank + 1
    dist.all_reduce(x)
    assert x.tolist() == [[6.0] * 3] * 2
    p = torch.nn.Parameter(torch.full((2, 3), float(rank)))
    with torch.no_grad():
        dist.broadcast(p, 2)
    assert p.tolist() == [[2.0] * 3] * 2
    unlike = torch.full((6,) if rank else (2, 3), 1.0)
    dist.all_reduce(unlike)
    assert float(unlike.sum()) == 18.0
    number = torch.tensor(float(rank))
    dist.all_reduce(number)
    assert float(number) == 3.0
    nothing = torch.zeros(0)
    dist.all_reduce(nothing)
    freed = torch.ones(6)
    dist.all_reduce(freed)
    freed.resize_(0)  # as Tensor.numpy() would forbid
    with pytest.raises(kfcomm.ConfigError, match="without memory"):
        tensors.read(torch._efficientzerotensor(6))


def test_layouts(fleet: Fleet) -> None:
    fleet.run(laid_out)


def moved(dtype: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = part(rank, dtype)
    x = mine.clone() if rank == 1 else torch.zeros_like(mine)
    dist.broadcast(x, 1)
    assert torch.equal(x, part(1, dtype))
    each = [torch.zeros_like(mine) for _ in range(size)]
    dist.all_gather(each, mine)
    assert all(map(torch.equal, each, parts(dtype)))
    whole = torch.zeros(size * 6, dtype=mine.dtype)
    dist.all_gather_into_tensor(whole, mine)
    assert torch.equal(whole, torch.cat(parts(dtype)))
    got = [torch.zeros_like(mine) for _ in range(size)] if rank == 2 else None
    dist.gather(mine, got, dst=2)
    assert got is None or all(map(torch.equal, got, parts(dtype)))
    scattered = torch.zeros_like(mine)
    dist.scatter(scattered, parts(dtype) if rank == 0 else None, src=0)
    assert torch.equal(scattered, mine)
    swapped = torch.zeros_like(mine)
    dist.all_to_all_single(swapped, mine)
    assert torch.equal(swapped, torch.cat([one[2 * rank :][:2] for one in parts(dtype)]))


def each_moved() -> None:
    for dtype in (*DTYPES, "bool", "complex128"):
        moved(dtype)
    # types that kfcomm cannot add are moved all the same
    x = torch.full((4,), 1.5 if dist.get_rank() == 0 else 0.0).to(torch.float8_e4m3fn)
    dist.broadcast(x, 0)
    assert x.float().tolist() == [1.5] * 4


def test_every_move_of_every_type(fleet: Fleet) -> None:
    fleet.run(each_moved)


def uneven() -> None:
    """Rank r gives r + 1 rows to each: all_to_all with sizes of its own on every rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    given = torch.full((size * (rank + 1), 2), float(rank))
    got = torch.zeros(sum(range(1, size + 1)), 2)
    dist.all_to_all_single(got, given, [1, 2, 3], [rank + 1] * size)
    assert got[:, 0].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    outs = [torch.zeros(other + 1) for other in range(size)]
    dist.all_to_all(outs, [torch.full((rank + 1,), float(10 * rank + other)) for other in range(size)])
    assert [one.tolist() for one in outs] == [[float(10 * r + rank)] * (r + 1) for r in range(size)]
    outs = torch.zeros(2)
    dist.reduce_scatter(outs, [torch.full((2,), float(rank + other)) for other in range(size)])
    assert outs.tolist() == [float(3 + 3 * rank)] * 2


def test_lists(fleet: Fleet) -> None:
    fleet.run(uneven)


def coalesced() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    xs = [torch.full((3,), float(rank)), torch.full((5,), 1.0)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    assert [x[0].item() for x in xs] == [3.0, 3.0]
    outs = [torch.zeros(size * 2), torch.zeros(size)]
    with dist._coalescing_manager():
        for out, x in zip(outs, (torch.full((2,), float(rank)), torch.full((1,), float(rank + 10))), strict=True):
            dist.all_gather_into_tensor(out, x)
    assert [out.tolist() for out in outs] == [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0], [10.0, 11.0, 12.0]]
    sums = [torch.zeros(1), torch.zeros(2)]
    with dist._coalescing_manager():
        for out in sums:
            dist.reduce_scatter_tensor(out, torch.arange(out.numel() * size, dtype=torch.float32))
    assert [one.tolist() for one in sums] == [[3.0 * rank], [6.0 * rank, 6.0 * rank + 3.0]]
    lists = [[torch.zeros(2, 2), torch.zeros(3)] for _ in range(size)]
    dist.all_gather_coalesced(lists, [torch.full((2, 2), float(rank)), torch.full((3,), float(-rank))])
    assert [one.flatten()[0].item() for one in lists[2]] == [2.0, -2.0]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_coalesced(fleet: Fleet) -> None:
    fleet.run(coalesced)


def sparse() -> None:
    rank = dist.get_rank()
    x = torch.sparse_coo_tensor([[rank, 3]], [float(rank + 1), 1.0], (5,))
    dist.all_reduce(x)
    assert x.to_dense().tolist() == [1.0, 2.0, 3.0, 3.0, 0.0]
    rows = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.long), torch.zeros(0, 2), (4, 2))
    if rank == 1:
        rows = torch.sparse_coo_tensor([[2]], [[1.0, 2.0]], (4, 2))
    work = dist.all_reduce(rows, async_op=True)
    work.wait()
    assert rows.to_dense()[2].tolist() == [1.0, 2.0]


def test_sparse(fleet: Fleet) -> None:
    fleet.run(sparse)


def objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    each: list[Any] = [None] * size
    dist.all_gather_object(each, {"rank": rank, "text": "x" * rank})
    assert [one["rank"] for one in each] == [0, 1, 2]
    shared = [("a", 1), None] if rank == 0 else [None, None]
    dist.broadcast_object_list(shared, 0)
    assert shared == [("a", 1), None]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [10, 20, 30] if rank == 1 else None, src=1)
    assert mine == [10 * (rank + 1)]
    got: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank, got)
    assert got in (None, [0, 1, 2])


def test_objects(fleet: Fleet) -> None:
    fleet.run(objects)


def messages() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.arange(5, dtype=torch.float32) + rank
    if rank == 0:
        seen = set()
        for _ in range(size - 1):
            y = torch.zeros(5)
            source = dist.recv(y)
            assert y[0].item() == source
            seen.add(source)
        assert seen == {1, 2}
    else:
        dist.send(x, 0)
    to, source = (rank + 1) % size, (rank - 1) % size
    large, got = torch.full((100_000,), float(rank)), torch.zeros(100_000)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, large, to, tag=3), dist.P2POp(dist.irecv, got, source, tag=3)]
    )
    for work in works:
        work.wait()
        assert work.is_completed()
    assert got[7].item() == source
    dist.send_object_list(["hello", rank], to) if rank == 0 else None
    if rank == 1:
        found: list[Any] = [None, None]
        assert dist.recv_object_list(found, 0) == 0
        assert found == ["hello", 0]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_messages(fleet: Fleet) -> None:
    fleet.run(messages)


def works() -> None:
    x = torch.ones(4)
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future()
    assert future.wait()[0] is not None
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert x.tolist() == [3.0] * 4
    doubled = dist.all_reduce(x, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    assert doubled.wait().tolist() == [18.0] * 4
    # a callback may wait for another collective, as communication hooks do
    again = (
        dist.all_reduce(x, async_op=True)
        .get_future()
        .then(lambda done: dist.all_reduce(done.value()[0], async_op=True).get_future().wait())
    )
    assert again.wait()[0].tolist() == [81.0] * 4
    many = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(100)]
    assert all(one.wait() for one in many)


def test_works(fleet: Fleet) -> None:
    fleet.run(works)


def groups() -> None:
    rank = dist.get_rank()
    first, last = dist.new_group([0, 1]), dist.new_group([1, 2])
    for group, members in ((first, (0, 1)), (last, (1, 2))):
        if rank in members:
            x = torch.full((2,), float(rank))
            dist.all_reduce(x, group=group)
            assert x.tolist() == [float(sum(members))] * 2
            assert kfcomm.torch.communicator(group).size == 2
    dist.destroy_process_group(first)
    alone = dist.new_group([rank], use_local_synchronization=True)
    dist.barrier(alone)
    dist.barrier()
    whole = kfcomm.torch.communicator()
    assert (whole.rank, whole.size) == (rank, 3)


def test_groups(fleet: Fleet) -> None:
    fleet.run(groups)


def names() -> None:
    rank = dist.get_rank()
    x, y = torch.ones(3), torch.full((3,), 2.0)
    order = [("grad/0", x), ("grad/1", y)]
    pending = []
    for name, tensor in order if rank else order[::-1]:
        with kfcomm.torch.named(name):
            pending.append(dist.all_reduce(tensor, async_op=True))
    for work in pending:
        work.wait()
    assert (x.tolist(), y.tolist()) == ([3.0] * 3, [6.0] * 3)
    assert {"grad/0", "grad/1"} <= {key.name for key in kfcomm.torch.communicator().statistics().keys}


def test_names_match_in_any_order(fleet: Fleet) -> None:
    fleet.run(names)


def repeated() -> list[int]:
    """The world is closed and made again."""
    x = torch.ones(2)
    dist.all_reduce(x)
    return [int(x[0])]


def test_groups_are_made_again(fleet: Fleet) -> None:
    for _ in range(3):
        assert fleet.run(repeated) == [[3]] * 3
