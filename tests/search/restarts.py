"""Jobs of processes that are killed between their start and their first step, and as a whole; started again each time.

python -m tests.search.restarts --seconds 60 --seed 1

Each job trains on two samplers in turns and has a checkpoint. In each of its lives the first rank, or another, is
killed at any moment until the first step; later all are, at once. No life begins before the step of the checkpoint,
and in the end each sample was used once in each pass.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

from kfcomm.elastic.checkpoint import about_of
from tests.launch.launched import environ
from tests.search import driver

LENGTHS = {"train": 60, "val": 20}
PASSES = 3
HANG_S = 180.0
MAX_LIVES = 30
PROGRAM = """
import json, os, signal, sys, threading, time
import numpy as np
import kfcomm
from kfcomm.elastic import Elastic, ElasticSampler, State

lengths, passes, path, doomed, last, size = json.loads(sys.argv[1])

def die(after_s):
    time.sleep(max(0, after_s))
    os.kill(os.getpid(), signal.SIGKILL)

state = State(train=np.zeros(lengths["train"]), val=np.zeros(lengths["val"]), weights=np.zeros(size))
with kfcomm.sync.init(elastic=True) as comm:
    me = comm.births[comm.rank]
    if str(me) in doomed:
        threading.Thread(target=die, args=(doomed[str(me)],), daemon=True).start()
    with Elastic(comm, state, checkpoint=path, checkpoint_every=1) as elastic:
        samplers = {kind: ElasticSampler(length, 4) for kind, length in lengths.items()}
        for number in range(passes):
            for kind, sampler in samplers.items():
                for step in elastic.steps(sampler, passes=number + 1, used_in="used"):
                    if step.number == last or (last < 0 and os.path.exists(path) and step.number >= -last):
                        os.kill(os.getpid(), signal.SIGKILL)
                    print("begins", step.number, flush=True)
                    mask = np.zeros(sampler.length)
                    mask[step.indices] = 1
                    setattr(state, kind, getattr(state, kind) + comm.all_reduce(mask, name="used"))
                    time.sleep(0.005)
    if not elastic.is_released:
        used = [sorted(set(getattr(state, kind).tolist())) for kind in lengths]
        print("used", json.dumps(used), flush=True)
"""


class Job:
    """One job, through all its lives."""

    def __init__(self, random: Random, folder: Path) -> None:
        self._random = random
        self._program = folder / "train.py"
        self._program.write_text(PROGRAM)
        self._path = folder / "c.npz"
        self._path.unlink(missing_ok=True)
        self._transport = random.choice(["shm", "unix", "tcp"])

    def number(self) -> int:
        """The step of the checkpoint; 0 without a checkpoint."""
        found = about_of(self._path)
        return 0 if found is None else found[0].number

    def run(self) -> Counter[str]:
        """All its lives; what they were like.

        Raises:
            AssertionError: something is not as it has to be.
        """
        found: Counter[str] = Counter()
        for _ in range(MAX_LIVES):
            before = self.number()
            command, code, out, err = self._live(before)
            lines = [line.partition("] ")[2] for line in out.splitlines()]
            begun = [int(line.split()[1]) for line in lines if line.startswith("begins ")]
            where = f"{' '.join(command)}\n{code}\n{out[-3000:]}\n{err[-3000:]}"
            assert code is not None, f"it hangs: {where}"
            assert not begun or min(begun) >= before, f"it began at {min(begun)}, and step {before} was there: {where}"
            assert self.number() >= before, f"the checkpoint went back from {before}: {where}"
            found["lives"] += 1
            found["from a checkpoint"] += bool(before and begun)
            found["outlived a death before the first step"] += bool(before and begun and "SIGKILL" in err)
            if any(line.startswith("used ") for line in lines):
                used = {line for line in lines if line.startswith("used ")}
                assert used == {f"used {json.dumps([[float(PASSES)]] * 2)}"}, where
                assert code == 0, where
                return found
        raise AssertionError(f"it has not come to its end in {MAX_LIVES} lives")

    def _live(self, before: int) -> tuple[list[str], int | None, str, str]:
        random, size = self._random, self._random.choice([2, 3, 4])
        victims = [0] if random.random() < 0.7 else random.sample(range(size), random.randrange(size))
        doomed = {str(rank): random.choice([0, 0.002, 0.01, 0.03, 0.1]) * random.random() for rank in victims}
        last = -(before + random.randrange(1, 12)) if random.random() < 0.7 else 1 << 30
        given = [LENGTHS, PASSES, str(self._path), doomed, last, random.choice([3, 3, 2_000_000])]
        options = ["-n", str(size), "--elastic", "1", "--transport", self._transport, "--timeout", "60"]
        command = [sys.executable, "-m", "kfcomm", "run", *options, sys.executable, str(self._program)]
        command.append(json.dumps(given))
        try:
            done = subprocess.run(command, env=environ(), capture_output=True, timeout=HANG_S)
        except subprocess.TimeoutExpired as hung:
            return command, None, (hung.stdout or b"").decode(), (hung.stderr or b"").decode()
        return command, done.returncode, done.stdout.decode(), done.stderr.decode()


def case(seed: int) -> dict[str, int]:
    """Run the job of a seed."""
    with tempfile.TemporaryDirectory() as folder:
        return Job(Random(seed), Path(folder)).run()


if __name__ == "__main__":
    sys.exit(driver.run("restarts", case))
