"""Ranks in processes of their own that live through many tests: torch takes seconds to be imported.

`Fleet.run` calls a function of a test module on every rank, in a process group of its own.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

GROUP_TIMEOUT = timedelta(seconds=60)
"""Every wait ends by itself, so that a test that fails on one rank fails on all."""


class Fleet:
    """So many processes; started when they are first needed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: list[tuple[Any, Connection]] = []
        # For code that torch has compiled, and for stores: torch ends a process that has one when its folder is gone.
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._numbers = count()  # of stores

    def run(self, function: Callable[..., Any], *arguments: Any, backend: str = "kfcomm") -> list[Any]:
        """Call a function with its arguments on each rank, in a group of this backend; return the results."""
        meeting = Path(self.start().name) / f"meeting {next(self._numbers)}"
        for _, pipe in self._ranks:
            pipe.send((function, arguments, backend, f"file://{meeting}"))
        answers = [pipe.recv() for _, pipe in self._ranks]
        failed = [f"--- rank {rank}\n{told}" for rank, (is_well, told) in enumerate(answers) if not is_well]
        if failed:
            raise AssertionError("\n".join(failed))
        return [told for _, told in answers]

    def start(self) -> tempfile.TemporaryDirectory[str]:
        """Start the processes, unless they are there; return their folder."""
        if self._folder is not None:
            return self._folder
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, theirs, self._folder.name), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        for _, pipe in self._ranks:
            assert pipe.recv() == "ready"
        return self._folder

    def stop(self) -> None:
        """End them."""
        codes = {rank: process.exitcode for rank, (process, _) in enumerate(self._ranks)}
        if ended := {rank: code for rank, code in codes.items() if code is not None}:
            raise AssertionError(f"ranks have ended by themselves, with these exit codes: {ended}")
        for process, pipe in self._ranks:
            pipe.send(None)
            process.join()
            pipe.close()
            process.close()
        self._ranks.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _serve(rank: int, size: int, pipe: Connection, folder: str) -> None:
    os.environ.update(OMP_NUM_THREADS="1", TMPDIR=folder)
    tempfile.tempdir = folder
    faulthandler.enable()
    import torch

    torch.set_num_threads(1)
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        try:
            pipe.send((True, _called(rank, size, *asked)))
        except BaseException:  # noqa: BLE001  the test is told
            pipe.send((False, traceback.format_exc()))


def _called(
    rank: int, size: int, function: Callable[..., Any], arguments: tuple[Any, ...], backend: str, meeting: str
) -> Any:
    import torch.distributed as dist

    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=size, timeout=GROUP_TIMEOUT)
    try:
        return function(*arguments)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
