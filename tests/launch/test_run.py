"""The launcher as its users have it: real processes, real signals."""

import contextlib
import fcntl
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import termios
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from kfcomm.cli import main
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


def test_ranks_that_ignore_sigterm_are_killed_after_the_grace(tmp_path: Path) -> None:
    program = READY + 'if [ $KFCOMM_RANK = 0 ]; then read < "$HELD.go"; exit 3; fi; trap "" TERM; echo deaf >&9; '
    os.mkfifo(tmp_path / "held.go")
    with launched(tmp_path, "-n", "2", "--grace", "0.1", *bash(program + "while :; do sleep infinity; done")) as job:
        job.lines(3)
        (tmp_path / "held.go").write_text("\n")
        job.wait_for_the_last_holder()
        assert job.process.wait() == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_ends_every_process_of_every_rank(tmp_path: Path, number: signal.Signals) -> None:
    with launched(tmp_path, "-n", "2", *bash(READY + "sleep infinity & sleep infinity")) as job:
        job.lines(2)
        job.process.send_signal(number)
        job.wait_for_the_last_holder()
        _, errors = job.process.communicate()
        assert job.process.returncode == 128 + number
        assert f"ended by {number.name}" in errors


UNTIL_INTERRUPTED = {
    "sync": (
        "with kfcomm.sync.init() as comm:\n    print(file=open(os.environ['HELD'], 'w'))\n"
        "    while True: time.sleep(1)\n"
    ),
    "async": (
        "import asyncio\nasync def main():\n    async with kfcomm.init() as comm:\n"
        "        print(file=open(os.environ['HELD'], 'w'))\n        await asyncio.Event().wait()\nasyncio.run(main())\n"
    ),
}


@pytest.mark.parametrize("kind", UNTIL_INTERRUPTED)
def test_ctrl_c_prints_one_line(kind: str, tmp_path: Path) -> None:
    with launched(tmp_path, "-n", "3", *python(UNTIL_INTERRUPTED[kind])) as job:
        job.lines(3)
        job.process.send_signal(signal.SIGINT)
        _, errors = job.process.communicate()
    assert (job.process.returncode, errors) == (130, "kfcomm: ended by SIGINT\n")


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
        shlex.join(command("run", "-n", "2", "bash", "-c", READY + "sleep infinity & sleep infinity")),
    ],
    ids=["itself", "child", "other session", "deaf", "cleared environment", "another launcher"],
)
def test_a_killed_launcher_leaves_no_orphan(tmp_path: Path, program: str) -> None:
    is_nested = "-n" in program.split()
    with launched(tmp_path, "-n", "2", *bash(program if is_nested else READY + program)) as job:
        job.lines(4 if is_nested else 2)
        started = job.descendants()
        job.process.kill()
        job.wait_for_the_last_holder()
        wait_for_the_end_of(started)
        assert len(started) >= 3


@pytest.mark.parametrize("kind", ["itself", "in a shell", "not Python"])
def test_ranks_end_when_launcher_and_guardian_are_killed_together(tmp_path: Path, kind: str) -> None:
    joins = python("comm = kfcomm.sync.init(); open(os.environ['HELD'], 'w').write('in\\n'); time.sleep(1e6)")
    programs = {
        "itself": joins, "in a shell": bash(f"{shlex.join(joins)}; true"),
        "not Python": bash(READY + "exec sleep infinity"),
    }  # fmt: skip
    with launched(tmp_path, "-n", "2", *programs[kind]) as job:
        job.lines(2)
        children = psutil.Process(job.process.pid).children()
        [guardian] = [one for one in children if any(word.endswith("guardian.py") for word in one.cmdline())]
        started = job.descendants()
        job.process.send_signal(signal.SIGSTOP)
        guardian.kill()
        job.process.kill()
        wait_for_the_end_of(started)


@pytest.mark.parametrize("start", ["", "setsid "], ids=["same session", "other session"])
def test_orphans_of_a_rank_do_not_outlive_the_job(tmp_path: Path, start: str) -> None:
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
        (["-n", "2", "--stdin", "2", "true"], 2, ["--stdin 2", "ranks 0 to 1"]),
        (["-n", "2", "--stdin", "one", "true"], 2, ["--stdin 'one'", "all, none, or a rank"]),
        (["-n", "3", "-H", "127.0.0.1:2", "true"], 2, ["-n 3", "2 ranks"]),
        (["-H", "198.51.100.1:2", "true"], 2, ["198.51.100.1", "127.0.0.1"]),
        (["-H", "127.0.0.1:0", "true"], 2, ["127.0.0.1:0"]),
        (["-H", "127.0.0.1:2", "true"], 2, ["KFCOMM_TOKEN", "--token-file"]),
    ],
)
def test_wrong_use_is_told_in_a_line_and_starts_nothing(arguments: list[str], code: int, words: list[str]) -> None:
    if code == 2:
        done = CliRunner().invoke(main, ["run", *arguments], env={"KFCOMM_TOKEN": None})
        found, stdout, stderr = done.exit_code, done.stdout, done.stderr
    else:
        ended = finished("run", *arguments)
        found, stdout, stderr = ended.returncode, ended.stdout, ended.stderr
    assert found == code, stderr
    assert stdout == ""
    assert "Traceback" not in stderr
    for word in words:
        assert word in stderr


def test_a_file_that_is_no_program(tmp_path: Path) -> None:
    path = tmp_path / "program"
    path.write_bytes(b"\0\1\2\3")
    path.chmod(0o755)
    done = finished("run", "-n", "2", str(path))
    assert done.returncode == 126
    assert "Exec format error" in done.stderr


PYTHON = "import os, sys, time, numpy as np, kfcomm\n"
WORLD = (
    "with kfcomm.sync.init() as comm:\n    if comm.rank == 1:\n        {}\n    comm.all_reduce(np.ones(2), name='a')\n"
)


def python(program: str) -> list[str]:
    return [sys.executable, "-c", PYTHON + program]


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("sys.exit(3)", 3, "exit code 3"),
        ("raise ValueError('why')", 1, "exit code 1 (ValueError: why)"),
        ("os._exit(5)", 5, "exit code 5"),
        ("os.kill(os.getpid(), 9)", 137, "SIGKILL"),
        ("import atexit; atexit.register(time.sleep, 1); raise ValueError('why')", 1, "exit code 1 (ValueError: why)"),
    ],
    ids=["exit", "error", "at once", "killed", "slow end"],
)
def test_the_first_failure_is_named_and_not_secondary_ones(end: str, code: int, words: str) -> None:
    done = finished("run", "-n", "3", *python(WORLD.format(end)))
    assert done.returncode == code, done
    assert "kfcomm: rank 1 (pid" in done.stderr, done
    assert f"failed first: {words}" in done.stderr
    own = [line for line in done.stderr.splitlines() if line.startswith("[1]")]
    assert ("[1] Traceback (most recent call last):" in own) == ("ValueError" in end)
    for rank in (0, 2):
        assert f"[{rank}] Traceback" not in done.stderr


def test_the_first_traceback_is_shown_before_secondary_ones_and_logs_keep_all(tmp_path: Path) -> None:
    # the victims have ended long before the culprit prints anything
    end = "import atexit; sys.excepthook = lambda *_: (time.sleep(1), sys.__excepthook__(*_)); raise ValueError('why')"
    done = finished("run", "-n", "3", "--log-dir", str(tmp_path), *python(WORLD.format(end)))
    kept = "".join((tmp_path / f"rank-{rank}.log").read_text() for rank in (0, 2))
    shown = done.stderr.splitlines()
    victims = [line for line in shown if line.startswith("kfcomm: ranks 0, 2: kfcomm.errors.PeerLost")]
    assert (len(victims), kept.count("Traceback")) == (1, 2), done
    assert shown.index("[1] ValueError: why") < shown.index(victims[0])


def told(output: str, message: str) -> set[int]:
    """The ranks that have an error, of all lines that say so: where ranks take long to end there are several."""
    listed = re.findall(rf"^kfcomm: ranks? ([\d, -]+): {re.escape(message)}", output, re.MULTILINE)
    spans = [part.partition("-") for one in listed for part in one.split(", ")]
    return {rank for first, _, last in spans for rank in range(int(first), int(last or first) + 1)}


def test_an_error_of_all_ranks_is_shown_once_and_logs_keep_all(tmp_path: Path) -> None:
    program = "with kfcomm.sync.init() as comm:\n    comm.all_reduce(np.ones(4 + (comm.rank == 3)), name='a')\n"
    done = finished("run", "-n", "8", "--keep-going", "--log-dir", str(tmp_path), *python(program))
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1, done
    assert told(done.stderr, "CollectiveMismatch (as shown") == set(range(8))
    assert done.stderr.count("'a' differs between ranks (shape)") == 1
    assert all((tmp_path / f"rank-{rank}.log").read_text().count("Traceback") == 1 for rank in range(8))


def test_an_error_before_init_is_shown_once() -> None:
    done = finished("run", "-n", "4", "--keep-going", *python("undefined_name\n"))
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1, done
    assert told(done.stderr, "NameError (as shown") == set(range(4))
    assert done.stderr.count("name 'undefined_name' is not defined") == 1


@pytest.mark.parametrize(
    ("wrong", "suggestion"),
    [("comm.all_redcue(1.0)", "all_reduce"), ("herald = 1; herlad", "herald"), ("np.aray", "array")],
)
def test_suggestions_of_python_are_shown(wrong: str, suggestion: str) -> None:
    done = finished("run", "-n", "2", *python(f"with kfcomm.sync.init() as comm:\n    {wrong}\n"))
    assert f"Did you mean: '{suggestion}'?" in done.stderr, done


def test_a_progress_bar_shows_where_there_is_no_terminal(tmp_path: Path) -> None:
    program = (
        "held = open(os.environ['HELD'], 'w')\n"
        "while True:\n    sys.stderr.write('\\r 10%'); sys.stderr.flush(); time.sleep(0.05)\n"
    )
    with launched(tmp_path, "-n", "1", *python(program)) as launcher:
        assert launcher.process.stderr is not None
        assert [launcher.process.stderr.readline() for _ in range(2)] == ["[0]  10%\n"] * 2


def test_a_long_line_arrives_whole() -> None:
    done = finished("run", "-n", "2", *python("print('x' * 1_000_000)\n"))
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] " + "x" * 1_000_000 for rank in (0, 1)]


def test_a_secondary_failure_alone_is_shown_whole() -> None:
    done = finished("run", "-n", "2", *python(WORLD.format("sys.exit(0)")))
    assert done.returncode == 1
    assert "[0] Traceback (most recent call last):" in done.stderr
    assert "failed first: exit code 1 (kfcomm.errors.PeerLost" in done.stderr


def test_output_that_cannot_be_written_harms_no_job() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command("run", "-n", "1", "echo", "text"), env=environ(), stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "kfcomm: standard output cannot be written (No space left on device): it is dropped, the job goes on",
        "kfcomm: 9 bytes of standard output could not be written (No space left on device)",
    ]


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_descriptors_harm_no_job(closed: str) -> None:
    program = 'exec "$@" ' + closed
    inner = ("bash", "-c", "echo out; echo err >&2; exit 7")
    done = subprocess.run(
        ["bash", "-c", program, "_", *command("run", "-n", "2", *inner)], env=environ(), capture_output=True, text=True
    )
    assert done.returncode == 7, done
    assert "Traceback" not in done.stderr
    assert (done.stdout == "") == (">&-" in closed.split())
    assert ("standard output cannot be written (Bad file descriptor)" in done.stderr) == (closed == ">&-")


def test_a_full_disk_for_the_logs_harms_no_job(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    done = finished("run", "-n", "2", "--log-dir", str(tmp_path), "echo", "text")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[0] text", "[1] text"]
    assert (tmp_path / "rank-1.log").read_text() == "text\n"
    assert "rank-0.log cannot be written" in done.stderr
    assert "5 bytes of" in done.stderr


def test_a_signal_ends_a_launcher_whose_output_nobody_takes(tmp_path: Path) -> None:
    program = bash(READY + "trap 'exit 1' INT; seq 100000; echo done >&9; sleep infinity")
    with launched(tmp_path, "-n", "2", "--grace", "0.1", *program) as job:
        job.lines(2)
        job.process.send_signal(signal.SIGINT)
        assert job.process.wait() == 130


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ((), ["[0] a", "[0] b"]),
        (("--stdin", "1"), ["[1] a", "[1] b"]),
        (("--stdin", "all"), ["[0] a", "[0] b", "[1] a", "[1] b"]),
        (("--stdin", "none"), []),
    ],
)
@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_stdin_goes_to_the_chosen_ranks(tmp_path: Path, options: tuple[str, ...], shown: list[str], kind: str) -> None:
    arguments = command("run", "-np", "2", *options, "--", "cat")
    if kind == "pipe":
        done = subprocess.run(arguments, env=environ(), capture_output=True, text=True, input="a\nb\n")
    else:
        (tmp_path / "input").write_text("a\nb\n")
        with (tmp_path / "input").open() as file:
            done = subprocess.run(arguments, env=environ(), capture_output=True, text=True, stdin=file)
    assert (done.returncode, sorted(done.stdout.splitlines()), done.stderr) == (0, shown, "")


def test_a_program_that_reads_nothing_leaves_it_to_others() -> None:
    script = f"{shlex.join(command('run', '-n', '2', 'true'))}; cat"
    done = subprocess.run(["bash", "-c", script], env=environ(), capture_output=True, text=True, input="mine\n")
    assert done.stdout == "mine\n"


def test_a_long_input_reaches_all_and_one_that_does_not_read_it_is_no_harm() -> None:
    text = "".join(f"{number}\n" for number in range(50000))
    inner = bash("if [ $KFCOMM_RANK = 0 ]; then exec <&-; sleep 0; else exec wc -l; fi")
    done = subprocess.run(
        command("run", "-n", "3", "--stdin", "all", *inner), env=environ(), capture_output=True, text=True, input=text
    )
    assert sorted(done.stdout.splitlines()) == ["[1] 50000", "[2] 50000"]


def test_a_module_takes_all_that_follows() -> None:
    done = finished("run", "-n", "1", "-m", "json.tool", "--help")
    assert "json.tool" in done.stdout
    assert done.returncode == 0


def test_a_misspelt_variable_is_told_once() -> None:
    env = environ(KFCOMM_TRANSPROT="tcp")
    done = finished("run", "-n", "2", *python("kfcomm.sync.init().close()"), env=env)
    line = "KFCOMM_TRANSPROT is an unknown setting and has no effect: did you mean KFCOMM_TRANSPORT?"
    assert done.stderr == f"kfcomm: warning: {line}\n"
    alone = subprocess.run(python("kfcomm.sync.init().close()"), env=env, capture_output=True, text=True)
    assert alone.stderr == f"{line}\n"


def test_a_debugger_works_at_a_terminal() -> None:
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        command("run", "-n", "2", *python("if os.environ['KFCOMM_RANK'] == '0': x = 41; breakpoint()")),
        env=environ(NO_COLOR="1"), stdin=end, stdout=end, stderr=end, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(end, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(end)
    shown = b""
    for expected, typed in ((b"(Pdb) ", b"p x + 1\n"), (b"[0] 42\r\n", b"continue\n")):
        while expected not in shown:
            shown += os.read(terminal, 4096)
        os.write(terminal, typed)
    with contextlib.suppress(OSError):
        while part := os.read(terminal, 4096):
            shown += part
    os.close(terminal)
    assert process.wait() == 0, shown
