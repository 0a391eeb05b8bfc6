"""Figures of devices, without a device: rows and their aims, the description, and the refusal without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import bench.gpu.__main__ as command
from bench.gpu.figures import Pairs, Row, Wanted, slower_of, table
from bench.gpu.machine import driver
from kfcomm.bench import memory


def row(pairs: Pairs, wanted: Wanted) -> Row:
    return Row("title", "floor", wanted, pairs, {"part": 0.5}, {"nbytes": 8})


def test_ratio_and_extra_are_medians_of_the_pairs() -> None:
    one = row(((1.0, 1.0), (3.0, 2.0), (9.0, 3.0)), Wanted(1.05))
    assert (one.median_s, one.floor_s, one.ratio, one.extra_s) == (3.0, 2.0, 1.5, 1.0)


@pytest.mark.parametrize(
    ("pairs", "wanted", "reached"),
    [
        (((1.04, 1.0),), Wanted(1.05, 20e-6), True),
        (((1.06, 1.0),), Wanted(1.05, 20e-6), False),
        (((55e-6, 40e-6),), Wanted(1.05, 20e-6), True),
        (((65e-6, 40e-6),), Wanted(1.05, 20e-6), False),
        (((1.2, 1.0),), Wanted(1 / 0.8), True),
        (((1.3, 1.0),), Wanted(1 / 0.8), False),
    ],
)
def test_a_row_is_reached_by_its_ratio_or_by_what_is_added(pairs: Pairs, wanted: Wanted, reached: bool) -> None:
    assert row(pairs, wanted).is_reached is reached
    assert ("NOT reached" in table([row(pairs, wanted)])) is not reached


def test_the_record_has_everything() -> None:
    found = json.loads(json.dumps(row(((1.2, 1.0),), Wanted(1 / 0.8)).as_json()))
    assert (found["ratio"], found["share_of_floor"], found["reached"]) == (1.2, 0.8333, True)
    assert (found["floor_parts_s"], found["nbytes"], found["pairs_s"]) == ({"part": 0.5}, 8, [[1.2, 1.0]])


def test_the_floor_of_each_round_is_the_slower_part() -> None:
    times_s = {"device": [4.0, 5.0], "copies": [1.0, 3.0], "host": [2.0, 2.0]}
    assert slower_of(times_s, "device", ("copies", "host")) == ((4.0, 2.0), (5.0, 3.0))


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC 12.2.0", "580.65.06"),
        ("", ""),
    ],
)
def test_the_driver_is_what_its_module_says(tmp_path: Path, text: str, version: str) -> None:
    assert driver(tmp_path) == ""
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    (tmp_path / "driver/nvidia/version").write_text(text)
    assert driver(tmp_path) == version


def test_without_cupy_it_says_so_and_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "find_spec", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "--output", str(tmp_path / "x.json")])
    assert command.main() == 2
    said = capsys.readouterr()
    assert "kfcomm[cuda13]" in said.err
    assert (said.out, len(said.err.splitlines())) == ("", 1)
    assert not (tmp_path / "x.json").exists()
