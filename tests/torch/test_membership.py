"""Groups of torch whose ranks change: split, shrunk with and without deaths, and met anew."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import kfcomm
import kfcomm.torch
from kfcomm.torch.bases import IS_GROUP
from kfcomm.torch.meeting import ProcessHandle, in_order
from tests.torch.fleet import Fleet
from tests.torch.test_launching import environment

NEEDS_SHRINK = pytest.mark.skipif(not hasattr(dist, "shrink_group"), reason="this torch has no shrink_group")
NEEDS_BACKENDS = pytest.mark.skipif(IS_GROUP, reason="torch before 2.14 splits groups of GPUs alone")
NEEDS_RECONFIGURE = pytest.mark.skipif(
    not hasattr(dist.distributed_c10d, "_reconfigure"), reason="torch has no _reconfigure before 2.15"
)
PROGRAMS = Path(__file__).with_name("programs")


def summed(group: Any = None) -> float:
    x = torch.full((2,), dist.get_rank(group) + 1.0)
    dist.all_reduce(x, group=group)
    return float(x[0])


# ---------------------------------------------------------------- split


def split() -> tuple[float, int]:
    """By torch's own split_group; the timeout of a part is its own."""
    rank = dist.get_rank()
    part = dist.split_group(split_ranks=[[2, 0], [1]], timeout=timedelta(seconds=7))
    assert part.size() == (1 if rank == 1 else 2)
    assert part.rank() == (1 if rank == 0 else 0)
    total = summed(part)
    again = dist.split_group(part, [[0]] if rank == 1 else [[1, 0]])
    assert summed(again) == total
    comm = kfcomm.torch.communicator(part)
    dist.barrier()
    return total, comm.size


@NEEDS_BACKENDS
def test_split(fleet: Fleet) -> None:
    assert fleet.run(split) == [(3.0, 2), (1.0, 1), (3.0, 2)]


def split_without() -> int:
    part = dist.split_group(split_ranks=[[0, 1]])
    if dist.get_rank() == 2:
        assert part is dist.GroupMember.NON_GROUP_MEMBER
        return 0
    return int(summed(part))


@NEEDS_BACKENDS
def test_ranks_in_no_part(fleet: Fleet) -> None:
    assert fleet.run(split_without) == [3, 3, 0]


# ---------------------------------------------------------------- shrink


def shrunk() -> tuple[int, int, float]:
    """Rank 1 lives, and takes no further part; groups of before are gone, new ones are made of the smaller group."""
    rank = dist.get_rank()
    dist.new_group([0, 2])
    if rank == 1:
        return -1, 0, 0.0
    assert dist.shrink_group([1]) is dist.group.WORLD
    pair = dist.new_group([0, 1])
    assert summed(pair) == 3.0
    return dist.get_rank(), dist.get_world_size(), summed()


@NEEDS_SHRINK
def test_shrink_excludes_a_living_rank(fleet: Fleet) -> None:
    assert fleet.run(shrunk) == [(0, 2, 3.0), (-1, 0, 0.0), (1, 2, 3.0)]


def shrunk_part() -> float:
    """Of a group that is not the default one, which goes on."""
    group = dist.new_group([0, 1, 2])
    total = 0.0
    if dist.get_rank() != 0:
        smaller = dist.shrink_group([0], group)
        total = summed(smaller)
        assert kfcomm.torch.communicator(smaller).births == (1, 2)
    assert summed() == 6.0
    return total


@NEEDS_SHRINK
def test_shrink_a_group(fleet: Fleet) -> None:
    assert fleet.run(shrunk_part) == [0.0, 3.0, 3.0]


def unlike() -> str:
    """Ranks that exclude different ranks raise a timeout that names ranks of the smaller group."""
    rank = dist.get_rank()
    if rank == 2:
        for other in (0, 1):
            dist.recv(torch.zeros(1), other)
        return ""
    dist.group.WORLD.set_timeout(timedelta(seconds=1))
    with pytest.raises(kfcomm.CollectiveTimeout) as caught:
        dist.shrink_group([2 if rank == 0 else 0])
    assert isinstance(caught.value, dist.DistBackendError)
    dist.group.WORLD.set_timeout(timedelta(seconds=60))
    dist.send(torch.zeros(1), 2)
    return str(caught.value)


@NEEDS_SHRINK
def test_shrink_with_different_exclusions_times_out(fleet: Fleet) -> None:
    first, second, _ = fleet.run(unlike)
    assert "missing ranks [1]" in first
    assert "missing ranks [2]" in second


def nobody_lost() -> None:
    assert kfcomm.torch.shrink() is dist.group.WORLD
    assert summed() == 6.0


def test_shrink_without_losses(fleet: Fleet) -> None:
    fleet.run(nobody_lost)


@pytest.mark.parametrize("how", [pytest.param("torch", marks=NEEDS_SHRINK), "kfcomm"])
@pytest.mark.parametrize("lost", [0, 1])
def test_training_survives_a_killed_rank(how: str, lost: int, tmp_path: Path) -> None:
    """By torch's function, with the lost rank, and by ours, without it."""
    done = started("survivors.py", tmp_path, [[str(rank), str(lost), how] for rank in range(3)])
    words = [line for one in done for line in one[1].splitlines()]
    assert words == ["rank 0 of 2: 3.0, pair 3.0, model True", "rank 1 of 2: 3.0, pair 3.0, model True"], done
    assert [code for code, _, _ in done if code] == [-9]


def test_training_survives_two_killed_ranks(tmp_path: Path) -> None:
    done = started("one_after_the_other.py", tmp_path, [[str(rank)] for rank in range(4)])
    assert [one[1] for one in done] == ["0 of 3, 0 of 2\n", "", "", "2 of 3, 1 of 2\n"], done


# ---------------------------------------------------------------- reconfigure


def reconfigured(place: str) -> list[Any]:
    """All ranks meet anew: as torch's group with the same ranks, then as another one."""
    rank = dist.get_rank()
    assert dist.distributed_c10d._supports_reconfigure()
    handles = exchanged(dist.distributed_c10d._get_reconfigure_handle())
    before = kfcomm.torch.communicator()
    dist.distributed_c10d._reconfigure(1, handles).wait()
    assert kfcomm.torch.communicator() is not before
    assert summed() == 6.0
    dist.distributed_c10d._reconfigure(2, set(handles), timeout=timedelta(seconds=30)).wait()
    with pytest.raises(kfcomm.ConfigError, match="the uuid 2 was already used"):
        dist.distributed_c10d._reconfigure(2, handles)
    assert (dist.get_rank(), summed()) == (rank, 6.0)
    with pytest.raises(kfcomm.ConfigError, match=r"call kfcomm\.torch\.reconfigure"):
        dist.distributed_c10d._reconfigure(3, handles[::-1])
    with pytest.raises(kfcomm.ConfigError, match="2 processes came"):
        dist.distributed_c10d._reconfigure(3, handles[:2])
    kfcomm.torch.reconfigure(4, handles[::-1])
    assert dist.get_rank() == 2 - rank
    assert summed() == 6.0
    if rank == 0:
        dist.destroy_process_group()
        return []
    kfcomm.torch.reconfigure(5, handles[1:], timedelta(seconds=30))
    return [dist.get_rank(), dist.get_world_size(), summed()]


def exchanged(handle: str) -> list[str]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, handle)
    return found


@NEEDS_RECONFIGURE
def test_reconfigure_same_ranks(fleet: Fleet) -> None:
    assert fleet.run(reconfigured, "") == [[], [0, 2, 3.0], [1, 2, 3.0]]


@NEEDS_RECONFIGURE
def test_reconfigure_replaces_a_killed_rank(tmp_path: Path) -> None:
    done = started("replaced.py", tmp_path, [[str(number)] for number in range(4)])
    assert [one[1] for one in done] == ["0 of 3: 6.0\n", "", "2 of 3: 6.0\n", "1 of 3: 6.0\n"], done


def test_reconfigure_grows_the_group(tmp_path: Path) -> None:
    done = started("larger.py", tmp_path, [[str(number)] for number in range(3)])
    assert [one[1] for one in done] == [f"{rank} of 3: 6.0\n" for rank in range(3)], done


def test_handles() -> None:
    one, two = ProcessHandle("a", "127.0.0.1", 1, 0), ProcessHandle("b", "::1", 2, 1)
    new = ProcessHandle("c", "127.0.0.1", 3, -1)
    assert ProcessHandle.of(str(two)) == two
    assert in_order([str(two), str(one)]) == [two, one]
    assert in_order({str(new), str(two), str(one)}) == [one, two, new]
    for wrong in (["x"], [], ["other|a|b|1|2"], [str(one), str(one)], ["kfcomm|a|b|c|1"]):
        with pytest.raises(kfcomm.ConfigError, match="handle"):
            in_order(wrong)


def started(program: str, folder: Path, arguments: list[list[str]]) -> list[tuple[int, str, str]]:
    """Run processes of the program at the same time; exit code, standard output and error of each."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAMS / program), *one], cwd=folder, env=environment(folder), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for one in arguments
    ]  # fmt: skip
    said = [rank.communicate() for rank in ranks]
    return [(rank.returncode, out, err) for rank, (out, err) in zip(ranks, said, strict=True)]
