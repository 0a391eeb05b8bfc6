"""Runs the distributed tests that torch ships in its wheel, on three ranks, over any backend.

    python -m tests.torch.shipped --backend kfcomm [-k all_reduce] [--seconds 600]

torch's own runner starts three interpreters for each test, which import torch again. Here a process that has imported
it forks them. Prints ``ok``, ``skipped`` or ``failed`` for each test, and what those that failed have written.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import free_port

WORLD_SIZE = 3
TEST_WITHIN_S = 90.0
"""After this a test that hangs is ended."""
GRACE_S = 15.0
"""For the other ranks, when one has failed."""


class Outcome(NamedTuple):
    """Outcome of one test."""

    name: str
    word: str
    seconds: float
    output: str


def load(backend: str, folder: Path) -> Any:
    """The class of torch's tests, for this backend: it reads the environment, and what each backend can do."""
    os.environ.update(
        BACKEND=backend, WORLD_SIZE=str(WORLD_SIZE), TEMP_DIR=str(folder), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()), OMP_NUM_THREADS="1",
    )  # fmt: skip
    import torch
    from torch.testing._internal.common_distributed import DistTestCases

    torch.set_num_threads(1)
    for able in (*DistTestCases.backend_feature.values(), *DistTestCases.skip_collective.values()):
        if "gloo" in able:
            able.add(backend)
    from torch.testing._internal.distributed import distributed_test

    class TestShipped(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        pass

    return TestShipped


def names_of(tests: Any, wanted: str) -> list[str]:
    """Tests whose names contain one of the wanted words, without those for GPUs."""
    words = wanted.split(",")
    found = [name for name in sorted(dir(tests)) if name.startswith("test_") and any(word in name for word in words)]
    return [name for name in found if not any(word in name for word in ("cuda", "gpu", "nccl"))]


def run(tests: Any, name: str, folder: Path) -> Outcome:
    """One test, on all ranks."""
    begun_s = time.monotonic()
    for sub in ("barrier", "test_dir", "init_dir"):
        (folder / sub).mkdir(exist_ok=True)
    for old in folder.glob("*/*"):
        old.unlink()
    meeting = folder / "init_dir" / f"meeting-{name}"
    logs = [folder / f"rank{rank}.log" for rank in range(WORLD_SIZE)]
    children = {_fork(tests, name, rank, meeting, log): rank for rank, log in enumerate(logs)}
    codes = _wait(children)
    output = "".join(
        f"--- rank {rank}: {codes[rank]}\n{log.read_text(errors='replace')}" for rank, log in enumerate(logs)
    )
    return Outcome(name, _word(set(codes.values())), time.monotonic() - begun_s, output)


def _fork(tests: Any, name: str, rank: int, meeting: Path, log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        code = _child(tests, name, rank, meeting)
    except BaseException:  # noqa: BLE001  the parent is told by the log
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def _child(tests: Any, name: str, rank: int, meeting: Path) -> int:
    import faulthandler

    from torch.multiprocessing import Pipe

    faulthandler.dump_traceback_later(TEST_WITHIN_S - 5, exit=False)
    tests.setUpClass()
    _, pipe = Pipe()
    try:
        tests._run(rank, name, str(meeting), pipe)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _wait(children: dict[int, int]) -> dict[int, int]:
    """Exit codes by rank; negative: ended by a signal."""
    until_s = time.monotonic() + TEST_WITHIN_S
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        for pid, rank in children.items():
            if rank in codes:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[rank] = os.waitstatus_to_exitcode(status)
                if codes[rank] == 10 or codes[rank] < 0:
                    until_s = min(until_s, time.monotonic() + GRACE_S)
        if time.monotonic() > until_s:
            for pid, rank in children.items():
                if rank not in codes:
                    os.killpg(pid, signal.SIGKILL)
            until_s += 5
        time.sleep(0.01)
    return codes


def _word(codes: set[int]) -> str:
    if codes == {0}:
        return "ok"
    return "skipped" if all(72 <= code <= 100 for code in codes) else "failed"


def outcomes(backend: str, wanted: str) -> Iterator[Outcome]:
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        tests = load(backend, folder)
        for test in names_of(tests, wanted):
            yield run(tests, test, folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="kfcomm")
    parser.add_argument("-k", default="", help="of whose names a part is one of these, separated by commas")
    parser.add_argument("--verbose", action="store_true", help="show what failed tests wrote")
    arguments = parser.parse_args()
    counts: dict[str, int] = {}
    for one in outcomes(arguments.backend, arguments.k):
        counts[one.word] = counts.get(one.word, 0) + 1
        print(f"{one.word:8} {one.seconds:6.1f} s  {one.name}", flush=True)
        if one.word == "failed" and arguments.verbose:
            print(one.output, flush=True)
    print(counts)
    return 1 if counts.get("failed") else 0


if __name__ == "__main__":
    sys.exit(main())
