"""Elastic jobs whose store is in etcd and loses one answer: each of those that a whole job gets, in turn.

python -m tests.search.lost_answers --seconds 300 --seed 1

In each job a rank is killed and replaced, and another size is asked for. A job must end with 0, each sample be used
once, nothing be left in etcd. Some of the jobs lose a lease, or etcd is stopped for some seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import click

from tests import etcds
from tests.cutting import CuttingRelay, cutting
from tests.launch.jobs import TRAIN
from tests.launch.launched import environ

WITHIN_S = 90.0
STOPPED_S = 4.0
SIZED = """
            if comm.rank == 0 and step.number == 16:
                comm.propose_size(3)
            mask = np.zeros(LENGTH)"""


async def once(folder: Path, etcd: etcds.Etcd, number: int, what: str) -> tuple[int, int]:
    """One job; how many requests it has made, and how many answers it has lost."""
    (folder / "train.py").write_text(TRAIN.replace("\n            mask = np.zeros(LENGTH)", SIZED))
    prefix = f"job{number}{what}"
    async with cutting(etcd.ports[0], {number} if what == "cut" else ()) as relay:
        job = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kfcomm", "run", "-n", "2", "--elastic", "1:3", "--store",
            f"etcd://127.0.0.1:{relay.port}/{prefix}", sys.executable, "train.py", "900", "[[1, 8]]", "0.03",
            cwd=folder, env=environ(), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        harming = asyncio.ensure_future(_harm(etcd, what, prefix, relay, number))
        try:
            async with asyncio.timeout(WITHIN_S):
                out, _ = await job.communicate()
        except TimeoutError:
            job.kill()
            out, _ = await job.communicate()
            raise AssertionError(f"{what} {number}: it does not end\n{out.decode()}") from None
        finally:
            harming.cancel()
            await asyncio.gather(harming, return_exceptions=True)
            _continue(etcd)
    told = [line for line in out.decode().splitlines() if "] [[" in line]
    is_right = job.returncode == 0 and len(told) == 1 and json.loads(told[0].partition(" ")[2])[0] == [1.0]
    left = [key for key in etcd.held() if key.startswith(f"{prefix}/")]
    if not is_right or left or "3 ranks are wanted" not in out.decode():
        raise AssertionError(f"{what} {number}: code {job.returncode}, left {left}\n{out.decode()}")
    return relay.num_requests, relay.num_lost


async def _harm(etcd: etcds.Etcd, what: str, prefix: str, relay: CuttingRelay, number: int) -> None:
    """Wait for so many requests of the job; then do something to etcd."""
    if what == "cut":
        return
    while relay.num_requests < number:  # noqa: ASYNC110  another process has no event
        await asyncio.sleep(0.01)
    if what == "stop":
        process = etcd.processes[0]
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(STOPPED_S)
        _continue(etcd)
    else:
        await asyncio.to_thread(etcds.revoke_lease, etcd, prefix)


def _continue(etcd: etcds.Etcd) -> None:
    if (process := etcd.processes[0]) is not None:
        process.send_signal(signal.SIGCONT)


def main() -> int:
    """Search for so many seconds."""
    parser = argparse.ArgumentParser(prog="python -m tests.search.lost_answers")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if shutil.which("etcd") is None:
        click.echo("not searched: etcd is not installed (Debian's etcd-server)")
        return 0
    random, until_s = Random(given.seed), time.monotonic() + given.seconds
    done = {"cut": 0, "stop": 0, "revoke": 0}
    with tempfile.TemporaryDirectory() as name, etcds.running(Path(name) / "etcd") as etcd:
        count, _ = asyncio.run(once(Path(name), etcd, 0, "cut"))
        turns = random.sample(range(1, count + 1), count)
        while time.monotonic() < until_s:
            what = random.choices(list(done), [6, 1, 1])[0]
            number = turns.pop() if what == "cut" and turns else random.randrange(4, count)
            asyncio.run(once(Path(name), etcd, number, what))
            done[what] += 1
    click.echo(f"{count} requests in a job; " + ", ".join(f"{what}: {num}" for what, num in done.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
