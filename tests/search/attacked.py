"""Everything at once in elastic jobs of processes: calls that ranks end, deaths, sizes, strategies, groups.

    python -m tests.search.attacked --count 100 --seed 1

Each rank goes through the program of the seed as ``tests.elastic.attacks`` has it, some with an event loop and some
without. Those that come to the end write down what each call gave; then all has to be one story, with right results and
each sample used once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import click
import numpy as np

import kfcomm
from kfcomm.errors import KfcommError
from tests.elastic import attacks, programs
from tests.launch.launched import environ
from tests.search import driver

SIZE = 4
TIMEOUT_S = 30.0
HANG_S = 240.0
NUM_STEPS = 25
STRATEGIES = ("ring", "star", "clique", "binary_tree", "auto")
ON_LOSS = ("finish", "finish", "raise", "restart_step")


class Ended(NamedTuple):
    """Report of a rank that ended normally: see ``attacks.Training``."""

    birth: int
    got: dict[tuple[int, int], programs.Got]
    views: dict[int, tuple[int, ...]]
    void: set[int]
    final: Any


def plan_of(seed: int) -> programs.Plan:
    """The program of a seed."""
    random = Random(seed)
    steps = [
        [
            (random.choice(programs.VERBS), random.choice(programs.ELEMENTS), random.randrange(SIZE))
            for _ in range(random.randrange(5))
        ]
        for _ in range(12)
    ]
    return programs.Plan(SIZE, steps, [], [], [], random.choice(ON_LOSS), programs.BATCH * NUM_STEPS)


class Life(attacks.Training):
    """A rank of a job that may die during any step."""

    def __init__(self, comm: Any, seed: int) -> None:
        super().__init__(comm, plan_of(seed), seed)
        self._chance = Random(f"{seed} {self.birth}")
        # Others die while their successors are yet to join: without one that lives on, nobody could let these in.
        self._spared = Random(f"{seed} spared").randrange(SIZE)

    async def _step(self, step: Any) -> None:
        shared = Random(f"{self._seed} {step.number} disturbed")
        size = shared.choice([2, 3, 4, 5])  # drawn by all ranks, which go on to draw the same
        if shared.random() < 0.15 and self.comm.rank == 0:
            await self.done(self.comm.propose_size, size)
        if shared.random() < 0.2:
            with contextlib.suppress(KfcommError):
                await self.done(self.comm.set_strategy, shared.choice(STRATEGIES), timeout=TIMEOUT_S)
        if shared.random() < 0.15 and self.comm.size > 2:
            await self._in_group(sorted(shared.sample(range(self.comm.size), 2)))
        is_spared = self.birth == self._spared or self._spared not in self.comm.births
        dying = self._chance.random() < 0.03 and self.comm.size > 2 and not is_spared
        if dying and self._chance.random() < 0.5:
            os.kill(os.getpid(), signal.SIGKILL)
        timer = threading.Timer(self._chance.random() * 0.01, os.kill, (os.getpid(), signal.SIGKILL))
        if dying:
            timer.start()
        await super()._step(step)
        if dying:
            timer.join()

    async def _in_group(self, ranks: list[int]) -> None:
        if self.comm.rank not in ranks:
            return
        with contextlib.suppress(KfcommError):
            group = await self.done(self.comm.group, ranks, "pair", timeout=3)
            if (await self.done(group.all_reduce, np.ones(3), timeout=3)).tolist() != [2, 2, 2]:
                raise AssertionError("a wrong sum in a group")
            await self.done(group.close)

    async def done(self, call: Any, *args: Any, **more: Any) -> Any:
        """Call it and wait."""
        return await call(*args, **more)

    @property
    def ended(self) -> Ended:
        """Report of this rank."""
        return Ended(self.birth, self.got, self.views, self.void, self.final)


class Blocking(Life):
    """The same without an event loop."""

    cancellations = (concurrent.futures.CancelledError,)

    async def run(self) -> None:
        """Train for one pass."""
        with self.comm.elastic_over(self._state, on_loss=self._plan.on_loss) as elastic:
            for step in elastic.steps(self._sampler(), used_in=self._used_in()):
                with self._entered(step):
                    await self._step(step)
        if not elastic.is_released:
            self.final = (self._state.total.copy(), self.comm.births)

    def begun(self, verb: str, *args: Any, **more: Any) -> Any:
        """The handle of a call."""
        return getattr(self.comm, f"{verb}_async")(*args, **more)

    async def done(self, call: Any, *args: Any, **more: Any) -> Any:
        """Call it."""
        return call(*args, **more)

    async def pause(self, seconds: float) -> None:
        """Let others go on."""
        time.sleep(seconds)  # noqa: ASYNC251 - there is no loop

    def cancel_after(self, seconds: float, handle: Any) -> None:
        """Cancel it, now or later, on another thread."""
        if seconds:
            threading.Timer(seconds, handle.cancel).start()
        else:
            handle.cancel()

    def is_ending(self, _: BaseException) -> bool:
        """Never: who is killed does nothing more."""
        return False

    async def waited(self, handle: Any, attack: attacks.Attack | None) -> Any:
        """The result; ``attack``: by this rank."""
        if attack is None or attack.how in ("cancel", "late", "refuse"):
            return handle.wait()
        try:
            return handle.wait(attack.delay_s)
        except kfcomm.CollectiveTimeout:
            raise
        except TimeoutError:
            handle.cancel()
            return handle.wait()


async def _run(seed: int) -> Ended:
    async with kfcomm.init(elastic=True, timeout=TIMEOUT_S) as comm:
        one = Life(comm, seed)
        await one.run()
        return one.ended


def _run_blocking(seed: int) -> Ended:
    with kfcomm.sync.init(elastic=True, timeout=TIMEOUT_S) as comm:
        one = Blocking(comm, seed)
        attacks.at_once(one.run())
        return one.ended


def rank(seed: int, folder: Path) -> None:
    """Be a rank of the job."""
    is_blocking = Random(os.getpid()).random() < 0.5
    ended = _run_blocking(seed) if is_blocking else asyncio.run(_run(seed))
    (folder / f"{ended.birth}").write_bytes(pickle.dumps(ended))


def job(seed: int, transport: str) -> str:
    """One job; what befell it, in words.

    Raises:
        AssertionError: it hangs, fails, or tells more than one story.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = ["-n", str(SIZE), "--elastic", "2:5", "--restart-limit", "30", "--transport", transport]
        program = [sys.executable, "-m", "tests.search.attacked", "--rank", str(seed), folder]
        command = [sys.executable, "-m", "kfcomm", "run", *options, *program]
        try:
            done = subprocess.run(command, env=environ(), capture_output=True, timeout=HANG_S)
        except subprocess.TimeoutExpired as hung:
            raise AssertionError(
                f"seed {seed}, {transport}: it hangs\n{_text(hung.stdout)}{_text(hung.stderr)}"
            ) from None
        said = f"seed {seed}, {transport}: {done.returncode}\n{_text(done.stdout)}{_text(done.stderr)}"
        living: list[Any] = [pickle.loads(one.read_bytes()) for one in Path(folder).iterdir()]
    if done.returncode or not living:
        raise AssertionError(said)
    plan = plan_of(seed)
    try:
        programs.check(seed, plan, living, attacks.ended(seed, plan, living))
    except AssertionError as error:
        raise AssertionError(f"{error}\n{said}") from error
    return f"{transport}, {plan.on_loss}, {len(living)} ended, {said.count('SIGKILL')} lines of deaths"


def _text(said: bytes | None) -> str:
    return (said or b"").decode(errors="replace")


def case(seed: int) -> dict[str, int]:
    """Run the job of a seed."""
    click.echo(f"seed {seed}, {job(seed, Random(seed).choice(['shm', 'unix', 'tcp']))}")
    return {}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(int(sys.argv[2]), Path(sys.argv[3]))
    else:
        sys.exit(driver.run("attacked", case))
