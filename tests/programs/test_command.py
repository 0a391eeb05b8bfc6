"""The long run by hand: it goes on while all is right, and says what is wrong and how to see it again."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.launch.launched import environ
from tests.programs import __main__ as command
from tests.programs.running import LINE, Outcome, Setting
from tests.programs.walker import Plan, Report


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.programs", *arguments],
        env=environ(), capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_a_world_beside_a_busy_process() -> None:
    done = run(
        "--programs", "2", "--calls", "9", "--ranks", "2", "--transport", "tcp", "--seed", "5", "--busy", "1"
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    head, *_, tail = done.stdout.splitlines()  # between them it says how far it is, where that takes long
    assert head.startswith("2 programs of 9 calls from seed 5 on: Setting(ranks=2, transport='tcp'")
    assert tail.startswith("2 programs in ")
    assert tail.endswith("all results were right")


def test_the_steps_of_a_program() -> None:
    done = run("--show", "5", "--calls", "20", "--ranks", "2")
    assert done.returncode == 0
    assert done.stdout.startswith("step 0: ")
    assert done.stdout == run("--show", "5", "--calls", "20", "--ranks", "2").stdout


def test_failure_is_explained_with_a_command_to_reproduce_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report(8, 3, 1, "call 2", "difference", "wrong", "1", "2")
    outcomes = [Outcome(0, [], []), Outcome(1, [report], ["a line"])]
    monkeypatch.setattr(command, "run_world", lambda setting, plan, tell: outcomes.pop(0))
    monkeypatch.setattr(sys, "argv", ["x", "--programs", "9", "--calls", "7", "--seed", "6", "--per-world", "2"])
    assert command.main() == 1
    said = capsys.readouterr().out
    assert "a line\nseed 8, step 3, rank 1: difference: wrong\n  call 2\n  got      1\n  expected 2\n" in said
    assert "--only-seed 8 --calls 7 --ranks 4 --transport auto --interface blocking" in said
    outcomes = [Outcome(7, [], [])]
    monkeypatch.setattr(command, "run_world", lambda setting, plan, tell: outcomes.pop(0))
    assert command.main() == 1
    assert "the world of seeds 6 to 7 ended with 7" in capsys.readouterr().out


def test_lines_of_ranks_are_told_from_others() -> None:
    match = LINE.fullmatch("[12] PROGRESS 77")
    assert match is not None
    assert match.groups() == ("PROGRESS", "77")
    assert LINE.fullmatch("Timeout!") is None
    assert Setting(2, "shm", "async") != Plan(1, 2, 3)


@pytest.mark.parametrize("transport", ["shm", "unix"])
def test_several_hosts_are_no_world_of_one_host(transport: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.read_arguments(["--per-host", "1", "--transport", transport])
    assert f"--transport {transport} does not reach from host to host" in capsys.readouterr().err
