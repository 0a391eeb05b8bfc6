"""DeepSpeed's all_reduce through shared memory, ``inference_all_reduce``, as ``deepspeed.comm`` uses it on CPUs.

The operator is compiled when DeepSpeed is installed, see the Makefile. Its ranks wait without yielding, call after
call: there are no calls in the background.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.compare.contenders.base import Library, UnavailableError
from bench.compare.data import Array
from kfcomm.types import override

OPERATOR = "deepspeed.ops.comm.deepspeed_shm_comm_op"
LOG = Path(sys.prefix) / "deepspeed.log"
"""Output of the installation."""
SHARED = Path("/dev/shm")
SEGMENT_MIB = 67
"""Shared memory of one rank: two buffers of 32 MiB, two of 1 MiB, and a few bytes."""
AVX2 = 1
"""Level of instructions that float32 needs, as the operator reports it; the other dtypes need AVX-512."""
CAUSE = re.compile(r"error: (?!subprocess-exited|failed building|failed to build)(.+)", re.IGNORECASE)
CAUSE_MAXIMUM = 160


class DeepSpeed(Library):
    """The world named by ``RANK``, ``WORLD_SIZE`` and ``COMPARE_MEETING`` (a folder). Its ranks meet through Gloo.

    Raises:
        UnavailableError: DeepSpeed is not installed, was not built, or cannot be used on this machine.
    """

    def __init__(self) -> None:
        extension = loaded()
        check_processor(extension.vector_kernel_level())
        check_memory(int(os.environ["WORLD_SIZE"]))
        torch = import_module("torch")
        self._gloo: Library = import_module("bench.compare.contenders.gloo").Gloo()
        self.rank, self.size = self._gloo.rank, self._gloo.size
        self._sum = torch.ops.deepspeed.inference_all_reduce_
        self._meeting = torch.zeros(1)
        self._share(extension)

    def _share(self, extension: Any) -> None:
        """Maps the memory of all ranks, then removes its name: DeepSpeed itself never does."""
        meeting = Path(os.environ["COMPARE_MEETING"])
        world = f"{meeting.parent.parent.name}-{meeting.parent.name}"
        os.environ |= {"LOCAL_SIZE": str(self.size), "MASTER_ADDR": world, "MASTER_PORT": "0"}
        extension.initialize(self.size, self.rank)
        self._gloo.barrier()
        for segment in SHARED.glob(f"deepspeed_allreduce_buffer_*_{world}_0_{self.rank}"):
            segment.unlink()

    @override
    def barrier(self) -> None:
        self._gloo.barrier()  # sleeps: a rank that has finished must not take the processor from one that works
        self._sum(self._meeting)  # starts the ranks at the same time

    @override
    def wrap(self, number: int, array: Array) -> Any:
        return self._gloo.wrap(number, array)

    @override
    def all_reduce(self, item: Any) -> object:
        return self._sum(item)

    @override
    def all_reduce_all(self, items: Sequence[Any]) -> None:
        for item in items:
            self._sum(item)

    @override
    def versions(self) -> dict[str, str]:
        return {"deepspeed": version("deepspeed"), **self._gloo.versions()}

    @override
    def close(self) -> None:
        self._gloo.close()


def loaded() -> Any:
    """Load the compiled operator into torch. DeepSpeed's own loader would compile a missing one, on every rank.

    Raises:
        UnavailableError: it is not there, or is for another torch.
    """
    try:
        return import_module(OPERATOR)
    except ImportError as error:
        raise UnavailableError(reason(str(error), LOG)) from error


def reason(error: str, log: Path) -> str:
    """Return in one line why the operator is missing: by the log of its installation, else by the import's error."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    if cause := CAUSE.search(text):
        return f"not built: {shortened(cause[1])}"
    return f"not installed: {shortened(error)}"


def shortened(text: str) -> str:
    """The first line, of bounded length."""
    line = text.strip().partition("\n")[0].strip()
    return line if len(line) <= CAUSE_MAXIMUM else f"{line[:CAUSE_MAXIMUM]}…"


def check_processor(level: int) -> None:
    """Raises `UnavailableError` where float32 would need instructions that the processor lacks."""
    if level < AVX2:
        raise UnavailableError("its float32 kernel needs AVX2, which this processor lacks")


def check_memory(size: int, shared: Path = SHARED) -> None:
    """Raises `UnavailableError` where ``shared`` is too small for ``size`` ranks: they would crash."""
    space = os.statvfs(shared)
    free_mib = (space.f_bavail * space.f_frsize) >> 20
    if free_mib < size * SEGMENT_MIB:
        raise UnavailableError(f"{size} ranks need {size * SEGMENT_MIB} MiB in {shared}, {free_mib} MiB are free")
