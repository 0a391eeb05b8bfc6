"""Elastic jobs whose hosts come and go, as a program says, or as their launchers are started again."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kfcomm.errors import ConfigError
from kfcomm.launch import hosts
from kfcomm.launch.hosts import Discovery, difference, read_slots
from tests.launch.jobs import HOW_LONG_S, LONG, Job, kfcomm
from tests.launch.launched import TOKEN, environ
from tests.support import free_port

PROGRAM = LONG, [], 0.3


def name_hosts(folder: Path, text: str) -> list[str]:
    """Have the discovery script say this from now on; options of a job that asks it."""
    draft = folder / "draft"
    draft.write_text(text)
    draft.rename(folder / "hosts")
    return ["--discover", "cat hosts"]


@pytest.mark.slow
def test_hosts_come_and_go_as_a_program_says(job: Callable[..., Job], tmp_path: Path) -> None:
    discover = name_hosts(tmp_path, "127.0.0.1:2\n127.0.0.2:2\n")
    made = job((2,), ["--elastic", "2:8", *discover], *PROGRAM, names_hosts=True, lost_after_s=30.0)
    made.until(0, "job ")
    made.start(1, 2)
    made.until(0, "a launcher has come on 127.0.0.2", "4 ranks are wanted; 2 started", "now 0 1 2 3\n")
    made.until(2, "this host, as 127.0.0.3, waits until --discover names it")
    name_hosts(tmp_path, "127.0.0.1:2\n127.0.0.3:1\n")
    made.until(0, "--discover: 127.0.0.3 has 1 slot\n", "--discover: 127.0.0.2 is not named any more")
    made.until(0, "these are to go: ranks 2-3", "now 0 1 4\n")
    made.hurry()
    assert made.ends() == [0, 0, 0], made.everything()
    used, births, most = made.result()
    assert (used, births) == ([1.0], [0, 1, 4])
    assert most in (4, 5)
    assert "ended (" not in made.said(0)  # nobody was killed


@pytest.mark.slow
def test_a_launcher_comes_back_to_a_running_job(job: Callable[..., Job]) -> None:
    made = job((2, 1), ["--elastic", "2:5"], *PROGRAM, lost_after_s=5.0)
    made.until(0, "now 0 1 2\n")
    made.launchers[1].kill()
    made.start(1)  # before anybody has missed the one before
    made.until(0, "rank 2 ended", "a launcher has come on 127.0.0.2", "now 0 1 3\n")
    assert kfcomm("resize", made.name(), "4").returncode == 0
    made.until(0, "4 ranks are wanted; 1 started", "now 0 1 3 4\n")
    assert dict(made.status()["hosts"])["127.0.0.2"] == [4]
    made.launchers[1].send_signal(signal.SIGTERM)  # and again, as after maintenance
    assert made.launchers[1].wait(HOW_LONG_S) == 128 + signal.SIGTERM
    made.start(1)
    made.until(0, "now 0 1 3 5\n")
    made.until(0, lambda said: said.count("a launcher has come on 127.0.0.2") >= 2)
    made.hurry()
    assert made.ends() == [0, 0], made.everything()
    used, births, _ = made.result()
    assert (used, sorted(births)) == ([1.0], [0, 1, 3, 5])  # who of two is let in first is as it comes


@pytest.mark.slow
def test_a_host_that_was_never_needed_ends_well(job: Callable[..., Job], tmp_path: Path) -> None:
    options = ["--elastic", "2:4", *name_hosts(tmp_path, "127.0.0.1:2")]
    made = job((2,), options, *PROGRAM, names_hosts=True, lost_after_s=30.0)
    made.start(1)
    made.until(1, "this host, as 127.0.0.2, waits until --discover names it")
    made.until(0, "job ")
    made.hurry()
    assert made.ends() == [0, 0], made.everything()
    assert made.result()[:2] == [[1.0], [0, 1]]
    assert "the job ended before it had a use for this host" in made.said(1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-n", "2", "--discover", "true"], "--discover needs --elastic"),
        (["-n", "2", "--elastic", "1:4", "--discover", "true"], "--discover needs -H"),
        (["-H", "127.0.0.1:2", "--elastic", "1", "--discover", "true"], "expected --elastic MIN:MAX, got '1'"),
        (["-H", "127.0.0.1:2", "--elastic", "1:4", "--discover", "no-such-program"], "command not found"),
        (["-H", "127.0.0.1:2", "--elastic", "1:4", "--discover", "'"], "expected a command, got"),
        (["-H", "127.0.0.1:2", "--elastic", "1:4", "--discover", ""], "expected a command, got"),
        (["-H", "127.0.0.1:2", "--elastic", "1:4", "--discover", "true"], "it names no host"),
        (["-H", "127.0.0.1:2", "--elastic", "1:4", "--discover", "ls /none"], "it failed (exit code 2): "),
        (["-H", "127.0.0.1:2", "--elastic", "1:4", "--discover", "echo a b"], "line 1: 'a b' must look like"),
    ],
)
def test_invalid_discovery_is_refused_before_ranks_start(options: list[str], said: str) -> None:
    command = [sys.executable, "-m", "kfcomm", "run", "--port", str(free_port()), *options, "echo", "started"]
    done = subprocess.run(command, env=environ(KFCOMM_TOKEN=TOKEN), capture_output=True, text=True, timeout=600)
    assert done.returncode != 0
    assert said in done.stderr
    assert "started" not in done.stdout


def test_an_answer() -> None:
    assert read_slots("127.0.0.1:4\n\n  [::1]:2 \n127.0.0.2\nlocalhost:0\n".replace("localhost", "127.0.0.9")) == {
        "127.0.0.1": 4, "::1": 2, "127.0.0.2": 1, "127.0.0.9": 0,
    }  # fmt: skip
    for text, said in [
        ("127.0.0.1\nx:y:z\n", "line 2: 'x:y:z' must look like"),
        ("127.0.0.1:-1", "line 1: "),
        ("127.0.0.1:2\n127.0.0.1:2", "line 2: 127.0.0.1 is listed twice"),
        ("no-such-host.invalid:2", "line 1: the host 'no-such-host.invalid' does not resolve"),
        ("\n \n", "it names no host"),
    ]:
        with pytest.raises(ConfigError, match="^" + said.replace(".", r"\.")):
            read_slots(text)


def test_difference_between_answers() -> None:
    assert difference({"a": 1, "b": 2}, {"b": 1, "c": 3}) == [
        "b has 1 slot", "c has 3 slots", "a is not named any more",
    ]  # fmt: skip


def program(folder: Path, text: str) -> Discovery:
    script = folder / "discover"
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o755)
    return Discovery.of(str(script), environ(KFCOMM_TOKEN=TOKEN))


@pytest.mark.asyncio
async def test_failing_script_is_reported_once_and_last_answer_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "EVERY_S", 0.0)
    asked = program(tmp_path, "echo 127.0.0.1:1; echo no way >&2; exit 3")
    said: list[str] = []
    answers = asked.answers({"127.0.0.9": 1}, said.append)
    for _ in range(3):
        assert await anext(answers) == {"127.0.0.9": 1}
    assert said == [f"--discover {asked.command!r}: it failed (exit code 3): no way; what it said last holds"]
    program(tmp_path, 'test -z "$KFCOMM_TOKEN" && echo 127.0.0.1:1')
    assert await anext(answers) == {"127.0.0.1": 1}
    assert said[1:] == [f"--discover {asked.command!r} answers again"]
    (tmp_path / "discover").unlink()
    assert await anext(answers) == {"127.0.0.1": 1}
    assert "could not be started" in said[-1]
    await answers.aclose()


@pytest.mark.asyncio
async def test_slow_or_long_output_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "MAX_ANSWER_NBYTES", 1000)
    with pytest.raises(ConfigError, match="it says more than 1000 bytes"):
        await program(tmp_path, "yes 127.0.0.1 | head -c 100000").first()
    monkeypatch.setattr(hosts, "WITHIN_S", 0.2)
    with pytest.raises(ConfigError, match=r"no answer within 0.2 s"):
        await program(tmp_path, "cat /dev/zero | sleep 1000").first()
    is_over = threading.Event()
    monkeypatch.setattr(hosts, "read_slots", lambda _: is_over.wait())
    monkeypatch.setattr(hosts, "WITHIN_S", 1.0)
    try:
        with pytest.raises(ConfigError, match=r"names of its hosts were not resolved within 1 s"):
            await program(tmp_path, "echo some-host").first()
    finally:
        is_over.set()


@pytest.mark.slow
def test_a_first_launcher_that_is_started_again_knows_who_has_come_later(
    job: Callable[..., Job], store: str, tmp_path: Path
) -> None:
    options = ["--elastic", "1:8", "--store", store, *name_hosts(tmp_path, "127.0.0.1:2\n127.0.0.2:2\n")]
    made = job((2,), options, *PROGRAM, names_hosts=True, lost_after_s=20.0)
    made.start(1)
    made.until(0, "now 0 1 2 3\n")
    made.launchers[0].kill()
    made.until(1, "is unreachable: automatic replacement is disabled", "now 2 3\n")
    made.start(0)
    made.until(1, "is back", "now 2 3 4 5\n")
    made.hurry()
    assert made.ends() == [0, 0], made.everything()
    used, births, _ = made.result()
    assert (used, sorted(births)) == ([1.0], [2, 3, 4, 5])
