"""The launcher as its users have it: real processes, real signals."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.launch.launched import TOKEN, command, environ, finished, launched, wait_for_the_end_of

# opens the pipe that the tests watch, for this process and all that it starts, and says which rank is ready
READY = 'exec 9> "$HELD"; echo "$KFCOMM_RANK $$" >&9; '


def by_rank(output: str, size: int) -> list[list[str]]:
    """The lines of each rank, without what tells them apart."""
    return [
        [line.removeprefix(f"[{rank}] ") for line in output.splitlines() if line.startswith(f"[{rank}]")]
        for rank in range(size)
    ]


def bash(program: str) -> list[str]:
    return ["bash", "-c", program]


def test_every_rank_knows_its_place_and_is_shown_by_line() -> None:
    done = finished("run", "-n", "3", *bash('echo "$KFCOMM_RANK/$KFCOMM_SIZE $KFCOMM_LOCAL_RANK/$KFCOMM_LOCAL_SIZE"'))
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[0] 0/3 0/3", "[1] 1/3 1/3", "[2] 2/3 2/3"]
    assert done.stderr == ""


def test_streams_stay_apart_and_arguments_arrive_whole() -> None:
    done = finished("run", "-n", "1", *bash('echo "$@"; echo oops >&2'), "_", "--strategy", "a  b", "-n")
    assert done.stdout == "[0] --strategy a  b -n\n"
    assert done.stderr == "[0] oops\n"


def test_settings_arrive_as_variables() -> None:
    options = ("--strategy", "ring", "--transport", "tcp", "--timeout", "7", "--stall-after", "2", "--interface", "lo")
    done = finished("run", "-n", "1", *options, *bash("env | grep ^KFCOMM_ | sort"))
    found = dict(line.removeprefix("[0] ").split("=", 1) for line in done.stdout.splitlines())
    assert found["KFCOMM_STRATEGY"] == "ring"
    assert found["KFCOMM_TRANSPORT"] == "tcp"
    assert float(found["KFCOMM_TIMEOUT"]) == 7
    assert float(found["KFCOMM_STALL_AFTER"]) == 2
    assert found["KFCOMM_INTERFACE"] == "lo"
    assert found["KFCOMM_STORE"].startswith("http://127.0.0.1:")
    assert len(found["KFCOMM_TOKEN"]) == 64


def test_a_token_file_is_read_here_and_its_name_not_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    program = bash('echo "$KFCOMM_TOKEN$KFCOMM_TOKEN_FILE"')
    for arguments, env in (
        (("--token-file", str(path)), environ()),
        ((), environ(KFCOMM_TOKEN_FILE=str(path))),
        ((), environ(KFCOMM_TOKEN=TOKEN)),
    ):
        assert finished("run", "-n", "1", *arguments, *program, env=env).stdout == f"[0] {TOKEN}\n"


def test_the_token_is_on_no_command_line(tmp_path: Path) -> None:
    with launched(tmp_path, "-n", "1", *bash(READY + "exec sleep infinity"), env=environ(KFCOMM_TOKEN=TOKEN)) as job:
        job.lines(1)
        shown = subprocess.check_output(["ps", "-ewwo", "args"], text=True)
        assert "sleep infinity" in shown
        assert TOKEN not in shown


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [("exit 7", 7, "exit code 7"), ("kill -9 $$", 137, "SIGKILL"), ("kill -TERM $$", 143, "SIGTERM")],
)
def test_the_first_failure_gives_the_exit_code_and_ends_the_others(
    tmp_path: Path, end: str, code: int, words: str
) -> None:
    program = READY + f'if [ $KFCOMM_RANK = 1 ]; then read < "$HELD.go"; {end}; fi; exec sleep infinity'
    os.mkfifo(tmp_path / "held.go")
    with launched(tmp_path, "-n", "3", *bash(program)) as job:
        job.lines(3)
        (tmp_path / "held.go").write_text("\n")
        job.wait_for_the_last_holder()
        _, errors = job.process.communicate()
        assert job.process.returncode == code
        assert "rank 1 (pid" in errors
        assert words in errors
        assert "the others were ended" in errors


def test_who_does_not_end_when_asked_is_killed_after_the_grace(tmp_path: Path) -> None:
    program = READY + 'if [ $KFCOMM_RANK = 0 ]; then read < "$HELD.go"; exit 3; fi; trap "" TERM; echo deaf >&9; '
    os.mkfifo(tmp_path / "held.go")
    with launched(tmp_path, "-n", "2", "--grace", "0.1", *bash(program + "while :; do sleep infinity; done")) as job:
        job.lines(3)
        (tmp_path / "held.go").write_text("\n")
        job.wait_for_the_last_holder()
        assert job.process.wait() == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_every_process_of_every_rank(tmp_path: Path, number: signal.Signals) -> None:
    with launched(tmp_path, "-n", "2", *bash(READY + "sleep infinity & sleep infinity")) as job:
        job.lines(2)
        job.process.send_signal(number)
        job.wait_for_the_last_holder()
        _, errors = job.process.communicate()
        assert job.process.returncode == 128 + number
        assert f"ended by {number.name}" in errors


def test_the_second_signal_kills_at_once(tmp_path: Path) -> None:
    program = READY + 'trap "echo heard >&9" INT; echo deaf >&9; while :; do sleep infinity; done'
    with launched(tmp_path, "-n", "1", "--grace", "1e6", *bash(program)) as job:
        job.lines(2)
        job.process.send_signal(signal.SIGINT)
        assert job.lines(1) == ["heard"]
        job.process.send_signal(signal.SIGINT)
        job.wait_for_the_last_holder()
        assert job.process.wait() == 130


@pytest.mark.parametrize(
    "program",
    [
        "exec sleep infinity",
        "sleep infinity & sleep infinity",
        "setsid sleep infinity & sleep infinity",
        "trap '' TERM HUP INT; while :; do sleep infinity; done",
        "env -i sleep infinity",
    ],
    ids=["itself", "child", "other session", "deaf", "cleared environment"],
)
def test_a_killed_launcher_leaves_no_orphan(tmp_path: Path, program: str) -> None:
    with launched(tmp_path, "-n", "2", *bash(READY + program)) as job:
        job.lines(2)
        started = job.descendants()
        job.process.kill()
        job.wait_for_the_last_holder()
        wait_for_the_end_of(started)
        assert len(started) >= 3


def test_a_launcher_around_a_launcher(tmp_path: Path) -> None:
    inner = command("run", "-n", "2", *bash(READY + "sleep infinity & sleep infinity"))
    with launched(tmp_path, "-n", "2", *inner) as job:
        job.lines(4)
        started = job.descendants()
        job.process.kill()
        job.wait_for_the_last_holder()
        wait_for_the_end_of(started)


@pytest.mark.parametrize("start", ["", "setsid "], ids=["same session", "other session"])
def test_what_a_rank_leaves_running_does_not_outlive_the_job(tmp_path: Path, start: str) -> None:
    with launched(tmp_path, "-n", "2", *bash(READY + start + "sleep infinity & exit 0")) as job:
        job.lines(2)
        job.wait_for_the_last_holder()
        assert job.process.wait() == 0


def test_when_nobody_reads_the_output_the_job_ends(tmp_path: Path) -> None:
    with launched(tmp_path, "-n", "2", *bash(READY + "exec yes")) as job:
        job.lines(2)
        assert job.process.stdout is not None
        job.process.stdout.close()
        job.wait_for_the_last_holder()
        assert job.process.wait() == 128 + signal.SIGPIPE


def test_ranks_share_the_launchers_session_and_have_a_group_each() -> None:
    """Linux shares out processors among sessions first, and a rank that waits yields within its own."""
    shown = "ps -o pid=,pgid=,sid= -p $$; ps -o sid= -p $PPID; grep SigIgn /proc/$$/status"
    for text in by_rank(finished("run", "-n", "2", *bash(shown)).stdout, 2):
        pid, group, session, launchers, _, ignored = " ".join(text).split()
        assert pid == group != session == launchers
        # A rank in the background of a terminal gets an error from it, and is not stopped.
        assert int(ignored, 16) & (1 << (signal.SIGTTIN - 1))
        assert int(ignored, 16) & (1 << (signal.SIGTTOU - 1))


def test_large_output_arrives_whole() -> None:
    done = finished("run", "-n", "2", *bash("seq 30000"))
    for rank in range(2):
        mine = [line for line in done.stdout.splitlines() if line.startswith(f"[{rank}]")]
        assert mine == [f"[{rank}] {number}" for number in range(1, 30001)]


def test_logs_hold_what_each_rank_wrote(tmp_path: Path) -> None:
    program = bash('printf "$KFCOMM_RANK a\\rb\\n"; echo oops >&2')
    done = finished("run", "-n", "2", "--log-dir", str(tmp_path / "new" / "logs"), *program)
    assert done.returncode == 0
    for rank in range(2):
        text = (tmp_path / "new" / "logs" / f"rank-{rank}.log").read_bytes()
        assert b"%d a\rb\n" % rank in text
        assert b"oops\n" in text


def test_keep_going_lets_the_others_finish() -> None:
    program = bash('if [ $KFCOMM_RANK = 0 ]; then exit 5; fi; echo "still here"')
    done = finished("run", "-n", "2", "--keep-going", *program)
    assert done.returncode == 5
    assert "[1] still here" in done.stdout
    assert "rank 0" in done.stderr
    assert "the others ran on" in done.stderr


@pytest.mark.parametrize("given", [{"NO_COLOR": "1"}, {}])
def test_a_pipe_gets_no_colour_unless_asked(given: dict[str, str]) -> None:
    assert "\x1b" not in finished("run", "-n", "1", "echo", "x", env=environ(**given)).stdout
    assert "\x1b" in finished("run", "-n", "1", "--color", "echo", "x", env=environ(**given)).stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-n", "0", "true"], 2, ["-n", "0 is not in the range"]),
        (["-n", "-1", "true"], 2, ["-n"]),
        (["-n", "two", "true"], 2, ["-n", "two"]),
        (["-n", "2"], 2, ["COMMAND"]),
        (["true"], 2, ["-n 4", "-H"]),
        (["-n", "1", "--no-such-option", "true"], 2, ["--no-such-option"]),
        (["-n", "1", "no-such-program"], 127, ["no-such-program", "not found"]),
        (["-n", "1", "no-such-program.py"], 127, ["python no-such-program.py"]),
        (["-n", "1", __file__], 126, ["test_run.py", "cannot be executed", "python"]),
        (["-n", "1", "--interface", "no-such-interface", "true"], 2, ["no-such-interface", "lo 127.0.0.1"]),
        (["-n", "2", "--strategy", "rign", "true"], 2, ["unknown strategy 'rign'", "did you mean ring"]),
        (["-n", "1", "--transport", "pigeon", "true"], 2, ["pigeon", "tcp"]),
        (["-n", "1", "--timeout", "0", "true"], 2, ["--timeout"]),
        (["-n", "1", "--token-file", "/no/such/file", "true"], 2, ["/no/such/file", "No such file"]),
        (["-n", "1", "--log-dir", "/proc/no", "true"], 2, ["/proc/no"]),
        (["-n", "3", "-H", "127.0.0.1:2", "true"], 2, ["-n 3", "2 ranks"]),
        (["-H", "198.51.100.1:2", "true"], 2, ["198.51.100.1", "127.0.0.1"]),
        (["-H", "127.0.0.1:0", "true"], 2, ["127.0.0.1:0"]),
        (["-H", "127.0.0.1:2", "true"], 2, ["KFCOMM_TOKEN", "--token-file"]),
    ],
)
def test_wrong_use_is_told_in_a_line_and_starts_nothing(arguments: list[str], code: int, words: list[str]) -> None:
    done = finished("run", *arguments)
    assert done.returncode == code, done
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_a_file_that_is_no_program(tmp_path: Path) -> None:
    path = tmp_path / "program"
    path.write_bytes(b"\0\1\2\3")
    path.chmod(0o755)
    done = finished("run", "-n", "2", str(path))
    assert done.returncode == 126
    assert "Exec format error" in done.stderr
