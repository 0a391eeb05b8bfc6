"""Strategies of other distributions, found by name."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import kfcomm
from kfcomm.cli import main
from kfcomm.errors import ConfigError
from kfcomm.strategies import plugins
from kfcomm.types import Layout
from tests.conformance.worlds import everywhere, world

CODE = """
from kfcomm.strategies import from_edges

def path(layout):
    return from_edges(layout.size, [(r, r + 1) for r in range(layout.size - 1)], name="path")

def by_size(layout):
    return {"<=1KiB": path(layout), "else": "ring"}

def broken(layout):
    raise ValueError("no graph today")

def nothing(layout):
    return None
"""
ENTRIES = """
[kfcomm.strategies]
path = theirs_graphs:path
by_size = theirs_graphs:by_size
broken = theirs_graphs:broken
nothing = theirs_graphs:nothing
missing = theirs_graphs:missing
ring = theirs_graphs:path
"""


@pytest.fixture(autouse=True)
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution with strategies."""
    (tmp_path / "theirs_graphs.py").write_text(CODE)
    info = tmp_path / "theirs-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "theirs_graphs", raising=False)


@pytest.mark.asyncio
async def test_a_communicator_takes_their_names() -> None:
    async with world(3, strategy="path") as comms:
        assert {comm.strategy.name for comm in comms} == {"path"}
        await everywhere(comms, lambda comm: comm.set_strategy({"<=4B": "by_size", "else": "path"}))
        for got in await everywhere(comms, lambda comm: comm.all_reduce(np.ones(3))):
            assert got.tolist() == [3, 3, 3]
        sub = await everywhere(comms, lambda comm: comm.group([2, 1, 0]))
        assert {one.strategy.name for one in sub} == {"<=4B: path, else: path"}


async def _alone(strategy: Any) -> str:
    async with kfcomm.init(strategy=strategy) as comm:
        return comm.strategy.name


@pytest.mark.asyncio
async def test_init_takes_them() -> None:
    assert await _alone("path") == "path"
    assert await _alone({"<=1KiB": "path", "else": "ring"}) == "<=1KiB: path, else: ring"
    with pytest.raises(ConfigError, match="unknown strategy 'paths'; did you mean path"):
        kfcomm.init(strategy="paths")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", r"'broken' \(theirs_graphs:broken, of theirs 1.2\) failed: ValueError: no graph today"),
        ("missing", r"'missing' .* failed: AttributeError: .*no attribute 'missing'"),
        ("nothing", "a strategy is a name, .* not NoneType"),
    ],
)
def test_failing_plugin_is_named(name: str, message: str) -> None:
    plugins.check(name)  # their code is not run before there are ranks
    with pytest.raises(ConfigError, match=message):
        plugins.build(name, Layout.even(4))


def test_names_of_its_own_come_first() -> None:
    assert plugins.build("ring", Layout.even(4)).name == "ring"
    assert len(plugins.build("ring", Layout.even(4)).select(0).pairs) == 4


def test_the_command_line_knows_them() -> None:
    listed = CliRunner().invoke(main, ["topology", "list"]).output
    assert "by_size                 theirs_graphs:by_size, of theirs 1.2\n" in listed
    assert "path: 4 ranks" in CliRunner().invoke(main, ["topology", "show", "path", "-n", "4"]).output


def test_the_simulator_knows_them() -> None:
    done = CliRunner().invoke(main, ["simulate", "--strategy", "path", "--hosts", "4x1", "--sizes", "1KiB"])
    assert done.exit_code == 0, done.output
    assert "path" in done.output


def test_a_plugin_with_a_name_that_is_taken_is_listed_once_with_a_warning(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["topology", "list"])
    assert len([line for line in done.stdout.splitlines() if line.startswith("ring ")]) == 1
    assert done.stderr == (
        "kfcomm: warning: strategy 'ring' is kfcomm's own; theirs_graphs:path, of theirs 1.2 is not used\n"
    )
    other = tmp_path / "others-3.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 3.0\n")
    (other / "entry_points.txt").write_text("[kfcomm.strategies]\npath = theirs_graphs:by_size\n")
    importlib.invalidate_caches()
    done = CliRunner().invoke(main, ["topology", "list"])
    assert len([line for line in done.stdout.splitlines() if line.startswith("path ")]) == 1
    assert len([line for line in done.stderr.splitlines() if "strategy 'path' is theirs_graphs:" in line]) == 1
