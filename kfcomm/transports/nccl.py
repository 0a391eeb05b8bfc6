"""NCCL as a collective backend, through CuPy (14 or newer).

Verbs that only move data move bytes of any type. Reductions need a type in which NCCL computes; the real and the
imaginary parts of complex numbers are added as separate numbers. ``gather`` and ``all_to_all`` are groups of sends and
receives, as NCCL has them, but for a rank's own part, which is copied.

Invariants: errors of NCCL become `TransportError` with its text. A communicator is not used once it is being aborted.
CuPy is imported when an `Nccl` is made, and not before.

NCCL reads its own environment. Useful variables: ``NCCL_DEBUG=WARN`` (or ``INFO``) prints what is behind an error;
``NCCL_SOCKET_IFNAME=eth0`` names the interface through which ranks on several hosts find each other, which kfcomm's
setting ``interface`` does not reach.

NCCL connects two ranks when a launch first needs it (2.22 and newer), so a launch may wait for the others' launches.
Only ``abort`` ends that wait, and a ``connect`` that another rank never joins does not end at all. So both are called
on a thread that can be abandoned.

The layers above match names: every rank makes the same launches in the same order.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any, Final
from weakref import WeakSet

import numpy as np

from kfcomm.arrays.devices import Device, Flat, Stream
from kfcomm.arrays.reduce.ops import REDUCTIONS
from kfcomm.errors import TransportError
from kfcomm.transports.base import CollectiveBackend, Launch, Part
from kfcomm.transports.nccl_graphs import Replayed
from kfcomm.types import Op, Verb, override

ABORT_PATIENCE_S: Final = 2.0
"""Grace for a launch under way, which may wait for a rank that never comes, before it is aborted regardless."""

_IN_PROGRESS: Final = 7  # ncclInProgress: no error
_BYTES: Final = "NCCL_UINT8"
_REDUCING: Final = (Verb.ALL_REDUCE, Verb.REDUCE, Verb.REDUCE_SCATTER)
_MOVING: Final = (Verb.BROADCAST, Verb.ALL_GATHER, Verb.GATHER, Verb.ALL_TO_ALL)
_OF_PEERS: Final = (Verb.GATHER, Verb.ALL_TO_ALL)
_OPS: Final = {op: reduction.nccl for op, reduction in REDUCTIONS.items() if reduction.nccl is not None}
_INTEGERS: Final = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
_FLOATS: Final = ("float16", "bfloat16", "float32", "float64")
_NUMBERS: Final = {name: f"NCCL_{name.upper()}" for name in (*_INTEGERS, *_FLOATS)}
_PAIRS: Final = {"complex64": "NCCL_FLOAT32", "complex128": "NCCL_FLOAT64"}


class Nccl:
    """Maker of backends over NCCL; ``cuda`` is ``cupy.cuda``, or a fake of it in a test.

    Raises:
        TransportError: CuPy or NCCL is missing, or cannot be loaded.
    """

    name = "nccl"

    def __init__(self, cuda: Any = None) -> None:
        self._cuda = _load() if cuda is None else cuda

    def supports(self, verb: Verb, dtype: np.dtype[Any], op: Op | None) -> bool:
        """Return whether it can: it moves anything, reduces 8 (integers), 16 (floats), 32, 64 bits, adds pairs."""
        if verb in _MOVING:
            return op is None
        if verb not in _REDUCING or op not in _OPS:
            return False
        if dtype.name in _INTEGERS:
            return op is not Op.AVG
        return dtype.name in _FLOATS or (dtype.name in _PAIRS and op in (Op.SUM, Op.AVG))

    def identity(self) -> bytes:
        """Return a unique id of NCCL. A thread of NCCL waits in this process for the ranks that present it."""
        with _explained("make an id for a group"):
            identity: bytes = self._cuda.nccl.get_unique_id()
        return identity

    def connect(self, identity: bytes, rank: int, size: int, device: Device) -> NcclBackend:
        """Meet the other ranks. Blocks until all are there, for ever if one does not come."""
        try:
            with _explained(f"connect rank {rank} of {size}"), self._cuda.Device(device.ordinal):
                communicator = self._cuda.nccl.NcclCommunicator(size, identity, rank)
        except (TypeError, ValueError) as error:  # CuPy does not take the id: it has another length or type
            raise TransportError(f"CuPy could not connect rank {rank} of {size}: {error}") from error
        return NcclBackend(self._cuda, communicator, rank, size, device)


class NcclBackend(CollectiveBackend):
    """NCCL communicator of one rank."""

    def __init__(self, cuda: Any, communicator: Any, rank: int, size: int, device: Device) -> None:
        self._cuda = cuda
        self._nccl = cuda.nccl
        self._communicator = communicator
        self._rank = rank
        self._size = size
        self._device = device
        self._failure: str | None = None
        self._ending = Lock()  # held for an instant
        self._is_over = False
        self._using = Lock()  # held for as long as NCCL takes
        self._graphs: WeakSet[Replayed] = WeakSet()  # those of launches that are still in use

    @override
    def launch(self, verb: Verb, parts: Sequence[Part], op: Op | None, root: int, stream: Stream) -> None:
        # NCCL knows nothing of parts without elements, whose memory may be nowhere.
        full = [part for part in parts if part.source.nbytes or (part.target is not None and part.target.nbytes)]
        with self._using:
            self._check_usable()
            try:
                with _explained(f"launch {verb}"), self._cuda.Device(self._device.ordinal):
                    self._launch(verb, full, op, root, stream)
            except TransportError as error:
                self._failure = str(error)
                raise

    @override
    def prepared(
        self, verb: Verb, sizes: tuple[int, int], dtype: np.dtype[Any], op: Op | None, root: int
    ) -> Launch | None:
        communicator = self._communicator
        rooted: tuple[int, ...] = ()
        match verb:
            case Verb.ALL_REDUCE | Verb.REDUCE | Verb.REDUCE_SCATTER:
                count = sizes[verb is Verb.REDUCE_SCATTER]
                numbers: tuple[int, ...] = self._numbers(count, dtype.name, op)
                rooted = (root,) if verb is Verb.REDUCE else ()
                name = {Verb.ALL_REDUCE: "allReduce", Verb.REDUCE: "reduce"}.get(verb, "reduceScatter")
            case Verb.ALL_GATHER | Verb.BROADCAST:
                count = sizes[0]
                numbers = self._bytes(count * dtype.itemsize)
                rooted = (root,) if verb is Verb.BROADCAST else ()
                name = "allGather" if verb is Verb.ALL_GATHER else "broadcast"
            case _:  # a group of sends and receives
                return None
        if not count:
            return None
        call, rest, using = getattr(communicator, name), (*numbers, *rooted), self._using
        reads_target = verb is Verb.BROADCAST and self._rank != root

        def launch(source: int, target: int, pointer: int) -> None:
            with using:
                if self._is_over or self._failure is not None:
                    self._check_usable()
                try:
                    call(target if reads_target else source, target, *rest, pointer)
                except (RuntimeError, KeyError) as error:
                    self._failure = _told(f"launch {verb}", error)
                    raise TransportError(self._failure) from error

        return launch

    @override
    def prepared_group(self, verb: Verb, sizes: Sequence[int], dtype: np.dtype[Any], op: Op | None) -> Launch | None:
        if verb is not Verb.ALL_REDUCE or not all(sizes):
            return None
        call = self._communicator.allReduce
        numbers = [self._numbers(size, dtype.name, op) for size in sizes]

        def put(sources: Sequence[int], targets: Sequence[int], pointer: int) -> None:
            with self._group():
                for source, target, (count, kind, operation) in zip(sources, targets, numbers, strict=True):
                    call(source, target, count, kind, operation, pointer)

        graph = Replayed(self._cuda, put, self._cannot_capture) if self._may_capture() else None
        if graph is None:
            self._cannot_capture("several ranks need NCCL_GRAPH_REGISTER=0")
        else:
            self._graphs.add(graph)

        def launch(sources: list[int], targets: list[int], pointer: int) -> None:
            with self._using:
                self._check_usable()
                try:
                    (put if graph is None else graph.launch)(sources, targets, pointer)
                except (RuntimeError, KeyError) as error:
                    self._failure = _told(f"launch {verb}", error)
                    raise TransportError(self._failure) from error

        return launch

    def _cannot_capture(self, reason: str) -> None:
        self.note = f"batches are launched without a CUDA graph: {reason}"

    def _may_capture(self) -> bool:
        # Where NCCL registers the memory of captured launches, ranks exchange it, so all would have to capture at once.
        return self._size == 1 or os.environ.get("NCCL_GRAPH_REGISTER") == "0"

    @override
    def failure(self) -> str | None:
        # A launch under way is not waited for: it reports its own failure.
        if self._failure is None and self._using.acquire(blocking=False):
            try:
                if not self._is_over:
                    self._failure = self._async_error()
            finally:
                self._using.release()
        return self._failure

    @override
    def abort(self) -> None:
        # A launch under way may take a little longer, since aborting in its midst is unsafe.
        if not self._end():
            return
        is_free = self._using.acquire(timeout=ABORT_PATIENCE_S)
        try:
            with suppress(Exception):
                self._drop_graphs()
                self._communicator.abort()
        finally:
            if is_free:
                self._using.release()

    @override
    def close(self) -> None:
        if self._end():
            with self._using, suppress(Exception):
                self._drop_graphs()
                self._communicator.destroy()

    # ---------------------------------------------------------------- inside

    def _end(self) -> bool:
        """Refuse further launches; whether this was the first such call."""
        with self._ending:
            is_first = not self._is_over
            self._is_over = True
        return is_first

    def _drop_graphs(self) -> None:
        for graph in list(self._graphs):
            graph.drop()

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise TransportError(self._failure)
        if self._is_over:
            raise TransportError("this group of NCCL has been aborted or closed")

    def _async_error(self) -> str | None:
        """Return an error of NCCL's own threads; call it only while the communicator is not in use."""
        try:
            with _explained("go on"):
                self._communicator.check_async_error()
        except TransportError as error:
            is_error = not (isinstance(error.__cause__, KeyError) and error.__cause__.args == (_IN_PROGRESS,))
            return str(error) if is_error else None
        return None

    def _launch(self, verb: Verb, parts: Sequence[Part], op: Op | None, root: int, stream: Stream) -> None:
        pointer: int = stream if isinstance(stream, int) else stream.ptr
        if verb in _OF_PEERS:
            for part in parts:
                self._keep_own(verb, part, stream)
            if self._size == 1:
                return
        if len(parts) == 1 and verb not in _OF_PEERS:
            self._enqueue(verb, parts[0], op, root, pointer)
        elif parts:
            with self._group():
                for part in parts:
                    self._enqueue(verb, part, op, root, pointer)

    @contextmanager
    def _group(self) -> Iterator[None]:
        """Launch everything within as one."""
        self._nccl.groupStart()
        try:
            yield
        except BaseException:
            # Left open, the group of this thread would swallow later launches; an error of its end adds nothing.
            with suppress(Exception):
                self._nccl.groupEnd()
            raise
        self._nccl.groupEnd()

    def _enqueue(self, verb: Verb, part: Part, op: Op | None, root: int, pointer: int) -> None:
        communicator = self._communicator
        source, target = part
        match verb:
            case Verb.ALL_REDUCE:
                communicator.allReduce(_at(source), _at(target), *self._numbers_of(source, op), pointer)
            case Verb.REDUCE:
                communicator.reduce(_at(source), _at(target), *self._numbers_of(source, op), root, pointer)
            case Verb.REDUCE_SCATTER:
                communicator.reduceScatter(_at(source), _at(target), *self._numbers_of(target, op), pointer)
            case Verb.ALL_GATHER:
                communicator.allGather(_at(source), _at(target), *self._bytes(source.nbytes), pointer)
            case Verb.BROADCAST:
                given: Flat = source if self._rank == root else target  # NCCL reads it on the root alone
                communicator.broadcast(_at(given), _at(target), *self._bytes(given.nbytes), root, pointer)
            case Verb.GATHER:
                self._gather(source, target, root, pointer)
            case Verb.ALL_TO_ALL:
                self._all_to_all(source, target, pointer)
            case _:
                raise TransportError(f"NCCL has no {verb}")

    def _gather(self, source: Flat, target: Flat | None, root: int, pointer: int) -> None:
        piece = self._bytes(source.nbytes)
        if self._rank != root:
            self._communicator.send(_at(source), *piece, root, pointer)
            return
        for peer in self._peers():
            self._communicator.recv(_at(target) + peer * source.nbytes, *piece, peer, pointer)

    def _all_to_all(self, source: Flat, target: Flat, pointer: int) -> None:
        nbytes = source.nbytes // self._size
        piece = self._bytes(nbytes)
        for peer in self._peers():
            self._communicator.send(_at(source) + peer * nbytes, *piece, peer, pointer)
            self._communicator.recv(_at(target) + peer * nbytes, *piece, peer, pointer)

    def _keep_own(self, verb: Verb, part: Part, stream: Stream) -> None:
        """Copy the part that this rank would send to itself."""
        if part.target is None:  # not the root of a gather
            return
        count = part.source.size if verb is Verb.GATHER else part.source.size // self._size
        mine = slice(self._rank * count, (self._rank + 1) * count)
        self._device.copy(part.source if verb is Verb.GATHER else part.source[mine], part.target[mine], stream)

    def _peers(self) -> list[int]:
        """Return the other ranks from the next one on, so that not all begin with the same."""
        return [(self._rank + step) % self._size for step in range(1, self._size)]

    def _numbers_of(self, flat: Flat, op: Op | None) -> tuple[int, int, int]:
        return self._numbers(flat.size, flat.dtype.name, op)

    def _numbers(self, size: int, name: str, op: Op | None) -> tuple[int, int, int]:
        """Return count, type and op with which NCCL reduces an array of this size and dtype."""
        if op not in _OPS or (name not in _NUMBERS and name not in _PAIRS):
            raise TransportError(f"NCCL does not reduce {name} by {op}")
        if op is Op.AVG and self._size == 1:
            op = Op.SUM  # equal for one rank; NCCL 2.28 omits the last of an odd number of float64
        operation = getattr(self._nccl, _OPS[op])
        if name in _PAIRS:
            return 2 * size, getattr(self._nccl, _PAIRS[name]), operation
        return size, getattr(self._nccl, _NUMBERS[name]), operation

    def _bytes(self, nbytes: int) -> tuple[int, int]:
        """Return count and type with which NCCL moves so many bytes."""
        return nbytes, getattr(self._nccl, _BYTES)


def _at(flat: Flat | None) -> int:
    """Return the address on the device; 0 for an argument that this rank does not use."""
    return 0 if flat is None else int(flat.data.ptr)


def _load() -> Any:
    """Import ``cupy.cuda`` with NCCL. Raises `TransportError`: CuPy or its NCCL is missing."""
    try:
        cuda = importlib.import_module("cupy.cuda")
        nccl = importlib.import_module("cupy.cuda.nccl")
    except ImportError as error:
        raise TransportError(f"NCCL is used through CuPy, which cannot be loaded: {error}") from error
    if not nccl.available:
        raise TransportError("CuPy finds no NCCL: install nvidia-nccl-cu12 or nvidia-nccl-cu13, as your CuPy has CUDA")
    return cuda


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Convert errors of NCCL and CUDA, both RuntimeErrors of CuPy, to `TransportError`."""
    try:
        yield
    except (RuntimeError, KeyError) as error:
        raise TransportError(_told(what, error)) from error


def _told(what: str, error: RuntimeError | KeyError) -> str:
    """Return an error of NCCL or CUDA in words."""
    if isinstance(error, KeyError):  # CuPy has no words for a status that is newer than itself
        return f"NCCL could not {what}: status {error} (NCCL_DEBUG=WARN prints more)"
    return f"NCCL could not {what}: {error}"
