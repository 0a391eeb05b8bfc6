"""One page, and one `kfcomm top`, for all ranks of a job on two hosts."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.netlab import Netlab, even
from bench.netlab.hosts import Host
from tests.chromium import needed
from tests.launch.launched import command, environ, launched
from tests.monitor.page_on_host import page_inside

pytestmark = pytest.mark.netns

PROGRAM = """
import os, time, kfcomm
with kfcomm.sync.init() as comm:
    held = open(os.environ["HELD"], "w")
    print(os.environ["KFCOMM_JOB"], comm.rank, os.getpid(), file=held, flush=True)
    while True:
        try:
            comm.all_reduce(1.0, name="grad")
        except kfcomm.PeerLost:
            time.sleep(1000)
        if comm.rank == 3 and os.path.exists(os.environ["HELD"] + ".hang"):
            time.sleep(1000)
"""
RANKS = "[...document.querySelectorAll('#ranks tbody tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"


@contextlib.contextmanager
def on_two_hosts(folder: Path, network: str) -> Iterator[tuple[list[Host], str, list[int]]]:
    """A job with two ranks on each of two hosts: the hosts, its name on the first, its processes by rank."""
    # A rank that is stopped is not lost before the page has shown it, however slow the browser is.
    env = environ(KFCOMM_TOKEN=secrets.token_hex(32), KFCOMM_LOST_AFTER="3600")
    with Netlab(even(2), network=f"{network}.0/24") as lab, contextlib.ExitStack() as stack:
        run = ("--keep-going", "-H", f"{network}.1:2,{network}.2:2", sys.executable, "-c", PROGRAM)
        launchers = []
        for host in lab.hosts:
            (folder / host.name).mkdir()
            launchers.append(stack.enter_context(launched(folder / host.name, *run, env=env, inside=host.inside)))
        told = [line.split() for launcher in launchers for line in launcher.lines(2)]
        pids = {int(rank): int(pid) for _, rank, pid in told}
        yield list(lab.hosts), told[0][0], [pids[rank] for rank in range(4)]


def test_top_shows_the_ranks_of_all_hosts(tmp_path: Path) -> None:
    with on_two_hosts(tmp_path, "10.77.31") as (hosts, name, pids):
        top = hosts[0].inside(*command("top", name, "--once"))
        shown = ""
        while "4 of 4 ranks  strategy" not in shown:
            shown = subprocess.run(top, env=environ(COLUMNS="200"), capture_output=True, text=True, check=True).stdout
        assert re.findall(r"^ +(\d) +auto ", shown, re.MULTILINE) == ["0", "1", "2", "3"]
        os.kill(pids[2], signal.SIGKILL)
        while "gone: rank 2" not in shown:
            shown = subprocess.run(top, env=environ(COLUMNS="200"), capture_output=True, text=True, check=True).stdout


def test_page_shows_ranks_hangs_and_deaths_of_the_other_host(tmp_path: Path) -> None:
    needed()
    with on_two_hosts(tmp_path, "10.77.32") as (hosts, name, pids), page_inside(hosts[0].inside, name) as until:
        assert until("document.querySelectorAll('#graph .host').length") == 2
        until("document.querySelectorAll('#graph .flow').length >= 4")
        until("document.querySelectorAll('#graph .rank:not(.slow)').length >= 3")
        rows = until(f"{RANKS}.every((cells) => cells[9] && cells[12]) && {RANKS}.length === 4 && {RANKS}")
        assert [(int(cells[0]), int(cells[1])) for cells in rows] == list(enumerate(pids))
        assert until("document.querySelector('#tiles .tile').textContent") == "4 of 4ranks"
        until("document.querySelector('#names').textContent.includes('grad')")

        os.kill(pids[2], signal.SIGSTOP)
        until("document.querySelector('#alarms').textContent.includes('no answer: rank 2')")
        os.kill(pids[2], signal.SIGCONT)
        until("document.querySelector('#alarms').textContent === ''")

        (tmp_path / "h1" / "held.hang").touch()
        # Rank 2 has only just gone on: a first look may come before its answer, and say so.
        text = until("waits.textContent.includes('ranks 0-2 wait for rank 3, ') && waits.textContent")
        assert "missing: rank 3" in text
        assert "all_reduce 'grad'" in text
        assert "(at <string>:12 in <module>)" in text
        assert "<string>:8 in <module>" in text
        until("document.querySelectorAll('#graph .waiting').length === 3")

        os.kill(pids[3], signal.SIGKILL)
        until("document.querySelectorAll('#graph .rank')[3].classList.contains('gone')")
        until("document.querySelectorAll('#graph .rank.gone').length === 1")
        until("document.querySelector('#alarms').textContent.includes('gone: rank 3; ')")
        until("document.querySelector('#events').textContent.includes('SIGKILL')")
