"""Names of hosts that appear while a job waits for them, and networks without IPv4: in namespaces of the test's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.launched import TOKEN, command, environ
from tests.support import free_port

pytestmark = pytest.mark.netns

PROGRAM = str(Path(__file__).with_name("joining.py"))
ADDRESSES = ("fd00::1", "fd00::2")
INSIDE = """
ip link set lo up
ip -6 address add fd00::1/128 dev lo nodad
ip -6 address add fd00::2/128 dev lo nodad
mount --bind "$1" /etc/hosts
echo 'hosts: files' > "$1.switch"
mount --bind "$1.switch" /etc/nsswitch.conf
shift
exec "$@"
"""


@pytest.fixture
def names(tmp_path: Path) -> Path:
    """The file of names, which is empty."""
    file = tmp_path / "hosts"
    file.touch()
    return file


@pytest.fixture
def inside(names: Path) -> Callable[[str], list[str]]:
    """Make a command run a script of the shell where there is IPv6 alone, apart from 127.0.0.1, and these names."""
    return lambda script: ["unshare", "-nm", "sh", "-ec", INSIDE, "sh", str(names), "sh", "-c", script]


def started(words: list[str], **variables: str) -> subprocess.Popen[str]:
    env = environ(KFCOMM_TOKEN=TOKEN, **variables)
    return subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stdout=-1, stderr=-1, text=True)


def appear(process: subprocess.Popen[str], names: Path) -> str:
    """Wait until the job says that it looks a name up, and give it all names; returns the line."""
    assert process.stderr is not None
    line = process.stderr.readline()
    names.write_text("".join(f"{address} host{at}.test\n" for at, address in enumerate(ADDRESSES, 1)))
    return line


def test_launchers_of_an_ipv6_network_wait_for_names(inside: Callable[[str], list[str]], names: Path) -> None:
    hosts = ["--port", str(free_port()), "-H", "host1.test:2,host2.test:1"]
    jobs = [
        " ".join(command("run", *hosts, "--self", address, sys.executable, PROGRAM, "leave")) for address in ADDRESSES
    ]
    process = started(inside(f"{jobs[1]} & {jobs[0]}; wait $!"))
    assert "the host 'host1.test' does not resolve" in appear(process, names)
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    joined = "joined 0@fd00::1 1@fd00::1 2@fd00::2"
    assert sorted(out.splitlines()) == [f"[{rank}] {joined}" for rank in range(3)]


def test_ranks_by_hand_wait_for_the_name_of_the_store(
    inside: Callable[[str], list[str]], names: Path, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    # In one write: both ranks have one pipe, and an unbuffered print writes the end of the line by itself.
    shown = "print(f'{comm.all_gather_object(comm.rank)}\\n', end='')"
    program.write_text(f"import kfcomm\nwith kfcomm.sync.init() as comm: {shown}\n")
    rank = f"{sys.executable} {program}"
    process = started(
        inside(f"KFCOMM_RANK=1 {rank} & KFCOMM_RANK=0 {rank}; wait $!"),
        KFCOMM_SIZE="2", KFCOMM_STORE=f"http://host1.test:{free_port()}",
    )  # fmt: skip
    assert "the host 'host1.test' does not resolve" in appear(process, names)
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    assert out.splitlines() == ["[0, 1]"] * 2
