"""Hosts in files of mpirun's form."""

from __future__ import annotations

from pathlib import Path

import pytest

from kfcomm.errors import ConfigError
from kfcomm.launch.hostfile import read_hostfile
from kfcomm.launch.hosts import parse_hosts
from tests.launch.launched import TOKEN, environ, finished

FILE = """\
# the first rack
10.0.0.1 slots=4 max-slots=8

10.0.0.2:2          # as MPICH has it
10.0.0.3
fd00::1 slots=2
[fd00::2]:3
10.0.0.3 slots=1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text(FILE)
    return path


def test_all_forms_of_lines(file: Path) -> None:
    found = read_hostfile(file, None)
    assert found == "10.0.0.1:4,10.0.0.2:2,10.0.0.3:2,[fd00::1]:2,[fd00::2]:3"
    assert [host.num_ranks for host in parse_hosts(found)] == [4, 2, 2, 2, 3]


def test_number_of_ranks_takes_the_first_slots(file: Path) -> None:
    assert read_hostfile(file, 5) == "10.0.0.1:4,10.0.0.2:1"
    assert read_hostfile(file, 4) == "10.0.0.1:4"
    with pytest.raises(ConfigError, match=r"-n 14: .*has 13 slots"):
        read_hostfile(file, 14)


@pytest.mark.parametrize("line", ["10.0.0.1 slots=x", "10.0.0.1 slot=4", "10.0.0.1:x", "a,b", "[fd00::1", "10.0.0.1 4"])
def test_malformed_line_is_told_with_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"10.0.0.9\n{line}\n")
    with pytest.raises(ConfigError, match=r"line 2: .* must look like"):
        read_hostfile(path, None)


def test_files_without_hosts(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# none\n10.0.0.1 slots=0\n")
    with pytest.raises(ConfigError, match="names no host"):
        read_hostfile(path, None)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_hostfile(tmp_path / "missing", None)


def test_job_of_a_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("127.0.0.1 slots=3\n")
    told = ("bash", "-c", 'echo "$KFCOMM_RANK/$KFCOMM_SIZE"')
    for options, size in ((("--hostfile", str(path)), 3), (("--hostfile", str(path), "-n", "2"), 2)):
        done = finished("run", *options, *told, env=environ(KFCOMM_TOKEN=TOKEN))
        assert sorted(done.stdout.split()[1::2]) == [f"{rank}/{size}" for rank in range(size)]
    done = finished("run", "--hostfile", str(path), "-H", "127.0.0.1:2", *told, env=environ(KFCOMM_TOKEN=TOKEN))
    assert done.returncode == 2
    assert "either -H or --hostfile" in done.stderr
