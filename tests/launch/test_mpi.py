"""Programs under a real mpiexec, with two hosts that are this one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kfcomm.rendezvous.host import interfaces, is_loopback, store_url
from tests.launch.launched import ROOT, environ
from tests.support import free_port

PROGRAM = """
import kfcomm
for _ in range(2):
    with kfcomm.sync.init() as comm:
        print(comm.all_gather_object(comm.rank))
"""


@pytest.fixture
def hydra() -> str:
    """Path of hydra, from `make compare`'s environment or the system."""
    found = shutil.which("mpiexec.hydra", path=f"{ROOT}/build/venv/mpich/bin") or shutil.which("mpiexec.hydra")
    if found is None:
        pytest.skip("needs mpiexec.hydra (MPICH)")
    return found


@pytest.fixture
def address() -> str:
    """An address of this host for which a token is needed."""
    found = [one.address for one in interfaces() if not is_loopback(one.address) and ":" not in one.address]
    if not found:
        pytest.skip("needs an address that is not a loopback one")
    return found[0]


@pytest.mark.parametrize("shell", [False, True])
def test_ranks_of_hydra_on_two_hosts_need_no_token(shell: bool, hydra: str, address: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ranks = ["sh", "-c", f"{sys.executable} {program}; exit 0"] if shell else [sys.executable, str(program)]
    done = subprocess.run(
        [hydra, "-launcher", "fork", "-hosts", "h1,h2", "-n", "4", *ranks],
        env=environ(KFCOMM_STORE=store_url(address, free_port()), TMPDIR=str(tmp_path)),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[0, 1, 2, 3]") == 8
