from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner, Result

from kfcomm.cli import main
from kfcomm.probe import Probe
from kfcomm.strategies import build, names
from kfcomm.strategies.draw import as_svg, as_text
from kfcomm.types import Layout, Uplink


def topology(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["topology", *arguments])


def test_show_draws_text() -> None:
    done = topology("show", "ring", "-n", "8", "--hosts", "2")
    assert (done.exit_code, done.output) == (0, as_text(build("ring", Layout.even(8, 2)), Layout.even(8, 2)))
    asked = topology("show", "multi_star", "-n", "8", "--hosts", "2", "--root-pair", "1")
    assert "pair 1 of 0..1, root 4\n" in asked.output


def test_a_world_is_given_as_in_other_commands() -> None:
    whole = topology("show", "ring", "-n", "8", "--hosts", "2").output
    assert topology("show", "ring", "--hosts", "2x4").output == whole
    assert topology("show", "ring", "-n", "8", "--hosts", "2x4").output == whole
    small = topology("show", "auto", "-n", "4", "--nbytes", "65536").output
    assert topology("show", "auto", "-n", "4", "--nbytes", "64KiB").output == small


def test_every_strategy_that_is_listed_can_be_shown() -> None:
    for name in names():
        assert topology("show", name, "-n", "6", "--hosts", "2").exit_code == 0


def test_show_writes_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "x.svg"
    done = topology("show", "tree", "-n", "8", "--hosts", "2", "-o", str(path))
    assert (done.exit_code, done.output) == (0, "")
    layout = Layout.even(8, 2)
    assert path.read_text("utf-8") == as_svg(build("tree", layout).select(0), layout)
    ElementTree.parse(path)


@pytest.mark.parametrize("name", ["x.png", "x.xyz", "x.SVG.txt"])
def test_a_picture_of_another_kind_is_refused_before_it_is_drawn(name: str, tmp_path: Path) -> None:
    done = topology("show", "no such strategy", "-n", "2", "-o", str(tmp_path / name))
    assert done.exit_code == 2
    assert "cannot be written: the file is one of .svg" in done.output
    assert list(tmp_path.iterdir()) == []


def test_auto_says_what_it_takes_why_and_what_the_next_best_would_take(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    ports = [50e6, 50e6, 50e6, 12e6, 6e6]
    bandwidth = np.array([[min(a, b) for b in ports] for a in ports])
    latency = np.full((5, 5), 1e-4)
    Probe(Layout.even(5, 5), latency, bandwidth).save(path)
    lines = topology("show", "auto", "--probe", str(path)).output.splitlines()
    assert lines[0].startswith("auto, by the time model with the rates of each host")
    table = lines[1 : lines.index("")]
    assert re.fullmatch(
        r"  1 GiB and more  packed_trees +[\d.]+ ms \(ports\); next \w+ [\d.]+ ms \(\+\d+%\)", table[-1]
    )
    assert re.fullmatch(r"  to .*ms \((latency|work|ports)\); next .* ms \(\+\d+%\)", table[0])
    assert "packed_trees: 5 ranks on 5 hosts" in "\n".join(lines)


def test_auto_says_what_racks_share_and_what_graphs_by_racks_save(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    uplinks = (Uplink((0, 2, 4), 10e6, 10e6), Uplink((1, 3, 5), 10e6, 10e6))
    bandwidth = np.array([[40e6 if a % 2 == b % 2 else 10e6 for b in range(6)] for a in range(6)])
    Probe(Layout.even(6, 6), np.full((6, 6), 1e-4), bandwidth, uplinks=uplinks).save(path)
    lines = topology("show", "auto", "--probe", str(path)).output.splitlines()
    assert lines[1] == "  hosts 0, 2, 4 share an uplink of 10.0 MB/s out and 10.0 in, 8% of what their ports can send"
    chosen = next(place for place, line in enumerate(lines) if "inside racks: " in line.partition(" ms ")[0])
    assert re.fullmatch(
        r"    of each byte of a message the busiest uplink carries 1\.00, in \d+ steps; the next best \d\.\d\d, in \d+",
        lines[chosen + 1],
    )


def test_auto_says_what_combinations_save() -> None:
    lines = topology("show", "auto", "--hosts", "3x5").output.splitlines()
    chosen = next(place for place, line in enumerate(lines) if " inside: " in line.partition(" ms ")[0])
    assert lines[chosen + 1].startswith(
        "    of each byte of a message the busiest host sends to others, or receives 1.33, in"
    )


def test_a_probe_that_cannot_be_shown_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    assert "cannot read" in topology("show", "auto", "--probe", str(path)).output
    path.write_text('{"format": 1}')
    assert "field 'hosts' is missing" in topology("show", "auto", "--probe", str(path)).output
    assert "leave -n and --hosts out" in topology("show", "auto", "--probe", str(path), "-n", "4").output


def test_auto_is_shown_whole_or_for_one_size(tmp_path: Path) -> None:
    shown = topology("show", "auto", "-n", "4").output
    assert "auto, from" in shown
    assert shown.startswith("auto, by the time model with hosts that are alike; times are those of the largest size")
    assert topology("show", "auto", "-n", "4", "--nbytes", "8").output.startswith("direct: 4 ranks")
    long = build("auto", Layout.even(4, 2)).select(1 << 30).name
    for size, name in ((["--nbytes", "8"], "clique"), ([], long)):
        assert topology("show", "auto", "-n", "4", "--hosts", "2", *size, "-o", str(tmp_path / name)).exit_code == 0
        assert f">{name} " in (tmp_path / name).read_text("utf-8")


def test_list_names_every_strategy() -> None:
    done = topology("list")
    assert done.exit_code == 0
    assert [line.split()[0] for line in done.output.splitlines()[: len(names())]] == list(names())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rign", "-n", "4"], "unknown strategy 'rign'; did you mean ring"),
        (["ring", "-n", "2", "--hosts", "3"], "2 ranks cannot occupy 3 hosts"),
        (["ring"], "say how many ranks there are, -n 8, or --hosts 2x4"),
        (["ring", "--hosts", "2"], "say how many ranks there are, -n 8, or --hosts 2x4"),
        (["ring", "-n", "7", "--hosts", "2x4"], "-n 7 contradicts --hosts 2x4, which has 8 ranks"),
        (["ring", "--hosts", "2x4,4x2"], "expected a number of hosts and ranks"),
        (["ring", "--hosts", "many"], "expected a number of hosts and ranks, got 'many'"),
        (["auto", "-n", "4", "--nbytes", "much"], "expected a size, got 'much'"),
        (["ring", "-n", "0"], "0 is not in the range"),
        (["ring"], "Missing option '-n'"),
        (["star", "-n", "2", "--root-pair", "1"], "no pair 1"),
    ],
)
def test_bad_arguments_are_one_clear_error(arguments: list[str], message: str) -> None:
    done = topology("show", *arguments)
    assert done.exit_code == 2
    assert message in done.output


def test_a_failed_picture_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "x.svg"
    assert topology("show", "star", "-n", "2", "--root-pair", "7", "-o", str(path)).exit_code == 2
    assert not path.exists()
    assert topology("show", "star", "-n", "2", "-o", str(tmp_path / "no" / "x.svg")).exit_code != 0


@pytest.mark.parametrize("command", [["run"], ["topology", "show"]])
def test_help_shows_its_examples_line_by_line(command: list[str]) -> None:
    done = CliRunner().invoke(main, [*command, "--help"], terminal_width=100)
    assert "\\b" not in done.output
    assert any(line.startswith(f"    kfcomm {' '.join(command)} ") for line in done.output.splitlines())
