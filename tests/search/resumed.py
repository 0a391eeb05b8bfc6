"""Jobs that are lost as a whole, again and again, and go on from their checkpoint: in virtual time, two samplers each.

python -m tests.search.resumed --seconds 60 --seed 1

A seed is one job: training and validation, in turns or one within a step of the other, by any ``on_loss``, with a file
that all ranks see or only those of a host. In each of its lives ranks are killed, stopped, join and go, the first one
mostly while the checkpoint is read. The job has to come to its end with each sample used once in each pass; no life
begins before the step of the file that is there; the file never goes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from random import Random
from typing import Any

from kfcomm.elastic import checkpoint
from kfcomm.elastic.checkpoint import about_of
from kfcomm.errors import ConfigError, EpochChanged, Partitioned, PeerLost, SessionClosed
from kfcomm.testing import Kill, VirtualRun, random_events, run_in_virtual_time
from kfcomm.testing.virtual.events import Event
from tests.elastic.turns import Turns
from tests.search import driver

TIMEOUT_S = 30.0
WITHIN_S = 600.0
MAX_LIVES = 12
TOLD = (PeerLost, EpochChanged, Partitioned, SessionClosed, ConfigError)


class Inline:
    """Does at once what it is given, where virtual time has no threads."""

    def __init__(self, *_: Any) -> None:
        self.is_closed = False

    def submit(self, call: Any, *args: Any) -> Future[Any]:
        """It is done when this returns."""
        done: Future[Any] = Future()
        done.set_result(call(*args))
        return done

    def shutdown(self) -> None:
        """Nothing is left."""
        self.is_closed = True


class SlowCheckpoint(checkpoint.Checkpoint):
    """To look at the file, and to read it, takes a while."""

    random = Random(0)

    async def find(self) -> Any:
        await asyncio.sleep(self.random.uniform(0, 0.01))
        found = await super().find()
        await asyncio.sleep(self.random.uniform(0, 0.01))
        return found

    async def read(self) -> Any:
        await asyncio.sleep(self.random.uniform(0, 0.01))
        place = await super().read()
        await asyncio.sleep(self.random.uniform(0, 0.01))
        return place


class Job:
    """One job, through all its lives.

    Args:
        seed: of all chance.
        folder: for its checkpoints.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.random = random = Random(seed)
        self._folder = folder
        self._is_local = random.random() < 0.3
        self._turns = Turns(random)
        self._every = random.choice([1, 1, 2, 5])
        self._hosts = random.choice([2, 3]) if self._is_local else 1
        self.num_resumed = self.num_refused = 0

    def path(self, host: int) -> Path:
        """Of the checkpoint, as a host sees it."""
        folder = self._folder / (str(host) if self._is_local else "all")
        folder.mkdir(exist_ok=True)
        return folder / "c.npz"

    def numbers(self) -> dict[int, int]:
        """The steps of the files that are there, by host."""
        found = {host: about_of(self.path(host)) for host in range(self._hosts)}
        return {host: one[0].number for host, one in found.items() if one is not None}

    async def main(self, comm: Any) -> Any:
        """One rank's life."""
        path = self.path(comm.layout.hosts[comm.rank] if self._is_local else 0)
        return await self._turns.run(comm, checkpoint=path, checkpoint_every=self._every)

    def live(self, seed: int, *, is_last: bool) -> VirtualRun:
        """One life."""
        random, size = Random(seed), self.random.choice([2, 3, 4])
        events: list[Event] = []
        if not is_last:
            events = list(random_events(random, size, horizon_s=0.2, elastic=random.random() < 0.4))
            if random.random() < 0.7:
                events += [Kill(0, random.uniform(0.0, 0.06))]
            if random.random() < 0.8:  # all are lost
                events += [Kill(rank, random.uniform(0.05, 0.25)) for rank in range(8)]
        self._turns.begun.clear()
        SlowCheckpoint.random = Random(seed)
        options = {"timeout": TIMEOUT_S, "within_s": WITHIN_S, "monitor": False, "hosts": min(self._hosts, size)}
        return run_in_virtual_time(self.main, size, seed=seed, events=events, **options)

    def run(self) -> tuple[int, int, int]:
        """All its lives; how many they were, how many began from a file, and in how many ranks ended by a ConfigError.

        Raises:
            AssertionError: something is not as it has to be.
        """
        for number in range(1, MAX_LIVES + 1):
            before = self.numbers()
            run = self.live(self.random.randrange(1 << 31), is_last=number == MAX_LIVES)
            self._check(run, before, self.numbers())
            self.num_resumed += bool(before and self._turns.begun)
            self.num_refused += any(isinstance(one, ConfigError) for one in run.failed.values())
            if any(isinstance(one, dict) for one in run.results.values()):
                return number, self.num_resumed, self.num_refused
            self._keep_one()
        raise AssertionError("it has not come to its end in its last life, in which nothing befell it")

    def _keep_one(self) -> None:
        """Put the latest file on the first host, as the error for several files advises."""
        numbers = self.numbers()
        last = max(numbers, key=lambda host: numbers[host], default=0)
        for host in numbers.keys() - {last}:
            self.path(host).unlink()
        if last:
            self.path(last).replace(self.path(0))

    def _check(self, run: VirtualRun, before: dict[int, int], after: dict[int, int]) -> None:
        for rank, error in run.failed.items():
            if not isinstance(error, TOLD):
                raise AssertionError(f"rank {rank} ended with {error!r}") from error
        begun = min(self._turns.begun, default=None)
        if before and begun is not None:
            assert begun >= min(before.values()), f"it began at {begun}, and {before} was there"
        for host, number in before.items():
            assert after.get(host, -1) >= number, f"the file of host {host} went from {number} to {after.get(host)}"
        self._turns.check([one for one in run.results.values() if isinstance(one, dict)])


@contextlib.contextmanager
def slow_checkpoints() -> Iterator[None]:
    """In virtual time, in which there are no threads."""
    import kfcomm.elastic.loop as loop

    was = loop.Checkpoint, checkpoint.ThreadPoolExecutor
    loop.Checkpoint, checkpoint.ThreadPoolExecutor = SlowCheckpoint, Inline  # type: ignore[misc, assignment]
    SlowCheckpoint.random = Random(0)  # the same times in any order of tests
    try:
        yield
    finally:
        loop.Checkpoint, checkpoint.ThreadPoolExecutor = was  # type: ignore[misc]


def search(seed: int) -> tuple[int, int, int]:
    """One job; see ``Job.run``.

    Raises:
        AssertionError: see `Job`.
    """
    with tempfile.TemporaryDirectory() as folder, slow_checkpoints():
        return Job(seed, Path(folder)).run()


def case(seed: int) -> dict[str, int]:
    """Run the job of a seed."""
    return dict(zip(("lives", "from a checkpoint", "refused"), search(seed), strict=True))


if __name__ == "__main__":
    gc.freeze()
    sys.exit(driver.run("resumed", case))
