"""Worlds of real processes: the lower bounds and kfcomm, which need no other library."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from bench.compare.contenders.floors import octets
from bench.compare.launch import LAUNCHES, Launch, Pythons
from bench.compare.works import WORKS, Mode
from bench.compare.world import World, WorldError


@pytest.mark.parametrize(
    ("name", "modes"),
    [
        ("copy", [Mode.FLOOR]),
        ("sockets", [Mode.FLOOR]),
        ("kfcomm-blocking", [Mode.ONE, Mode.ALL, Mode.BUCKETS, Mode.VIEWS]),
        ("kfcomm-symmetric", [Mode.ONE, Mode.ALL, Mode.SHARED]),
        ("kfcomm-tcp", [Mode.ONE, Mode.ALL, Mode.MANY]),
    ],
)
@pytest.mark.slow
def test_turns_are_taken(name: str, modes: list[Mode], tmp_path: Path) -> None:
    with World(LAUNCHES[name], 2, Pythons(), tmp_path / "world") as world:
        assert world.versions
        for mode in modes:
            turn = world.turn(WORKS["1MiB"], mode, 2)
            assert 0 < turn.slowest_s <= turn.span_s
            assert turn.parked_s > 0


def test_a_world_that_does_not_start_shows_its_output(tmp_path: Path) -> None:
    launch = dataclasses.replace(LAUNCHES["copy"], title="unknown", worker="no such contender")
    with pytest.raises(WorldError, match=r"(?s)unknown: a process has ended.*KeyError: 'no such contender'"):
        World(launch, 2, Pythons(), tmp_path / "world")


def test_a_rank_that_fails_ends_its_world(tmp_path: Path) -> None:
    with (
        World(LAUNCHES["kfcomm-blocking"], 2, Pythons(), tmp_path / "world") as world,
        pytest.raises(WorldError, match="kfcomm, blocking: "),
    ):
        world.turn(WORKS["1KiB"], Mode.MANY, 1)


def test_contender_that_is_not_installed_is_not_started(tmp_path: Path) -> None:
    launch: Launch = LAUNCHES["openmpi"]
    with pytest.raises(LookupError, match="Open MPI shared memory is not installed"):
        World(launch, 2, Pythons(), tmp_path / "world")


def test_octets_are_the_memory_of_an_array() -> None:
    array = np.zeros(2, np.float32)
    octets(array)[:4] = b"\x00\x00\x80\x3f"
    assert array.tolist() == [1.0, 0.0]
