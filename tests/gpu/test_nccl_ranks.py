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
TIMEOUT_S = "15"
LOST_AFTER_S = 2
LAUNCHES = 1000
MESSAGE = 100_000
"""Elements."""


@pytest.fixture(scope="module", autouse=True)
def sharing_nccl() -> Iterator[None]:
    """Ranks have an NCCL that lets them share a device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", os.environ["SLIM_NCCL"])
        patch.setenv(SHARING_VARIABLE, "1")
        yield


@contextmanager
def sharing(size: int, *options: str, transport: str = "nccl") -> Iterator[World]:
    """The ranks of one job that all have the first device."""
    run = ("-n", str(size), "--device", "cuda:0", "--transport", transport, "--timeout", TIMEOUT_S, "--keep-going")
    with launched(*run, *options, size=size) as world:
        yield world


@pytest.fixture(scope="module", params=[2, 4])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Ranks that have joined; each test leaves them able to go on."""
    with sharing(request.param) as made:
        assert made.do(nccl_roles.join) == [["backend", "transport 'nccl' was asked for"]] * request.param
        yield made
        made.finish()


def test_every_form_of_every_verb(world: World) -> None:
    for use, length in enumerate((5, 1000)):
        assert world.do(nccl_roles.rows, length=length, use=use) == [[]] * len(world)


def test_every_dtype_and_op(world: World) -> None:
    assert world.do(nccl_roles.kinds, elements=33, brief=len(world) > 2) == [[]] * len(world)


def test_names_in_other_orders_in_each_step(world: World) -> None:
    number = 12 // len(world)
    assert world.do(nccl_roles.steps, names=24, number=number) == [24 * number] * len(world)


def test_unlike_shapes_are_a_mismatch_on_all_ranks(world: World) -> None:
    for call in world.start(nccl_roles.unlike, name="x"):
        assert " has " in call.failure(CollectiveMismatch).message
    world.do(nccl_roles.all_reduce, name="x", elements=MESSAGE)


@pytest.mark.parametrize("absent", [0, -1])
def test_missing_rank_is_named(world: World, absent: int) -> None:
    """Without the rank that leads the order nothing is launched; without another one all the others launch."""
    missing = absent % len(world)
    others = [actor for rank, actor in enumerate(world) if rank != missing]
    for call in start(others, nccl_roles.all_reduce, name="y", elements=MESSAGE, timeout=1):
        assert call.failure(CollectiveTimeout).fields["missing"] == [missing]
    world[missing].do(nccl_roles.all_reduce, name="y", elements=MESSAGE).failure(KfcommError)
    world.do(nccl_roles.all_reduce, name="y", elements=MESSAGE)


def test_groups_side_by_side(world: World) -> None:
    ranks = list(range(len(world)))
    groups = {"all": ranks, "turned": ranks[::-1], "first": [0], "others": ranks[1:]}
    assert world.do(nccl_roles.in_groups, groups=groups, elements=MESSAGE) == [[]] * len(world)


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
