"""`kfcomm bench topologies` as its users have it, and the reports behind it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kfcomm.bench.plots import heat_map
from kfcomm.bench.topologies import LEGEND, Grid, times
from kfcomm.cli import main
from tests.launch.launched import finished

TINY = ("--sizes", "64B,64KiB", "--iterations", "2", "--warmup", "1")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "topologies", *arguments])


@pytest.mark.slow
def test_all_strategies_are_measured_and_everything_is_written(tmp_path: Path) -> None:
    data, page = tmp_path / "x.json", tmp_path / "x.html"
    done = finished("bench", "topologies", "-n", "2", *TINY, "--json", str(data), "--html", str(page))
    assert done.returncode == 0, done.stderr
    found = json.loads(data.read_text())
    # among two ranks there are but three different ones
    assert {one["strategy"] for one in found["results"]} == {"star", "ring", "direct"}
    assert [one["nbytes"] for one in found["winners"]] == [64, 1 << 16]
    assert found["advice"]["setting"]
    assert "tree" in found["same_graphs"]["star"]
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 ranks on 1 host")
    assert lines[1] == "all_reduce, op sum, dtype float32, transport auto: p50"
    assert LEGEND in lines
    assert f"As setting: --strategy '{found['advice']['setting']}'" in lines
    text = page.read_text("utf-8")
    assert text.count("<svg") == 1
    assert "Fastest strategy by size" in text
    assert "Machine" in text


def test_the_ranks_of_a_job_are_used() -> None:
    inside = (sys.executable, "-m", "kfcomm", "bench", "topologies", *TINY, "--strategy", "star,clique")
    done = finished("run", "-n", "2", *inside)
    assert done.returncode == 0, done.stderr
    assert "[0] Advice: " in done.stdout
    assert "clique" in done.stdout


def test_topologies_are_simulated(tmp_path: Path) -> None:
    data, page = tmp_path / "x.json", tmp_path / "x.html"
    done = run(
        "--simulate", "4x2", "--sizes", "1KiB,1MiB,16MiB", "--json", str(data), "--html", str(page),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("8 ranks on 4 hosts, simulated all_reduce of float32")
    found = json.loads(data.read_text())
    assert len(found["winners"]) == 3
    for winner in found["winners"]:
        assert winner["seconds"] == min(one["seconds"] for one in found["results"] if one["nbytes"] == winner["nbytes"])
    assert page.read_text("utf-8").count("<svg") == 2


def test_a_network_file_says_how_many_hosts_there_are(tmp_path: Path) -> None:
    network = tmp_path / "net.toml"
    network.write_text("[[host]]\ncount = 3\n")
    done = run("--network", str(network), "--sizes", "1MiB", "--strategy", "ring,star")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("3 ranks on 3 hosts")


def test_strategies_with_a_pair_for_each_rank_are_left_out_of_large_worlds() -> None:
    done = run("--simulate", "33x8", "--sizes", "1KiB")
    assert done.exit_code == 0, done.output
    left_out = "Left out, since they have a graph pair for each rank: ring, clique, direct, chain_star, binomial."
    assert left_out in done.stdout
    assert " ring" not in done.stdout.splitlines()[1]


def test_the_shade_says_how_far_a_time_is_from_the_fastest() -> None:
    seconds = {"a": 1e-3, "b": 1.2e-3, "c": 1.9e-3, "d": 3e-3, "e": 9e-3}
    table = times(Grid.of((name, 1024, time_s) for name, time_s in seconds.items()))
    assert table.rows == (("1 KiB", "1000 █", "1200 ▓", "1900 ▒", "3000 ░", "9000 ·"),)


def test_the_heat_map_shows_every_time_and_is_the_same_each_time() -> None:
    per_byte = {"a": 2e-9, "b": 5e-8}
    grid = Grid.of((name, nbytes, per_byte[name] * nbytes) for name in per_byte for nbytes in (64, 1 << 30))
    element = heat_map(grid)
    assert element == heat_map(grid)
    for text in ("0.13 µs", "3.20 µs", "2.15 s", "53.7 s", "64 B", "1 GiB", "size of the message", "8× or more"):
        assert text in element


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--simulate", "8x1", "-n", "4"], "-n is about real ranks, and none are started to simulate"),
        (["--simulate", "8x1", "--blocking"], "--blocking is about real ranks"),
        (["--simulate", "8x1,4x1"], "give one world"),
        (["--simulate", "8"], None),
        (["--simulate", "eight"], "expected a number of hosts and ranks, got 'eight'"),
        (["--simulate", "8x1", "--strategy", "rign"], "unknown strategy 'rign'; did you mean ring"),
        (["-n", "2", "--strategy", "rign"], "unknown strategy 'rign'; did you mean ring"),
        (["-n", "2", "--sizes", "2B"], "needs at least one float32"),
        (["--simulate", "8x1", "--json", "/none/x.json"], "'/none/x.json' cannot be written"),
    ],
)
def test_usage_error_is_one_line(arguments: list[str], message: str | None) -> None:
    if message is None:  # the number of ranks may be left out
        assert run(*arguments, "--sizes", "1KiB", "--strategy", "star").exit_code == 0
        return
    done = run(*arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("kfcomm: error: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_word_has_help_of_its_own() -> None:
    done = run("--help")
    assert done.exit_code == 0
    assert "Usage: kfcomm bench topologies" in done.output or "bench topologies [OPTIONS]" in done.output
    assert "kfcomm bench topologies" in CliRunner().invoke(main, ["bench", "--help"]).output
