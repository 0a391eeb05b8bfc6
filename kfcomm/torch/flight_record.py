"""The latest calls of this process's groups, in the format of torch's Flight Recorder, which ``torchfrtrace`` reads.

As in torch, ``TORCH_FR_BUFFER_SIZE``, the number of calls to keep, switches the recorder on. Without it nothing is
recorded, and calls have no extra cost. When a call fails, this rank writes its record and sets a word in
torch's store; a thread of every rank looks for it each second. So the record of a rank that is stuck in its own code is
written as well.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kfcomm.errors import ConfigError
from kfcomm.torch.compiling import uncompiled_methods
from kfcomm.torch.kept_works import above

SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Variables of torch; the older name comes second."""
VERSION = "2.10"
"""Of the format: that of torch 2.13."""
LIBRARY = "gloo"
"""``torchfrtrace`` refuses names of libraries that it does not know; this is the one for tensors in host memory."""
MAX_FRAMES = 64
LOOK_EVERY_S = 1.0
WRITE = "kfcomm/flight_record"
"""Word in torch's store: write the record."""

COLLECTIVES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "allreduce_coalesced",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "allgather": "all_gather",
    "all_gather_single": "_all_gather_base",
    "allgather_coalesced": "ALLGATHER_coalesced",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "_reduce_scatter_base",
    "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all_single",
}
"""Methods of a backend, and the names by which ``torchfrtrace`` knows them."""
IN_PLACE = frozenset({"allreduce", "allreduce_coalesced", "reduce", "broadcast"})


@dataclass(slots=True, eq=False)
class RecordedCall:
    """A call of one group.

    Attributes:
        record_id: in the order of all groups of this process.
        seq: number in its group, from 1.
        inputs, outputs: shape and dtype of each tensor.
        frames: file, line and function, innermost first.
    """

    record_id: int
    seq: int
    name: str
    inputs: list[tuple[list[int], str]]
    outputs: list[tuple[list[int], str]]
    timeout_ms: int
    frames: list[dict[str, Any]]
    created_ns: int
    state: str = "started"
    completed_ns: int | None = None

    def complete(self) -> None:
        """Note that its result is there."""
        self.state, self.completed_ns = "completed", time.time_ns()

    def as_entry(self, group: tuple[str, str]) -> dict[str, Any]:
        """The call in torch's format, of a group with this name and description."""
        return {
            "record_id": self.record_id,
            "pg_id": 0,
            "process_group": group,
            "collective_seq_id": self.seq,
            "p2p_seq_id": 0,
            "op_id": self.seq,
            "is_p2p": False,
            "profiling_name": f"{LIBRARY}:{self.name}",
            "input_sizes": [shape for shape, _ in self.inputs],
            "input_dtypes": [dtype for _, dtype in self.inputs],
            "output_sizes": [shape for shape, _ in self.outputs],
            "output_dtypes": [dtype for _, dtype in self.outputs],
            "state": self.state,
            "time_created_ns": self.created_ns,
            "time_discovered_started_ns": self.created_ns,
            "time_discovered_completed_ns": self.completed_ns,
            "retired": self.state == "completed",
            "timeout_ms": self.timeout_ms,
            "frames": self.frames,
        }


class FlightRecord:
    """The calls of one group, as many as are kept."""

    def __init__(self, size: int, store: Any) -> None:
        self.calls: deque[RecordedCall] = deque(maxlen=size)
        self.seq = 0
        self._writer = _Writer(store)
        self.close = self._writer.close

    def begin(self, name: str, inputs: Sequence[Any], outputs: Sequence[Any], timeout: Any) -> RecordedCall:
        """Record a call that is made now."""
        self.seq += 1
        given, made = ([_shape(one) for one in tensors] for tensors in (inputs, outputs))
        timeout_ms = int(1e3 * timeout.total_seconds())
        call = RecordedCall(next(_records), self.seq, name, given, made, timeout_ms, [*_frames()], time.time_ns())
        self.calls.append(call)
        return call

    def end(self, call: RecordedCall, handle: Any) -> None:
        """Note that the collective of a call is over."""
        if handle.cancelled():
            return
        if handle.exception() is None:
            call.complete()
        else:
            self.failed(is_waiting=False)

    def failed(self, *, is_waiting: bool) -> None:
        """Let all ranks of the group write their records; ``is_waiting``: on this thread, as the program may end."""
        self._writer.ask()
        if is_waiting:
            self._writer.write_if_asked()

    def status(self) -> dict[str, int]:
        """The latest calls that were begun and are complete, in torch's format."""
        done = [call.seq for call in list(self.calls) if call.state == "completed"]  # other threads add calls
        latest = {"last_enqueued_collective": self.seq, "last_started_collective": self.seq}
        return latest | {"last_completed_collective": done[-1] if done else -1}


def kept_calls() -> int:
    """Number of calls to keep for each group, by torch's variables; 0: none is recorded.

    Raises:
        ConfigError: its value is not a number.
    """
    for name in SIZES:
        if text := os.environ.get(name, ""):
            if not text.isdecimal():
                raise ConfigError(f"{name} is a number of calls, not {text!r}")
            return int(text)
    return 0


def recorded(backend: type) -> type:
    """A subclass of a backend that records its calls in ``flight_record``."""
    methods: dict[str, Any] = {name: _recording(name, getattr(backend, name)) for name in COLLECTIVES}
    about = {"__doc__": backend.__doc__, "__module__": backend.__module__}
    return uncompiled_methods(type(backend.__name__, (backend,), methods | about))


def _recording(method: str, make: Callable[..., Any]) -> Callable[..., Any]:
    """The method, with a record of each call."""

    @wraps(make)
    def call(self: Any, *given: Any, **by_name: Any) -> Any:
        given += tuple(by_name.values())  # torch gives the last ones by name, in order
        timeout = getattr(given[-1], "timeout", timedelta(0))  # see ``kept_works.PLAIN``
        if timeout <= timedelta(0):  # that of the group
            timeout = self.options._timeout
        begun = self.flight_record.begin(COLLECTIVES[method], *_tensors(method, given), timeout)
        try:
            work = make(self, *given)
        except Exception:
            self.flight_record.failed(is_waiting=True)
            raise
        handle = getattr(work, "_handle", None)
        if handle is None:
            begun.complete()
        else:
            handle.add_done_callback(partial(self.flight_record.end, begun))
        return work

    return call


def _tensors(method: str, given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Inputs and outputs of a call, by its arguments."""
    if method == "barrier":
        return [], []
    if method in IN_PLACE:
        return [*given[0]], [*given[0]]
    outputs, inputs = given[:2]
    return _list(inputs), _list(outputs)


def _list(tensors: Any) -> list[Any]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return list(tensors)


def _shape(one: Any) -> tuple[list[int], str]:
    """Shape and dtype of a tensor, or of a list of them, which is shown as one with a further dimension."""
    if isinstance(one, torch.Tensor):
        return list(one.shape), _dtype(one)
    return ([len(one), *one[0].shape], _dtype(one[0])) if one else ([], "")


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _frames() -> Iterator[dict[str, Any]]:
    """The lines that led to a call, innermost first, without those of kfcomm."""
    frame: Any = above(3)
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        code = frame.f_code
        if not code.co_filename.startswith(OURS):
            yield {"name": code.co_name, "filename": code.co_filename, "line": frame.f_lineno}
        frame = frame.f_back


OURS = str(Path(__file__).parents[1])
_records = count()
"""Numbers of the calls of this process."""


# ---------------------------------------------------------------- files


class _Writer:
    """Writes the record when a call of a group fails on any of its ranks."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._asked = self._stopped = False
        self._wake = threading.Event()
        self._num_failures = 0  # of all ranks, as far as known
        self._thread = threading.Thread(target=self._watch, name="kfcomm-torch-record", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def ask(self) -> None:
        """Let all ranks write their records soon."""
        self._asked = True
        self._wake.set()

    def write_if_asked(self) -> None:
        """Write the record, if a call has failed here or on another rank."""
        # A record that cannot be written, or a store that is gone, must not hide the failure that led here.
        with self._lock, contextlib.suppress(RuntimeError, OSError, ConfigError):
            failures = self._store.add(WRITE, int(self._asked))
            if failures > self._num_failures:
                self._asked, self._num_failures = False, failures
                dump_flight_record()

    def close(self) -> None:
        """Stop, after writing what was asked for. May be called again."""
        atexit.unregister(self.close)
        if self._stopped:
            return
        self._stopped = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopped:
            self._wake.wait(LOOK_EVERY_S)
            self._wake.clear()
            if self._asked or not self._stopped:
                self.write_if_asked()


def dump_flight_record(prefix: str | None = None) -> Path:
    """Write the latest calls of all groups of this process for ``torchfrtrace``, and return the file's path.

    It is written by itself, on all ranks of a group, when a call of it fails. Calls are recorded if
    ``TORCH_FR_BUFFER_SIZE``, the number of calls to keep for each group, was set when a group was made.

    ::

        TORCH_FR_BUFFER_SIZE=2000 TORCH_FR_DUMP_TEMP_FILE=/tmp/job/rank_ torchrun ... train.py
        torchfrtrace /tmp/job --prefix rank_

    Calls are in the order in which this rank has made them, as torch matches them; calls in `named` blocks, which need
    no common order, may be shown as mismatches. Messages are left out, as with Gloo.

    Args:
        prefix: of the file's path, to which the rank is appended; None: ``TORCH_FR_DUMP_TEMP_FILE``, without that
            ``/tmp/nccl_trace_rank_``, as with torch.

    Raises:
        ConfigError: no group of this process records its calls.
        OSError: the file cannot be written.
    """
    found = [*_recording_groups()]
    if not found:
        raise ConfigError(f"no calls are recorded: set {SIZES[0]} to the number of calls to keep")
    calls = [(call, group) for group, _, record in found for call in list(record.calls)]
    calls.sort(key=lambda one: one[0].record_id)
    written = {
        "version": VERSION,
        "comm_lib_version": "kfcomm",
        "pg_config": {name: {"name": name, "desc": text, "ranks": str(ranks)} for (name, text), ranks, _ in found},
        "pg_status": {name: record.status() for (name, _), _, record in found},
        "entries": [call.as_entry(group) for call, group in calls],
    }
    if prefix is None:
        prefix = next(filter(None, map(os.environ.get, PREFIXES)), "/tmp/nccl_trace_rank_")
    path = Path(f"{prefix}{dist.get_rank()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".part-{path.name}")
    part.write_bytes(pickle.dumps(written))
    part.replace(path)  # a reader finds a whole file
    return path


def _recording_groups() -> Iterator[tuple[tuple[str, str], list[int], FlightRecord]]:
    """Name and description, ranks in the default group, and record of each group that records its calls."""
    world: Any = dist.distributed_c10d._world
    for group, name in list(world.pg_names.items()):
        with contextlib.suppress(AttributeError, RuntimeError):  # groups of other libraries
            backend = group._get_backend(torch.device("cpu"))
            if backend.flight_record is not None:
                yield (name, group.group_desc), sorted(world.pg_group_ranks[group]), backend.flight_record
