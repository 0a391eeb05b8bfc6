"""The bed of hosts: what stands, what a link's rate is, what is refused, and that nothing is left, whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.netlab import (
    Direction,
    Host,
    HostSpec,
    Netlab,
    NetlabError,
    NetlabUnavailable,
    clean,
    even,
    lab,
    namespaces,
    parse_rate,
    show_rate,
    why_unavailable,
    with_rate,
)
from bench.netlab.__main__ import main
from bench.netlab.measure import alone, measure
from bench.netlab.rates import Bucket, efficiency
from bench.netlab.steps import Step, bound_s, rounds
from kfcomm.errors import ConfigError
from tests.launch.launched import ROOT, environ

pytestmark = pytest.mark.slow

NETNS = pytest.mark.netns
IN_A_BED = "import subprocess, sys; from bench.netlab import *\nwith Netlab(even(2)) as bed:\n"
PROGRAM = "with bed.start(['sh', '-c', 'echo up; exec sleep 1000'], collect=False) as program:\n    program.wait()"
SLEEPER = "print(subprocess.Popen(bed.hosts[0].inside('sleep', '1000')).pid, flush=True)\nsys.stdin.read()"


def owned_by(pid: int) -> list[str]:
    """Names of the namespaces that a process has made."""
    return [each.name for each in namespaces.existing() if each.name.startswith(f"{namespaces.PREFIX}-{pid}-")]


@contextlib.contextmanager
def holding(code: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has made a bed of two hosts, said a line, and then does what ``code`` says in it."""
    body = IN_A_BED + "".join(f"    {line}\n" for line in ["print(flush=True)", *code.splitlines()])
    line = [sys.executable, "-W", "error", "-c", body]
    with subprocess.Popen(
        line, env=environ(), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "\n", process.communicate()
            yield process
        finally:
            process.kill()


# --- rates, and what a bucket makes of them ---


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("200mbit", 200e6),
        ("200 Mbit/s", 200e6),
        ("1.5gbit", 1.5e9),
        (" 64 kbit", 64e3),
        ("100000bit", 1e5),
        ("unlimited", None),
    ],
)
def test_rates_are_read(text: str, rate: float | None) -> None:
    assert parse_rate(text) == rate
    assert parse_rate(show_rate(rate)) == rate


@pytest.mark.parametrize(
    "text", ["", "200", "200mbps", "25MB/s", "-1mbit", "1e9bit", "fast", "1bit", "0bit", "101gbit"]
)
def test_malformed_rate_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="rate "):
        parse_rate(text)


@pytest.mark.parametrize("rate", [64e3, 10e6, 200e6, 1e9, 100e9])
@pytest.mark.parametrize("mtu", [576, 1500, 9000])
def test_a_bucket_holds_what_tcp_hands_over(rate: float, mtu: int) -> None:
    bucket = Bucket.holding(rate, mtu)
    frame = mtu + 14
    assert 2 * frame <= bucket.burst_nbytes <= 1 << 16
    frames = bucket.gso_nbytes(mtu) // (mtu - 52)
    assert frames >= 2
    assert frames * frame <= bucket.burst_nbytes


def test_efficiency_is_what_headers_leave() -> None:
    assert efficiency(1500) == 1448 / 1514
    assert efficiency(9000) == 8948 / 9014


# --- steps ---


def test_steps_are_read_and_written() -> None:
    assert Step.parse("ring:32MiB") == Step("ring", 32 << 20)
    assert Step.parse("some.module:function:4B") == Step("some.module:function", 4)
    assert str(Step("ring", 256 << 10)) == "ring:256KiB"
    for text in ("ring", "ring:", ":4B", "ring:3B", "ring:1KiB,2KiB"):
        with pytest.raises(ConfigError, match=r"step|sizes"):
            Step.parse(text)


def test_strategies_take_turns_at_beginning() -> None:
    order = rounds(["a", "b", "c"], [4, 8], 3)
    assert [step.strategy for step in order] == [*"abc", *"abc", *"bca", *"bca", *"cab", *"cab"]
    assert [step.nbytes for step in order[:6]] == [4, 4, 4, 8, 8, 8]


def test_the_bound_is_that_of_the_ring() -> None:
    assert bound_s(8, 32 << 20, 200e6) == pytest.approx(2 * 7 / 8 * 33554432 / 25e6)


# --- what is refused before anything is made ---


@pytest.mark.parametrize(
    ("hosts", "options", "message"),
    [
        ([], {}, "0 hosts: must be 1 to 128"),
        ([HostSpec("a"), HostSpec("a")], {}, "more than one host is called 'a'"),
        (even(3), {"network": "10.0.0.0/30"}, "no addresses for 3 hosts"),
        (even(1), {"network": "10.0.0.7/24"}, "host bits set"),
        (even(1), {"mtu": 100}, "mtu=100: must be between 576 and 9000"),
    ],
)
def test_a_bed_that_cannot_be_is_refused(hosts: list[HostSpec], options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Netlab(hosts, **options)


def test_a_host_that_cannot_be_is_refused() -> None:
    for spec, message in (
        ({"name": ""}, "host ''"),
        ({"name": "../a"}, r"host '\.\./a'"),
        ({"name": "a", "rate": 1.0}, "rate 1 bit/s: must be between 64 kbit/s"),
        ({"name": "a", "ranks": 0}, "ranks=0 must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            HostSpec(**spec)
    with pytest.raises(ConfigError, match="no host 'h33'; there are h0, h1, h2, h3; did you mean 'h3'"):
        with_rate(even(4), "h33", 1e6)
    with pytest.raises(ConfigError, match="129 hosts"):
        even(129)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "200"], "rate '200': a rate is like 200mbit"),
        (["--hosts", "2", "--slow", "7:50mbit"], "no host '7'; there are h0, h1"),
        (["--slow", "h7"], "--slow 'h7': must look like h7:50mbit"),
        (["--change", "h3:50mbit"], "--change 'h3:50mbit': must look like 10:h3:50mbit"),
        (["--change", "-1:h3:50mbit"], "--change '-1:h3:50mbit': must look like"),
        (["--change", "1:h9:50mbit"], "no host 'h9'"),
        (["--network", "none.toml"], "network file 'none.toml' cannot be read"),
        (["--network", "none.toml", "--rate", "1mbit"], "--rate and --network contradict each other"),
    ],
)
def test_options_that_cannot_work_are_refused(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(main, ["run", *arguments, "--", "true"])
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[host]]\nname = "a"\nbandwith = "1 Mbit/s"\n', ":3: host.bandwith: is unknown; did you mean bandwidth?"),
        ('[defaults]\nbandwidth = "1 Mbit/s"\n', "lists no [[host]]"),
        (
            '[[host]]\n[[host]]\n[[link]]\nbetween = ["h0", "h1"]\nlatency = "1 ms"\n',
            "has [[link]]; a bed has one switch",
        ),
    ],
)
def test_network_files_that_cannot_work_are_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "net.toml"
    file.write_text(text)
    done = CliRunner().invoke(main, ["run", "--network", str(file), "--", "true"])
    assert done.exit_code == 2
    assert message in done.stderr


def test_tools_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_unavailable() == "not installed: ip (iproute2), tc (iproute2), nsenter (util-linux)"
    done = CliRunner().invoke(main, ["run", "--", "true"])
    assert done.exit_code == 77
    assert "netlab: error: not installed: ip (iproute2)" in done.stderr


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        ("netns add", "network namespaces are not permitted here (it takes root"),
        ("type bridge", "the kernel makes no bridge (module bridge)"),
        ("type veth", "the kernel makes no pairs of virtual interfaces (module veth)"),
        ("sh -c", "variables of a namespace cannot be set"),
        ("tc -n", "the kernel limits no rates (modules sch_htb and cls_u32)"),
    ],
)
def test_error_names_what_the_kernel_refuses(fails: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "check_tools", lambda: None)

    def pretended(*line: str, text: str = "") -> str:
        if fails in " ".join(line):
            raise NetlabError("Operation not supported")
        return ""

    monkeypatch.setattr(namespaces, "tool", pretended)
    with pytest.raises(NetlabUnavailable) as caught, Netlab(even(1, 1e6)):
        pass
    assert message in str(caught.value)
    assert "Operation not supported" in str(caught.value)


# --- the bed ---


@NETNS
def test_each_host_has_a_link_of_its_rate_to_every_other() -> None:
    with Netlab([HostSpec("a", 200e6), HostSpec("b", 50e6), HostSpec("c")], network="10.9.8.0/24", mtu=1400) as bed:
        assert [host.address for host in bed.hosts] == ["10.9.8.1", "10.9.8.2", "10.9.8.3"]
        assert [bed.rates(name) for name in "abc"] == [
            {Direction.OUT: rate, Direction.IN: rate} for rate in (200e6, 50e6, None)
        ]
        for host in bed.hosts:
            [shown] = json.loads(host.ip("-j", "link", "show", "port"))
            assert shown["mtu"] == 1400
            for other in bed.hosts:
                subprocess.run([*host.inside("sh", "-c", _greeting(other.address))], check=True, capture_output=True)
        names = owned_by(os.getpid())
        assert [name.rpartition("-")[2] for name in names[1:]] == ["a", "b", "c"]
    assert owned_by(os.getpid()) == []


def _reaches(source: Host, target: Host) -> bool:
    line = source.inside("sh", "-c", _greeting(target.address))
    return subprocess.run(line, capture_output=True).returncode == 0


@NETNS
def test_a_partition_leaves_each_side_with_itself_until_it_is_healed() -> None:
    with Netlab(even(4), network="10.9.6.0/24") as bed:
        h0, h1, h2, h3 = bed.hosts
        bed.partition(["h2", "h3"])
        assert _reaches(h0, h1)
        assert _reaches(h2, h3)
        assert not _reaches(h1, h2)
        bed.heal()
        while not _reaches(h1, h2):  # its failure is remembered for a moment
            pass
        assert _reaches(h3, h0)
        with pytest.raises(ConfigError, match="no host 'h4'"):
            bed.partition(["h4"])


def _greeting(address: str) -> str:
    """A shell command that succeeds if a host answers, also with a refusal."""
    code = f"import socket, sys; sys.exit(socket.socket().connect_ex(('{address}', 9)) != 111)"
    return f'{sys.executable} -c "{code}"'


@NETNS
def test_a_rate_is_set_in_both_directions_or_in_one() -> None:
    with Netlab(even(2, 200e6)) as bed:
        bed.set_rate("h1", 50e6)
        assert bed.rates("h1") == {Direction.OUT: 50e6, Direction.IN: 50e6}
        bed.set_rate("h1", None, Direction.IN)
        assert bed.rates("h1") == {Direction.OUT: 50e6, Direction.IN: None}
        bed.set_rate("h1", 1e9, Direction.IN)
        bed.set_rate("h1", None, Direction.OUT)
        assert bed.rates("h1") == {Direction.OUT: None, Direction.IN: 1e9}
        bed.set_rate("h1", None, Direction.OUT)
        assert bed.rates("h0") == {Direction.OUT: 200e6, Direction.IN: 200e6}
        shown = bed.hosts[0].namespace.tc("class", "show", "dev", "port")
        assert "class htb 1:1 root rate 200Mbit ceil 200Mbit burst 16000b" in shown
        with pytest.raises(ConfigError, match="no host 'h2'; there are h0, h1"):
            bed.set_rate("h2", 1e6)
        with pytest.raises(ConfigError, match="must be between"):
            bed.set_rate("h1", 1.0)


@NETNS
def test_a_network_file_gives_hosts_and_rates(tmp_path: Path) -> None:
    file = tmp_path / "net.toml"
    file.write_text(
        '[defaults]\nbandwidth = "200 Mbit/s"\n[[host]]\n[[host]]\nname = "slow"\nbandwidth = "50 Mbit/s"\n'
    )
    line = [sys.executable, "-m", "bench.netlab", "run", "--network", str(file), "--", "sh", "-c", "echo $KFCOMM_SIZE"]
    done = subprocess.run(line, env=environ(), capture_output=True, text=True)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] 2", "[1] 2"])
    assert done.stderr == "netlab: 2 hosts, 200 Mbit/s, 50 Mbit/s\n"


# --- programs ---


@NETNS
def test_a_program_runs_across_the_hosts() -> None:
    with Netlab([HostSpec("a", ranks=2), HostSpec("b", 100e6)]) as bed:
        outcome = bed.run(["sh", "-c", "echo rank $KFCOMM_RANK of $KFCOMM_SIZE, $EXTRA"], env={"EXTRA": "x"})
    assert outcome.exit_codes == {"a": 0, "b": 0}
    assert sorted(outcome.output["a"].splitlines()) == ["[0] rank 0 of 3, x", "[1] rank 1 of 3, x"]
    assert outcome.output["b"] == "[2] rank 2 of 3, x\n"
    outcome.check()


@NETNS
def test_a_program_that_fails_says_where_and_how() -> None:
    with Netlab(even(2)) as bed:
        outcome = bed.run(["sh", "-c", "test $KFCOMM_RANK = 0 || { echo oh no; exit 5; }; exec sleep 1000"])
        assert outcome.exit_code == 5
        with pytest.raises(NetlabError, match=r"(?s)h1: 5.*oh no"):
            outcome.check()
        with pytest.raises(ConfigError, match="expected a program to run"):
            bed.run([])


@NETNS
def test_a_program_that_does_not_end_is_ended() -> None:
    with Netlab(even(2)) as bed:
        with pytest.raises(NetlabError, match=r"has not ended within 0.01 s; it still runs on h0, h1"):
            bed.run(["sleep", "1000"], timeout_s=0.01)
        with bed.start(["sleep", "1000"]) as program:
            assert not program.is_over
            assert not program.wait_for(0)
        assert program.is_over


@NETNS
def test_steps_are_timed_and_links_changed_in_between() -> None:
    seen: list[tuple[int, str]] = []
    with Netlab(even(2, 200e6)) as bed:

        def before(number: int, step: Step) -> None:
            seen.append((number, str(step)))
            bed.set_rate("h1", 100e6 + number)

        steps = rounds(["ring", "tests.bench.measured:star"], [4 << 10], 2)
        timings = measure(bed, steps, before_step=before, env={"PYTHONPATH": str(ROOT)})
        assert bed.rates("h1")[Direction.OUT] == pytest.approx(100e6 + 3, abs=8)
    assert seen == list(enumerate(map(str, steps)))
    assert [timing.step for timing in timings] == steps
    for timing in timings:
        assert len(timing.rank_s) == 2
        assert 0 < max(timing.rank_s) <= timing.span_s


@NETNS
def test_a_step_that_fails_is_told_with_what_the_ranks_wrote() -> None:
    with (
        Netlab(even(2)) as bed,
        pytest.raises(NetlabError, match=r"(?s)the program failed.*unknown strategy"),
    ):
        measure(bed, [Step("rings", 4)], env={"PYTHONPATH": str(ROOT)})


# --- the end ---


@NETNS
def test_exception_leaves_no_namespace() -> None:
    inside: list[subprocess.Popen[bytes]] = []

    def fail(bed: Netlab) -> None:
        inside.append(subprocess.Popen(bed.hosts[0].inside("sleep", "1000")))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), Netlab(even(2, 1e6)) as bed:
        fail(bed)
    assert inside[0].wait() == -signal.SIGKILL
    assert owned_by(os.getpid()) == []


@NETNS
def test_incomplete_bed_leaves_no_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*line: str) -> None:
        raise NetlabError("no more")

    monkeypatch.setattr(Netlab, "_limit", refuse)
    with pytest.raises(NetlabUnavailable, match=r"sch_htb.*no more"), Netlab(even(2, 1e6)):
        pass
    assert owned_by(os.getpid()) == []


@NETNS
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, -signal.SIGINT)]
)
def test_signal_leaves_no_namespace(number: signal.Signals, code: int) -> None:
    with holding(PROGRAM) as process:
        assert process.stdout is not None
        assert sorted(process.stdout.readline() for _ in range(2)) == ["[0] up\n", "[1] up\n"]
        assert len(owned_by(process.pid)) == 3
        process.send_signal(number)
        process.communicate()
    assert process.returncode == code
    assert owned_by(process.pid) == []


@NETNS
def test_a_killed_bed_is_cleaned_and_a_living_one_is_not() -> None:
    with holding(SLEEPER) as living:
        with holding(SLEEPER) as dead:
            assert dead.stdout is not None
            orphan = os.pidfd_open(int(dead.stdout.readline()))
            dead.kill()
            dead.wait()
        clean()  # or whoever makes a bed at this moment
        assert owned_by(dead.pid) == []
        select.select([orphan], [], [])  # it has ended as well
        os.close(orphan)
        assert len(owned_by(living.pid)) == 3
        living.communicate("")
    assert living.returncode == 0
    assert owned_by(living.pid) == []


@NETNS
def test_a_number_that_became_another_process_protects_nothing() -> None:
    stranger = namespaces.Namespace(f"{namespaces.PREFIX}-{os.getpid()}-1-0")
    stranger.add()
    clean()
    assert not stranger.path.exists()


def test_measurements_wait_for_each_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bench.netlab.measure.LOCK", tmp_path / "lock")
    waited: list[str] = []
    with alone(lambda: waited.append("first")):
        with pytest.raises(ZeroDivisionError), alone(lambda: 1 // 0):  # or it would wait now
            pass
        assert waited == []
    with alone(lambda: waited.append("second")):
        assert waited == []
