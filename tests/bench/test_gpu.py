"""Figures of devices, without a device: rows and their aims, the description, and the refusal without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import bench.gpu.__main__ as command
from bench.gpu.figures import KFCOMM, TORCH, Row, Wanted, table
from bench.gpu.machine import driver
from kfcomm.bench import memory


def row(mine: list[float], other: list[float], wanted: Wanted, **options: Any) -> Row:
    return Row("title", {KFCOMM: mine, TORCH: other}, TORCH, wanted, **options)


def test_ratio_and_extra_are_medians_of_the_rounds() -> None:
    one = row([1.0, 3.0, 9.0], [1.0, 2.0, 3.0], Wanted())
    assert (one.median_s(), one.median_s(TORCH), one.ratio, one.extra_s) == (3.0, 2.0, 1.5, 1.0)


@pytest.mark.parametrize(
    ("mine_s", "other_s", "wanted", "reached"),
    [
        (1.04, 1.0, Wanted(ratio=1.05, extra_s=20e-6), True),
        (1.06, 1.0, Wanted(ratio=1.05, extra_s=20e-6), False),
        (55e-6, 40e-6, Wanted(extra_s=20e-6), True),
        (65e-6, 40e-6, Wanted(extra_s=20e-6), False),
        (3e-4, 1e-4, Wanted(at_most_s=4e-4), True),
        (5e-4, 1e-4, Wanted(at_most_s=4e-4), False),
        (5e-4, 1e-4, Wanted(), None),
    ],
)
def test_a_row_is_reached_in_any_of_the_wanted_ways(
    mine_s: float, other_s: float, wanted: Wanted, reached: bool | None
) -> None:
    one = row([mine_s], [other_s], wanted)
    assert one.is_reached is reached
    text = table([one])
    assert ("NOT reached" in text, "not judged" in text) == (reached is False, reached is None)


def test_without_torch_a_row_is_judged_by_its_time_alone() -> None:
    for wanted, reached in ((Wanted(ratio=1.0), None), (Wanted(ratio=1.0, at_most_s=2.0), True)):
        one = Row("title", {KFCOMM: [1.0]}, TORCH, wanted)
        assert (one.ratio, one.extra_s, one.is_reached) == (None, None, reached)
        assert "title" in table([one])


def test_the_record_has_everything() -> None:
    one = row([1.2], [1.0], Wanted(ratio=1.25), about={"ranks": 2})
    found = json.loads(json.dumps(one.as_json()))
    assert (found["ratio"], found["reached"], found["ranks"]) == (1.2, True, 2)
    assert (found["medians_s"], found["times_s"]) == ({KFCOMM: 1.2, TORCH: 1.0}, {KFCOMM: [1.2], TORCH: [1.0]})
    assert found["wanted"] == "at most 1.25 of it"


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
