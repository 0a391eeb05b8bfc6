"""Limits of open files: the soft limit is raised as far as a job needs it; a hard limit that is too low is reported."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from kfcomm.common.sockets import raise_limit
from tests.launch.launched import command, environ

SHOW = "import resource; print('soft', resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
JOINS = "import kfcomm, resource\nwith kfcomm.sync.init() as comm:\n    comm.barrier()\n" + SHOW


def limited(soft: int, hard: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    return subprocess.run(
        command("run", *arguments), env=environ(), capture_output=True, text=True, stdin=subprocess.DEVNULL,
        preexec_fn=limit,
    )  # fmt: skip


@pytest.mark.parametrize("program", [SHOW, JOINS])
def test_a_low_soft_limit_is_raised_for_launcher_and_ranks(program: str) -> None:
    done = limited(40, 4000, "-n", "8", sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    limits = [int(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
    assert len(limits) == 8
    assert all(64 + 8 * 6 <= one <= 4000 for one in limits)


def test_a_hard_limit_that_does_not_do_is_told_before_anything_starts() -> None:
    done = limited(40, 50, "-n", "8", sys.executable, "-c", SHOW)
    assert (done.returncode, done.stdout) == (2, "")
    assert "8 ranks on this host need 52 open files in their launcher: the hard limit is 50; raise it" in done.stderr


def test_rank_that_cannot_join_says_how_many_it_needs() -> None:
    program = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (28, 28))\n" + JOINS
    done = limited(400, 4000, "-n", "2", sys.executable, "-c", program)
    assert done.returncode == 1
    assert "ConfigError: a rank needs 32 open files beside the" in done.stderr
    assert "the hard limit is 28; raise it (ulimit -Hn" in done.stderr
    assert "OSError" not in done.stderr


def test_rank_without_descriptors_for_a_link_says_what_to_do() -> None:
    program = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (44, 44))\n" + JOINS
    star = "--strategy", "star", "--transport", "tcp"
    done = limited(400, 4000, "-n", "12", *star, sys.executable, "-c", program)
    assert done.returncode == 1
    assert "Too many open files: 44 are allowed here, and the hard limit is 44; raise it" in done.stderr
    assert "OSError" not in done.stderr


COUNTS = """
import os
import resource
import numpy as np
import kfcomm

resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))

def show(when):
    comm.barrier()  # the links of every rank are open
    print(when, len(os.listdir("/proc/self/fd")), flush=True)

with kfcomm.sync.init() as comm:
    for _ in range(3):
        comm.all_reduce(np.ones(8), name="short")
    show("short")
    comm.all_reduce(np.ones(1 << 17), name="long")
    show("long")
"""


def test_descriptors_of_a_rank_do_not_grow_with_its_links() -> None:
    size = 24
    done = limited(400, 4000, "-n", str(size), sys.executable, "-c", COUNTS)
    assert done.returncode == 0, done.stderr
    assert "kfcomm" not in done.stderr, "close() was not quiet"
    counts = [int(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
    assert len(counts) == 2 * size
    assert max(counts) < 2 * size
    assert max(counts) < 64


def test_a_limit_that_is_high_enough_stays() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert raise_limit(1) == before[0]
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
