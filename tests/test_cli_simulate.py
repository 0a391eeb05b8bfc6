"""`kfcomm simulate` as its users have it."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from kfcomm.cli import main
from kfcomm.probe import Probe
from kfcomm.simulate import Link, SimulatedNetwork, parse_workload, simulate, simulate_step
from kfcomm.types import Layout

NETWORK = """\
[defaults]
bandwidth = "200 Mbit/s"
[[host]]
count = 3
[[host]]
name = "slow"
bandwidth = "50 Mbit/s"
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *arguments])


def test_every_combination_is_simulated() -> None:
    done = run("--strategy", "ring,tree", "--strategy", "star", "--hosts", "2x2, 4x1", "--sizes", "1KiB,1MiB")
    assert done.exit_code == 0, done.output
    assert len(done.stderr.splitlines()) == 3 * 2 * 2
    lines = done.stdout.splitlines()
    assert lines[0] == "simulated all_reduce of float32; network: 10 Gbit/s Ethernet, shared memory inside of hosts"
    assert len(lines) == 2 + 2 + 3 * 2 * 2
    # four ranks either way, so that this is no column
    assert lines[1] == "ranks 4"
    assert lines[2].split() == [
        *("strategy", "hosts", "size", "time", "algbw", "busbw", "bound", "bound/time", "busiest", "port"),
        *("messages", "events"),
    ]


def test_the_same_call_gives_the_same_files(tmp_path: Path) -> None:
    network = tmp_path / "net.toml"
    network.write_text(NETWORK)
    for name in ("a", "b"):
        done = run(
            "--strategy", "ring", "--sizes", "1MiB:4MiB", "--network", str(network),
            "--json", str(tmp_path / f"{name}.json"), "--html", str(tmp_path / f"{name}.html"),
        )  # fmt: skip
        assert done.exit_code == 0, done.output
    data = (tmp_path / "a.json").read_text()
    assert data == (tmp_path / "b.json").read_text()
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    found = json.loads(data)
    expected = simulate("ring", SimulatedNetwork.load(network).layout, 1 << 20, SimulatedNetwork.load(network))
    assert found["results"][0]["seconds"] == expected.seconds
    assert found["results"][0]["busiest_port"] == "slow out"
    assert found["network"]["hosts"][3]["name"] == "slow"


@pytest.mark.parametrize(
    ("hosts", "sizes", "figures"), [("2x1", "1KiB", 1), ("2x1", "1KiB:8KiB", 1), ("2x1,4x1,8x2", "1KiB:8KiB", 3 + 3)]
)
def test_the_page_shows_time_over_size_and_over_ranks(hosts: str, sizes: str, figures: int, tmp_path: Path) -> None:
    page = tmp_path / "x.html"
    done = run("--strategy", "ring,auto", "--hosts", hosts, "--size", sizes, "--html", str(page))
    assert done.exit_code == 0, done.output
    text = page.read_text("utf-8")
    assert text.count("<svg") == figures
    assert "http" not in text.replace("http://www.w3.org", "")


def test_progress_is_told_with_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("kfcomm.cli.commands.simulate"), "_QUIET_S", 0.0)
    done = run("--strategy", "clique", "--hosts", "25x4", "--sizes", "2MiB")
    told = [line for line in done.stderr.splitlines() if "simulated, about" in line]
    assert re.fullmatch(r"clique, 100 ranks on 25 hosts, 2 MiB: \d+% simulated, about \d+ s left", told[0])
    assert "100% simulated, about 0 s left" in told[-1]


def test_verbs_and_stragglers(tmp_path: Path) -> None:
    done = run("--strategy", "star", "--hosts", "8x1", "--sizes", "1MiB", "--verb", "broadcast")
    assert done.stdout.startswith("simulated broadcast of float32; network: ")
    times = []
    for late in ((), ("--late", "1 s"), ("--late", "1 s"), ("--late", "1 s", "--seed", "1")):
        out = tmp_path / "x.json"
        run("--strategy", "star", "--hosts", "8x1", "--json", str(out), *late)
        times.append(json.loads(out.read_text())["results"][0]["seconds"])
    assert times[0] < 1 < times[1] == times[2] != times[3]


def test_a_workload_is_a_step(tmp_path: Path) -> None:
    out, file = tmp_path / "x.json", tmp_path / "step.txt"
    text = "compute 5ms\n4MiB as first   # of the last layers\ncompute 3ms\n16MiB\n"
    file.write_text(text)
    done = run("--strategy", "ring,star", "--hosts", "4x1", "--workload", str(file), "--json", str(out))
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "simulated step; network: 10 Gbit/s Ethernet, shared memory inside of hosts"
    assert lines[2].split()[:6] == ["strategy", "step", "compute", "under", "way", "overlapped"]
    assert "calls, ring, 4 ranks on 4 hosts" in lines
    network = SimulatedNetwork().of_hosts(4)
    due = simulate_step(parse_workload(text), network.layout, network, strategy="ring")
    found = json.loads(out.read_text())["results"][0]
    assert (found["strategy"], found["seconds"], found["exposed_s"]) == ("ring", due.seconds, due.exposed_s)
    assert [call["name"] for call in found["calls"]] == ["first", ""]
    text = "compute 5ms, 4MiB as first, compute 3ms, 16MiB"
    assert run("--strategy", "ring,star", "--hosts", "4x1", "--workload", text).stdout == done.stdout


def test_the_page_of_a_workload_shows_each_step_over_time(tmp_path: Path) -> None:
    page, out = tmp_path / "x.html", tmp_path / "x.json"
    text = "compute 5ms, 4MiB as first, compute 1ms, wait, compute 2ms, 1MiB"
    done = run(
        "--strategy", "star,ring", "--hosts", "2x1,4x1", "--workload", text, "--html", str(page), "--json", str(out)
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    shown, results = page.read_text("utf-8"), json.loads(out.read_text())["results"]
    assert shown.count("<svg") == 1 + 2 * 2  # all steps as bars, then each over time
    step_s = f"{1e3 * min(one['seconds'] for one in results if one['ranks'] == 4):.1f}"
    assert f"A step takes {step_s} ms on 4 ranks with ring, " in shown
    assert "8.00 ms of compute, and " in shown
    assert f"workload: {text}" in shown
    assert "first, 4 MiB" in shown
    assert "call 2, 1 MiB" in shown
    for one in results:
        *first, last = one["compute_spans_s"]
        waited_s = one["calls"][0]["done_s"]  # on the last rank
        assert np.allclose(first, [(0, 0.005), (0.005, 0.006)])
        assert 0.006 < last[0] <= waited_s
        assert last[1] == pytest.approx(waited_s + 0.002)


def test_a_workload_that_is_longer_than_a_path_can_be() -> None:
    done = run("--strategy", "ring", "--hosts", "2x1", "--workload", ", ".join(["compute 1us, 1KiB"] * 400))
    assert done.exit_code == 0, done.output


def test_ranks_that_are_alike_are_told() -> None:
    done = run("--strategy", "ring,clique", "--hosts", "1000x1", "--sizes", "1MiB")
    first, second = done.stderr.splitlines()
    assert re.fullmatch(
        r"ring, .*: [\d.]+ ms \(simulated in [\d.]+ s, 1 ranks for all, which are nearly alike\)", first
    )
    assert "1 ranks for all" in second


def probed(folder: Path, rates: tuple[float, ...]) -> Path:
    """A file as ``kfcomm probe --json`` writes it, of a host for each rate."""
    size = len(rates)
    bandwidth = [[min(a, b) for b in rates] for a in rates]
    latency_s = [[0.0 if a == b else 1e-4 for b in range(size)] for a in range(size)]
    names = tuple(f"node{number}" for number in range(size))
    path = folder / "probe.json"
    Probe(Layout.even(size, size), np.array(latency_s), np.array(bandwidth), host_names=names).save(path)
    return path


def test_a_probe_is_a_network(tmp_path: Path) -> None:
    path = probed(tmp_path, (5e7, 5e7, 5e7, 1.25e7, 6.25e6))
    out = tmp_path / "x.json"
    done = run("--strategy", "ring,packed_trees,auto", "--probe", str(path), "--sizes", "16MiB", "--json", str(out))
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert [host["name"] for host in found["network"]["hosts"]] == [f"node{number}" for number in range(5)]
    ring, packed, auto = (one["seconds"] for one in found["results"])
    assert found["results"][0]["busiest_port"] == "node4 out"
    # every host sends and receives all once, so that the slowest needs 2.7 s; a ring takes 1.6 times as long
    assert packed < 0.85 * ring
    assert auto <= 1.02 * packed


def test_the_network_of_a_probe_is_what_was_measured(tmp_path: Path) -> None:
    probe = Probe.load(probed(tmp_path, (4e7, 1e7, 2e7, 4e7)))
    network = SimulatedNetwork.of_probe(probe)
    assert [host.bandwidth for host in network.hosts] == [4e7, 1e7, 2e7, 4e7]
    assert network.links == ()
    assert network.model(network.layout).rates == probe.network().rates


def test_slow_links_of_a_probe_are_links(tmp_path: Path) -> None:
    probe = Probe.load(probed(tmp_path, (4e7, 4e7, 4e7)))
    bandwidth, latency_s = probe.bandwidth.copy(), probe.latency_s.copy()
    bandwidth[0, 2] = bandwidth[2, 0] = 1e6
    latency_s[1, 2] = latency_s[2, 1] = 5e-3
    network = SimulatedNetwork.of_probe(Probe(probe.layout, latency_s, bandwidth))
    assert network.links == (Link(("h0", "h2"), 1e6, None), Link(("h1", "h2"), None, 5e-3))


def test_a_rule_by_size_says_which_graphs_it_took() -> None:
    done = run("--strategy", "auto", "--hosts", "4x1", "--sizes", "64MiB")
    assert "strategy auto: " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "rign", "--hosts", "2x1"], "unknown strategy 'rign'; did you mean ring"),
        (["--strategy", "ring"], "the network lists no [[host]]: say how many there are, for example --hosts 8x1"),
        (["--strategy", "ring", "--hosts", "8*1"], "hosts '8*1': expected a number of hosts and ranks, got '8*1'"),
        (["--strategy", "ring", "--hosts", "4x1,0x1"], "hosts '4x1,0x1': '0x1' has no ranks"),
        (["--strategy", "ring", "--hosts", "1x1"], "one rank alone communicates nothing"),
        (["--strategy", "ring", "--hosts", "2x1", "--sizes", "2B"], "has less than one float32"),
        (["--strategy", "ring", "--hosts", "2x1", "--sizes", "x"], "expected a size, got 'x'"),
        (["--strategy", "ring", "--hosts", "2x1", "--dtype", "float31"], "float31"),
        (["--strategy", "ring", "--hosts", "2x1", "--network", "/none.toml"], "'/none.toml' cannot be read"),
        (["--strategy", "ring", "--hosts", "2x1", "--json", "/none/x.json"], "'/none/x.json' cannot be written"),
        (["--strategy", "ring", "--probe", "/none.json"], "--probe '/none.json' cannot be read"),
        (["--strategy", "ring", "--probe", "/dev/null"], "/dev/null: "),
        (["--strategy", "ring", "--probe", "a", "--network", "b"], "--network and --probe contradict each other"),
        (["--strategy", "ring", "--hosts", "2x1", "--verb", "reduec"], "verb 'reduec' is not simulated; these are: "),
        (["--strategy", "ring", "--hosts", "2x1", "--late", "5"], "--late: expected a time, got '5'"),
        (["--strategy", "ring", "--hosts", "2x1", "--workload", "soon"], "workload: 'soon': write 'compute 5 ms'"),
        (["--strategy", "ring", "--hosts", "2x1", "--workload", "4MiB", "--sizes", "1KiB"], "contradict each other"),
        (["--strategy", "packed_trees", "--hosts", "4x1"], "--strategy packed_trees: all hosts are alike"),
    ],
)
def test_usage_error_is_one_line(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.startswith("kfcomm: error: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_malformed_network_names_file_line_and_field(tmp_path: Path) -> None:
    network = tmp_path / "net.toml"
    network.write_text('[[host]]\nname = "a"\nbandwith = "1 GB/s"\n')
    done = run("--strategy", "ring", "--network", str(network))
    assert done.exit_code == 2
    assert f"{network}:3: host.bandwith: is unknown; did you mean bandwidth?" in done.stderr


def test_a_network_of_more_hosts_than_asked_for(tmp_path: Path) -> None:
    network = tmp_path / "net.toml"
    network.write_text(NETWORK)
    done = run("--strategy", "ring", "--hosts", "3x1", "--network", str(network))
    assert done.exit_code == 2
    assert "3 hosts are too few: the network lists 4 of them" in done.stderr
