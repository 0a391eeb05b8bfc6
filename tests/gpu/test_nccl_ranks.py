"""NCCL with several ranks on one GPU, each a process. ``SLIM_NCCL`` names a library of NCCL 2.30 or newer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kfcomm.arrays.devices.cuda import SHARING_VARIABLE
from kfcomm.errors import CollectiveMismatch, CollectiveTimeout, KfcommError
from tests.gpu import nccl_roles
from tests.processes import roles as plain
from tests.processes.stage import World, do, launched, start

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("SLIM_NCCL" not in os.environ, reason="SLIM_NCCL names no library of NCCL 2.30 or newer"),
]
IN_PROCESSES = True
SIZES = [2, 4]
LOST_AFTER_S = 3
LAUNCHES = 1000
MESSAGE = 100_000
"""Elements."""


@pytest.fixture(autouse=True)
def sharing_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have an NCCL that lets them share a device."""
    monkeypatch.setenv("LD_PRELOAD", os.environ["SLIM_NCCL"])
    monkeypatch.setenv(SHARING_VARIABLE, "1")


@contextmanager
def sharing(size: int, *options: str, transport: str = "nccl") -> Iterator[World]:
    """The ranks of one job that all have the first device."""
    run = ("-n", str(size), "--device", "cuda:0", "--transport", transport, "--keep-going", *options)
    with launched(*run, size=size) as world:
        yield world


@pytest.mark.parametrize("size", SIZES)
def test_collectives(size: int) -> None:
    with sharing(size) as world:
        assert world.do(nccl_roles.join) == [["backend", "transport 'nccl' was asked for"]] * size
        assert world.do(nccl_roles.rows, length=5) == [[]] * size
        assert world.do(nccl_roles.rows, length=1000, use=1) == [[]] * size
        assert world.do(nccl_roles.kinds, elements=33) == [[]] * size
        assert world.do(nccl_roles.steps, names=24, number=12 // size) == [24 * 12 // size] * size

        for call in world.start(nccl_roles.unlike, name="x"):
            assert " has " in call.failure(CollectiveMismatch).message
        world.do(nccl_roles.all_reduce, name="x", elements=MESSAGE)

        # without the rank that leads the order nothing is launched, without another one all the others launch
        for absent in (0, size - 1):
            others = [actor for rank, actor in enumerate(world) if rank != absent]
            for call in start(others, nccl_roles.all_reduce, name="y", elements=MESSAGE, timeout=1):
                assert call.failure(CollectiveTimeout).fields["missing"] == [absent]
            world[absent].do(nccl_roles.all_reduce, name="y", elements=MESSAGE).failure(KfcommError)
            world.do(nccl_roles.all_reduce, name="y", elements=MESSAGE)

        ranks = range(size)
        groups = {"all": list(ranks), "turned": list(ranks)[::-1], "first": [0], "others": list(ranks)[1:]}
        assert world.do(nccl_roles.in_groups, groups=groups, elements=MESSAGE) == [[]] * size
        world.finish()


@pytest.mark.parametrize(("size", "by"), [(2, "SIGKILL"), (2, "SIGSTOP"), (4, "SIGKILL")])
def test_lost_rank_amid_launches_is_peer_lost(size: int, by: str, tmp_path: Path) -> None:
    victim, note = size - 1, tmp_path / "note"
    with sharing(size, "--lost-after", str(LOST_AFTER_S)) as world:
        world.do(nccl_roles.join)
        ends_at = LAUNCHES // size**2
        ends: dict[str, Any] = {"ends_at": ends_at, "by": by, "note": str(note)}
        calls = [
            actor.do(nccl_roles.launches, number=LAUNCHES, elements=MESSAGE, **(ends if rank == victim else {}))
            for rank, actor in enumerate(world)
        ]
        told = [call.result() for call in calls[:victim]]
        assert [(one["error"], one["rank"], one["wrong"]) for one in told] == [("PeerLost", victim, 0)] * victim
        assert all(one["right"] for one in told)
        late_s = max(one["at_s"] for one in told) - float(note.read_text())
        print(f"{size} ranks, {by}: told {late_s:.2f} s later")  # noqa: T201  shown with -rP

        # the others go on without it
        survivors = world[:victim]
        groups = {"rest": list(range(victim))}
        assert do(survivors, nccl_roles.in_groups, groups=groups, elements=MESSAGE) == [[]] * victim
        do(survivors, plain.leave)
    assert late_s < LOST_AFTER_S + 2 if by == "SIGSTOP" else late_s < 2


def test_hierarchy_of_two_hosts() -> None:
    """Each rank passes for one with a device of its own, and the last two for ranks of another host."""
    with sharing(4, transport="auto") as world:
        calls = [actor.do(nccl_roles.join, host=f"host {rank // 2}") for rank, actor in enumerate(world)]
        assert [call.result()[0] for call in calls] == ["hierarchy"] * 4
        assert world.do(nccl_roles.steps, names=6, number=2) == [12] * 4
        assert world.do(nccl_roles.steps, names=1, number=2, elements=3_000_001) == [2] * 4
        assert world.do(nccl_roles.rows, length=5) == [[]] * 4
        for call in world.start(nccl_roles.unlike, name="x"):
            assert " has " in call.failure(CollectiveMismatch).message
        world.do(nccl_roles.all_reduce, name="x", elements=MESSAGE)
        world.finish()
