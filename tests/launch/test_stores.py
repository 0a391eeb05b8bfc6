"""Elastic jobs whose store is kept in a folder or in etcd, and what asks for another size over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kfcomm.rendezvous.client import StoreClient
from kfcomm.world.epochs import RETIRE_AFTER_S
from tests import etcds
from tests.launch.jobs import HOW_LONG_S, LONG, SLOW, TRAIN, Job, kfcomm, outage
from tests.launch.launched import TOKEN, environ

pytestmark = pytest.mark.slow


def test_a_job_trains_and_leaves_nothing(job: Callable[..., Job], tmp_path: Path) -> None:
    store = tmp_path / "kept" / "store"
    made = job((2,), ["--elastic", "1:2", "--store", str(store)], 60, [[1, 3]], 0.05)
    assert made.ends() == [0], made.said(0)
    assert made.result()[0] == [1.0]
    assert sorted(os.listdir(store)) == ["lock", "token"]


def test_the_first_launcher_is_killed_and_started_again(store: str, job: Callable[..., Job], tmp_path: Path) -> None:
    made = job((1, 2), ["--elastic", "1:4", "--store", store], *SLOW)
    made.until(0, "job")
    assert kfcomm("resize", "4", made.name()).returncode == 0
    made.until(0, "4 ranks are wanted")
    made.launchers[0].kill()
    made.until(1, "is unreachable: automatic replacement is disabled")
    printed = len(made.said(0))
    made.start(0)
    made.until(1, "is back")
    made.until_members(4, printed)  # ranks that run need not have joined
    made.hurry()
    assert made.ends() == [0, 0], made.everything()
    used, births, most = made.result()
    assert (used, len(births), most) == ([1.0], 4, 4), made.everything()
    assert 0 not in births  # it was on the first host
    assert len(set(births)) == 4


def test_all_are_killed_and_started_again(store: str, job: Callable[..., Job]) -> None:
    made = job((2,), ["--elastic", "2:3", "--store", store], *SLOW)
    made.until(0, "job")
    assert kfcomm("resize", "3", made.name()).returncode == 0
    made.until(0, "3 ranks are wanted")
    made.launchers[0].kill()
    made.launchers[0].wait(HOW_LONG_S)
    printed = len(made.said(0))
    made.start(0)
    made.until_members(3, printed)
    made.hurry()
    assert made.ends() == [0], made.said(0)
    assert "are gone: it begins again" in made.said(0)
    used, births, _ = made.result()
    assert (used, births) == ([1.0], [0, 1, 2])  # the size that was asked for is known


def test_another_job_and_another_launcher_are_refused(store: str, job: Callable[..., Job]) -> None:
    made = job((2,), ["--elastic", "1:2", "--store", store], 1 << 20, [], 0.05)
    made.until(0, "job")
    second = kfcomm("run", "-n", "2", "--elastic", "1:2", "--store", store, "true")
    assert second.returncode != 0
    assert "is used by another launcher" in second.stderr
    assert json.loads(kfcomm("status", made.name(), "--json").stdout)["running"] == [0, 1]
    made.launchers[0].kill()
    made.launchers[0].wait(HOW_LONG_S)
    other = kfcomm("run", "-n", "3", "--elastic", "1:3", "--store", store, "true")
    assert other.returncode != 0
    assert "holds another job, which has not ended: hosts 127.0.0.1:2, 1 to 2 ranks" in other.stderr
    made.start(0)
    made.until(0, lambda said: said.count("job ") == 3)  # "holds a job of which no rank is left", and its own
    made.launchers[0].send_signal(signal.SIGINT)
    assert made.ends() == [128 + signal.SIGINT], made.said(0)


def test_without_a_quorum_a_job_trains_and_a_change_waits(job: Callable[..., Job], tmp_path: Path) -> None:
    with etcds.running(tmp_path / "etcd", 3) as three:
        found = outage(job((1, 1), ["--elastic", "1:4", "--store", three.store()], LONG, [], 0.2), three, 0.0)
        assert (found["each_sample_used"], len(found["births"]), found["most"]) == ([1.0], 4, 4), found
        assert 1 not in found["births"]
        assert found["keys_left"] == []


LATE = """
import asyncio, os
from kfcomm.rendezvous.keyvalue import ENTRY, INVITED
from kfcomm.rendezvous.client import StoreClient

async def late(self, key, timeout_s, get=StoreClient.get):
    found = await get(self, key, timeout_s)
    while key in (f"{ENTRY}/2", f"{INVITED}/2") and not os.path.exists("told"):
        await asyncio.sleep(0.05)
    return found

StoreClient.get = late
"""


def test_late_admission_does_not_harm_the_job(job: Callable[..., Job], tmp_path: Path) -> None:
    options = ["--elastic", "2:3", "--grace", "60"]  # after which the launcher kills whom the others have given up
    made = job((2,), [*options, "--store", str(tmp_path / "store")], LONG, [], 0.2, text=LATE + TRAIN)
    made.until(0, "job")
    assert kfcomm("resize", "3", made.name()).returncode == 0
    made.until(0, lambda said: "now 0 1 2" in said and said.count("now 0 1\n") == 2)  # it was let in, and given up
    time.sleep(2 * RETIRE_AFTER_S)  # its epoch is over, and closed as far as it ever is
    (tmp_path / "told").touch()
    made.until(0, "rank 2 ended (exit code 1); 2 go on; 1 started in its place")
    made.until(0, "now 0 1 3")
    made.hurry()
    assert made.ends() == [0], made.said(0)
    used, births, _ = made.result()
    assert (used, births) == ([1.0], [0, 1, 3])
    assert "the others have given this rank up: silent for" in made.said(0)


def test_joining_rank_of_a_prepared_epoch_needs_no_answer_of_the_store(job: Callable[..., Job], tmp_path: Path) -> None:
    late = LATE.replace('(f"{ENTRY}/2", f"{INVITED}/2")', '(f"{ENTRY}/2",)')
    made = job((2,), ["--elastic", "2:3", "--store", str(tmp_path / "store")], LONG, [], 0.2, text=late + TRAIN)
    made.until(0, "job")
    assert kfcomm("resize", "3", made.name()).returncode == 0
    made.until(0, "now 0 1 2")
    made.hurry()
    assert made.ends() == [0], made.said(0)
    used, births, _ = made.result()
    assert (used, births) == ([1.0], [0, 1, 2])
    assert not (tmp_path / "told").exists()


@pytest.mark.parametrize(
    ("store", "said"),
    [
        ("etcd://127.0.0.1:1/job", "etcd://127.0.0.1:1/job could not be reached within"),
        ("etcd://127.0.0.1:1", "needs a prefix"),
        ("/proc/none", "cannot keep a token in '/proc/none'"),
        ("/dev/full", "is not a directory of this user alone"),
    ],
)
def test_a_store_that_cannot_be_is_refused_before_anything_is_started(store: str, said: str) -> None:
    done = kfcomm("run", "-n", "2", "--timeout", "1", "--elastic", "1:2", "--store", store, "echo", "started")
    assert done.returncode != 0
    assert "started" not in done.stdout
    assert said in done.stderr, done.stderr


def test_a_store_is_for_elastic_jobs(tmp_path: Path) -> None:
    done = kfcomm("run", "-n", "2", "--store", str(tmp_path), "true")
    assert "--store needs --elastic" in done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="needs the right to mount a small disk")
def test_a_full_disk_is_told_of_and_the_job_goes_on(job: Callable[..., Job], tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], check=True)
    try:
        made = job((1, 1), ["--elastic", "1:3", "--store", str(small / "store")], LONG, [], 0.2)
        made.until(0, "job")
        with contextlib.suppress(OSError), (small / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(b"x" * 4096)
        asyncio.run(_told(f"http://127.0.0.1:{made.port}", b"x" * 8192))
        made.until(0, "No space left on device; the job goes on, and what changes")
        assert kfcomm("resize", made.name(), "3").returncode == 0
        made.until(0, "3 ranks are wanted; 1 started")
        made.hurry()
        assert made.ends() == [0, 0], made.said(0)
        assert made.result()[0] == [1.0]
        (small / "filler").unlink()
    finally:
        subprocess.run(["umount", "-l", small], check=True)


async def _told(url: str, value: bytes) -> None:
    client = StoreClient(url, TOKEN.encode())
    await client.set("x", value)
    await client.close()


def test_a_second_launcher_of_another_host_is_refused(job: Callable[..., Job], tmp_path: Path) -> None:
    made = job((1, 1), ["--elastic", "1:2", "--store", str(tmp_path / "store")], *SLOW)
    made.until(0, "job")
    port = made.port
    hosts = ["-H", "127.0.0.1:1,127.0.0.2:1", "--port", str(port), "--elastic", "1:2"]
    command = [sys.executable, "-m", "kfcomm", "run", "--self", "127.0.0.2", *hosts, "true"]
    done = subprocess.run(command, env=environ(KFCOMM_TOKEN=TOKEN), capture_output=True, text=True, timeout=600)
    assert done.returncode != 0
    assert "another launcher has come for this host before: process" in done.stderr
    made.hurry()
    assert made.ends() == [0, 0], made.everything()


def test_autoscaler_puts_a_size(job: Callable[..., Job], tmp_path: Path) -> None:
    made = job((1, 1), ["--elastic", "1:3", "--store", str(tmp_path / "store")], 1 << 20, [], 0.05)
    made.until(0, "job")
    url = f"http://127.0.0.1:{made.port}"

    def resize(*arguments: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kfcomm", "resize", "--store", url, *arguments]
        return subprocess.run(command, env=environ(KFCOMM_TOKEN=token), capture_output=True, text=True, timeout=600)

    assert "refuses this process: its token is not the job's" in resize("3", token="x" + TOKEN).stderr
    assert "size '4' is outside the job's range 1..3" in resize("4").stderr
    assert "got '0'" in resize("0").stderr
    assert resize("3").stdout == f"{url}: 3 ranks are wanted\n"
    made.until(0, "3 ranks are wanted; 1 started")
    snippet = (Path(__file__).parents[2] / "docs/howto/etcd.md").read_text().split("<!-- file: scale.py -->")[1]
    (tmp_path / "scale.py").write_text(snippet.split("```python\n")[1].split("```")[0])
    scaled = subprocess.run(
        [sys.executable, "scale.py", url, "1"], cwd=tmp_path, env=environ(KFCOMM_TOKEN=TOKEN), capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert scaled.stdout == "1 ranks are wanted\n\n", scaled.stderr
    made.until(0, "1 ranks are wanted")
    made.launchers[0].send_signal(signal.SIGINT)
    made.ends()
