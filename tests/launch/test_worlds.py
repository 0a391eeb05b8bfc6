"""Whole worlds: ranks that find each other through the launcher, or without one."""

import contextlib
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.launch.launched import TOKEN, Launcher, command, environ, finished, launched
from tests.support import free_port

PROGRAM = str(Path(__file__).with_name("joining.py"))
READY = 'exec 9> "$HELD"; echo "$KFCOMM_RANK" >&9; '


def joining(then: str) -> list[str]:
    return [sys.executable, PROGRAM, then]


def together(*commands: list[str], envs: list[dict[str, str]]) -> list[subprocess.CompletedProcess[str]]:
    """Run these at once, to their ends."""
    processes = [
        subprocess.Popen(each, env=env, stdin=subprocess.DEVNULL, stdout=-1, stderr=-1, text=True)
        for each, env in zip(commands, envs, strict=True)
    ]
    return [
        subprocess.CompletedProcess(process.args, process.wait(), *output)
        for process, output in [(process, process.communicate()) for process in processes]
    ]


def test_ranks_of_one_launcher_find_each_other_over_loopback() -> None:
    done = finished("run", "-n", "3", *joining("leave"))
    assert done.returncode == 0, done
    joined = "joined 0@127.0.0.1 1@127.0.0.1 2@127.0.0.1"
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {joined}" for rank in range(3)]


def test_programs_of_a_script_join_one_after_the_other() -> None:
    program = f"{sys.executable} {PROGRAM} leave && {sys.executable} {PROGRAM} leave"
    done = finished("run", "-n", "2", "bash", "-c", program)
    assert done.returncode == 0, done


def test_the_end_of_a_rank_is_told_to_the_others() -> None:
    done = finished("run", "-n", "2", "--keep-going", *joining("watch:1:3"))
    assert done.returncode == 3
    assert "[0] exit 1 3" in done.stdout


def test_a_second_process_claiming_a_rank_is_told_who_holds_it() -> None:
    done = finished("run", "-n", "2", "env", "KFCOMM_RANK=0", *joining("leave"))
    assert done.returncode == 9
    assert "rank 0 is taken" in done.stdout
    assert done.stdout.count("pid") == 2


def two_hosts(port: int, *arguments: str) -> list[list[str]]:
    hosts = ("--port", str(port), "-H", "127.0.0.1:2,127.0.0.2:1")
    return [command("run", *hosts, "--self", f"127.0.0.{host}", *arguments) for host in (1, 2)]


def test_one_launcher_on_each_host() -> None:
    done = together(*two_hosts(free_port(), *joining("leave")), envs=[environ(KFCOMM_TOKEN=TOKEN)] * 2)
    joined = "joined 0@127.0.0.1 1@127.0.0.1 2@127.0.0.2"
    assert [each.returncode for each in done] == [0, 0], done
    assert sorted(done[0].stdout.splitlines()) == [f"[0] {joined}", f"[1] {joined}"]
    assert done[1].stdout.splitlines() == [f"[2] {joined}"]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_failure_on_one_host_ends_the_job_on_all(rank: int) -> None:
    done = together(*two_hosts(free_port(), *joining(f"fail:{rank}:4")), envs=[environ(KFCOMM_TOKEN=TOKEN)] * 2)
    assert [each.returncode for each in done] == [4, 4], done
    for each in done:
        assert f"rank {rank} (" in each.stderr
        assert "exit code 4" in each.stderr


def test_hosts_with_different_tokens_refuse_each_other(tmp_path: Path) -> None:
    port = free_port()
    with launched(
        tmp_path,
        *("--port", str(port), "-H", "127.0.0.1:1,127.0.0.2:1", "--self", "127.0.0.1", "bash", "-c"),
        READY + "exec sleep infinity",
        env=environ(KFCOMM_TOKEN=TOKEN),
    ) as first:
        first.lines(1)
        other = ("--port", str(port), "-H", "127.0.0.1:1,127.0.0.2:1", "--self", "127.0.0.2", "true")
        done = finished("run", *other, env=environ(KFCOMM_TOKEN=TOKEN[::-1]))
    assert done.returncode == 1
    assert "token is not the job's" in done.stderr


def test_a_port_in_use_is_told() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = str(listener.getsockname()[1])
        done = finished("run", "-n", "1", "--port", port, "true")
    assert done.returncode == 1
    assert port in done.stderr
    assert "in use" in done.stderr


def torchrun(rank: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }


def openmpi(rank: int, port: int) -> dict[str, str]:
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    sizes = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    return {**dict.fromkeys(names, str(rank)), **dict.fromkeys(sizes, "2"), "KFCOMM_PORT": str(port)}


def slurm(rank: int, port: int) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "node7",
        "KFCOMM_PORT": str(port),
    }


@pytest.mark.parametrize("launcher", [torchrun, openmpi, slurm])
def test_ranks_of_other_launchers_find_each_other(launcher: object, tmp_path: Path) -> None:
    assert callable(launcher)
    port = free_port()
    envs = [environ(XDG_RUNTIME_DIR=str(tmp_path), **launcher(rank, port)) for rank in range(2)]
    done = together(joining("leave"), joining("leave"), envs=envs)
    assert [each.returncode for each in done] == [0, 0], done
    assert all("joined 0@127.0.0.1 1@127.0.0.1" in each.stdout for each in done)


def read_all(terminal: int) -> bytes:
    parts: list[bytes] = []
    # a terminal that nobody holds any more ends with an error, not with the end of file
    with contextlib.suppress(OSError):
        while part := os.read(terminal, 4096):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize(("more", "colored"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_on_a_terminal_prefixes_have_colour_and_progress_moves(more: Mapping[str, str], colored: bool) -> None:
    terminal, end = pty.openpty()
    program = ("bash", "-c", r"printf '10%%'; printf '\r20%%\n'; echo done")
    process = subprocess.Popen(
        command("run", "-n", "1", *program), env=environ(**more), stdin=subprocess.DEVNULL, stdout=end, stderr=end
    )
    os.close(end)
    shown = read_all(terminal)
    os.close(terminal)
    assert process.wait() == 0
    assert (b"\x1b[36m[0]\x1b[0m " in shown) == colored
    assert b"20%\r\n" in shown
    assert b"done\r\n" in shown


@contextlib.contextmanager
def on_two_hosts(tmp_path: Path, *arguments: str) -> Iterator[tuple[Launcher, Launcher]]:
    """Launchers of two hosts with one rank each, which sleeps."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    hosts = (*arguments, "--port", str(free_port()), "-H", "127.0.0.1:1,127.0.0.2:1", "--self")
    program = ("bash", "-c", READY + "exec sleep infinity")
    env = environ(KFCOMM_TOKEN=TOKEN)
    with (
        launched(tmp_path / "first", *hosts, "127.0.0.1", *program, env=env) as one,
        launched(tmp_path / "second", *hosts, "127.0.0.2", *program, env=env) as other,
    ):
        one.lines(1)
        other.lines(1)
        yield one, other


def test_the_launcher_of_the_first_host_is_missed(tmp_path: Path) -> None:
    with on_two_hosts(tmp_path) as (one, other):
        one.process.kill()
        other.wait_for_the_last_holder()
        _, errors = other.process.communicate()
        assert other.process.returncode == 1
        assert "the launcher on 127.0.0.1 went away" in errors


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_launcher_of_another_host_is_missed(tmp_path: Path, number: signal.Signals) -> None:
    with on_two_hosts(tmp_path, "--lost-after", "3") as (one, other):
        other.process.send_signal(number)
        _, errors = one.process.communicate()
        assert one.process.returncode == 1
        assert "the launcher on 127.0.0.2 is not heard of any more" in errors
        other.process.send_signal(signal.SIGCONT)
        other.wait_for_the_last_holder()  # one that was given up ends its ranks
        assert other.process.wait() == (1 if number == signal.SIGSTOP else -number)


def test_a_host_that_never_comes_is_named() -> None:
    arguments = ("--port", str(free_port()), "-H", "127.0.0.1:1,127.0.0.2:1", "--self", "127.0.0.1", "--timeout", "1")
    done = finished("run", *arguments, "true", env=environ(KFCOMM_TOKEN=TOKEN))
    assert done.returncode == 1
    assert "the launcher on 127.0.0.2 did not come" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_launcher_whose_own_ranks_are_done(tmp_path: Path, number: signal.Signals) -> None:
    hosts = ("--port", str(free_port()), "-H", "127.0.0.1:1,127.0.0.2:1", "--self", "127.0.0.1")
    with launched(tmp_path, *hosts, "bash", "-c", READY, env=environ(KFCOMM_TOKEN=TOKEN)) as job:
        job.lines(1)
        job.wait_for_the_last_holder()
        job.process.send_signal(number)
        assert job.process.wait() == 128 + number
