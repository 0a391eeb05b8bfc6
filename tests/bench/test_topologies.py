"""The fastest strategy at each size: grids, advice, and `kfcomm bench topologies`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.bench.topologies import LEGEND, TOLERANCE, Advice, Findings, Grid, distinct, times
from kfcomm.cli import main
from kfcomm.errors import ConfigError
from kfcomm.types import Layout
from tests.launch.launched import finished

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)


def grid(**seconds: tuple[float, ...]) -> Grid:
    return Grid.of(
        (strategy, nbytes, time_s)
        for strategy, times_s in seconds.items()
        for nbytes, time_s in zip(SIZES, times_s, strict=False)
    )


def test_the_winner_and_its_lead() -> None:
    found = grid(star=(1.0, 2.0), ring=(1.5, 1.0), tree=(3.0, 4.0))
    assert [found.winner(nbytes) for nbytes in found.sizes] == ["star", "ring"]
    assert found.ranking(SIZES[0]) == ["star", "ring", "tree"]
    assert found.slower("tree", SIZES[1]) == 4.0
    assert found.lead("star", SIZES[0]) == 1.5
    assert found.lead("star", SIZES[1]) == 0.5
    assert grid(star=(2.0,)).lead("star", SIZES[0]) == 1.0


def test_sizes_that_not_all_have_are_left_out() -> None:
    assert grid(star=(1.0, 2.0), ring=(1.0,)).sizes == (SIZES[0],)


def test_advice_in_words_and_as_a_setting() -> None:
    advice = Advice.of(grid(star=(1.0, 1.0, 9.0, 9.0), ring=(1.3, 1.3, 2.0, 3.0)))
    assert advice.in_words() == "up to 64 KiB: star (1.3× the next); above: ring (3.7× the next)"
    assert advice.as_setting() == "<=64KiB: star, else: ring"
    assert advice.as_json() == {
        "words": advice.in_words(),
        "setting": advice.as_setting(),
        "rules": [
            {"upto_nbytes": 1 << 16, "strategy": "star", "lead": 1.3},
            {"upto_nbytes": None, "strategy": "ring", "lead": 3.6742},
        ],
    }


def test_one_strategy_for_all_is_a_name() -> None:
    advice = Advice.of(grid(star=(1.0, 1.0), ring=(20.0, 20.0)))
    assert advice.in_words() == "at all sizes: star (20× the next)"
    assert advice.as_setting() == "star"


def test_equally_good_strategy_saves_a_rule() -> None:
    advice = Advice.of(grid(star=(1.0, 1.0, 1.0), ring=(0.97, 1.5, 0.99)))
    assert advice.as_setting() == "star"


def test_a_small_lead_is_called_so() -> None:
    assert "about as fast as the next" in Advice.of(grid(star=(1.0,), ring=(1.01,))).in_words()
    assert Advice.of(grid(star=(1.0,), ring=(1.0,))).in_words() == "at all sizes: star"


def test_a_bound_that_is_no_round_size_is_exact() -> None:
    cells = [("star", 1000, 1.0), ("ring", 1000, 2.0), ("star", 3 << 30, 2.0), ("ring", 3 << 30, 1.0)]
    assert Advice.of(Grid.of(cells)).as_setting() == "<=1000B: star, else: ring"
    cells = [(name, nbytes << 20, time_s) for name, nbytes, time_s in cells]
    assert Advice.of(Grid.of(cells)).as_setting() == "<=1000MiB: star, else: ring"


@given(st.lists(st.tuples(*[st.floats(0.1, 10.0)] * 3), min_size=1, max_size=12))
def test_no_advice_is_far_from_the_fastest(times: list[tuple[float, float, float]]) -> None:
    found = Grid.of(
        (name, 1 << bit, time_s)
        for bit, row in enumerate(times)
        for name, time_s in zip(("star", "ring", "tree"), row, strict=True)
    )
    advice = Advice.of(found)
    assert sum((rule.sizes for rule in advice.rules), ()) == found.sizes
    for rule in advice.rules:
        assert all(found.slower(rule.strategy, nbytes) <= TOLERANCE for nbytes in rule.sizes)
    assert [rule.upto for rule in advice.rules] == [rule.sizes[-1] for rule in advice.rules[:-1]] + [None]
    neighbours = zip(advice.rules, advice.rules[1:], strict=False)
    assert all(one.strategy != other.strategy for one, other in neighbours)


def test_strategies_with_the_same_graphs_are_one() -> None:
    assert distinct(("star", "tree", "ring", "binary_tree"), Layout.even(8, 8)) == {
        "star": ("tree",),
        "ring": (),
        "binary_tree": (),
    }
    assert distinct(("star", "binary_tree"), Layout.even(2)) == {"star": ("binary_tree",)}


def test_an_unknown_strategy() -> None:
    with pytest.raises(ConfigError, match="did you mean star"):
        distinct(("stra",), Layout.even(2))


TINY = ("--sizes", "64B,64KiB", "--iterations", "2", "--warmup", "1")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "topologies", *arguments])


@pytest.mark.slow
def test_all_strategies_are_measured_and_everything_is_written(tmp_path: Path) -> None:
    data, page = tmp_path / "x.json", tmp_path / "x.html"
    done = finished("bench", "topologies", "-n", "2", *TINY, "--json", str(data), "--html", str(page))
    assert done.returncode == 0, done.stderr
    found = json.loads(data.read_text())
    # among two ranks most have the same graphs
    different = {"star", "ring", "direct", "double_tree", "halving_doubling", "dissemination"}
    assert {one["strategy"] for one in found["results"]} == different
    assert [one["nbytes"] for one in found["winners"]] == [64, 1 << 16]
    assert found["advice"]["setting"]
    assert "tree" in found["same_graphs"]["star"]
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 ranks on 1 host")
    assert lines[1] == "all_reduce, op sum, dtype float32, transport auto: p50"
    assert LEGEND in lines
    assert f"As setting: --strategy '{found['advice']['setting']}'" in lines
    text = page.read_text("utf-8")
    assert "<svg" not in text
    assert "Fastest all_reduce" in text
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
    assert page.read_text("utf-8").count("<svg") == 1


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


def test_the_heat_map_shows_every_time_with_a_unit_for_each_size(tmp_path: Path) -> None:
    page = tmp_path / "x.html"
    done = run("--simulate", "4x1", "--strategy", "ring,star", "--sizes", "1KiB,1GiB", "--html", str(page))
    assert done.exit_code == 0, done.output
    heads = re.findall(r"<th>([^<]*)<br><small>([^<]*)</small></th>", page.read_text("utf-8"))
    assert heads == [("1 KiB", "µs"), ("1 GiB", "s")]
    cells = re.findall(r'<td class="h(\d)( best)?">([^<]*)</td>', page.read_text("utf-8"))
    assert len(cells) == 4
    assert [level for level, best, _ in cells if best] == ["0", "0"]
    assert all(0 < float(text) < 10_000 for *_, text in cells)


def test_the_headline_of_many_rules_has_the_first_and_the_last() -> None:
    times_s = {"a": (1, 9, 9, 9), "b": (9, 1, 9, 9), "c": (9, 9, 1, 9), "d": (9, 9, 9, 1)}
    cells = [(name, 1 << 10 * at, float(one)) for name, row in times_s.items() for at, one in enumerate(row, 1)]
    few = Findings(Grid.of(cell for cell in cells if cell[1] < 1 << 30), {})
    assert few.headline() == "Fastest all_reduce up to 1 KiB: a (9.0× the next); above: b (9.0× the next)."
    many = Findings(Grid.of(cells), {}).headline()
    assert many == "Fastest all_reduce up to 1 KiB: a (9.0× the next); above 1 GiB: d (9.0× the next); others between."
    one = Findings(Grid.of([("a", 1024, 1.0), ("b", 1024, 2.0)]), {}).headline()
    assert one == "Fastest all_reduce at all sizes: a (2.0× the next)."


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
