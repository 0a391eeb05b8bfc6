"""Backend of one process group: the methods that torch calls, over one communicator."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from kfcomm.errors import CollectiveTimeout, ConfigError, KfcommError, PeerLost
from kfcomm.sync.communicator import Communicator
from kfcomm.torch.bases import NAME, Base, Options
from kfcomm.torch.c10d import MAX_COMPLETERS, NOTHING, Ending, TorchWork, as_torch
from kfcomm.torch.collectives import Collectives, Reported
from kfcomm.torch.compiling import uncompiled_methods
from kfcomm.torch.ddp import SharedBuffers
from kfcomm.torch.flight_record import FlightRecord, kept_calls, recorded
from kfcomm.torch.kept_works import with_kept_works
from kfcomm.torch.meeting import ProcessHandle, address_of, in_order, make_world, own
from kfcomm.torch.naming import TorchCalls
from kfcomm.torch.tensors import place, read

OUTCOME_WITHIN_S = 1.0
"""Wait after a rank's own timeout: rank 0 may have arrived later, and tells all ranks which are missing."""


@uncompiled_methods
class TorchMessages:
    """Messages between the ranks of one process group."""

    _comm: Communicator
    _completers: ThreadPoolExecutor
    _timeout: timedelta
    _num_monitored = 0

    def send(self, tensors: Sequence[Any], to: int, tag: int) -> Any:
        """Implement ``dist.isend``; done when the tensor may be changed."""
        (tensor,) = tensors
        handle = self._comm.send_async(read(tensor, as_bytes=True), to, tag)
        return TorchWork(handle, self._ending(tensors, None))

    def recv(self, tensors: Sequence[Any], source: int, tag: int) -> Any:
        """Implement ``dist.irecv``."""
        return self._receive(tensors, source, tag)

    def recv_anysource(self, tensors: Sequence[Any], tag: int) -> Any:
        """Implement ``dist.irecv``, from whichever rank sends first."""
        return self._receive(tensors, None, tag)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        """Implement ``dist.monitored_barrier``; with the group's timeout, unless it is given another."""
        # ``opts`` is a timeout, or None, where the backend is the group.
        # A timeout names the first missing rank on rank 0, or with ``wait_all_ranks`` all, and then fails the others.
        given = getattr(opts, "timeout", opts)
        timeout_s = (self._timeout if given is None or given < timedelta(0) else given).total_seconds()
        tag = f"monitored_barrier/{self._num_monitored}"
        self._num_monitored += 1
        try:
            if self._comm.rank == 0:
                self._attend(tag, timeout_s, wait_all_ranks)
            else:
                self._arrive(tag, timeout_s)
        except KfcommError as error:
            raise as_torch(error) from None

    def _receive(self, tensors: Sequence[Any], source: int | None, tag: int) -> Any:
        (tensor,) = tensors
        out, finish = place(tensor, as_bytes=True)
        handle = self._comm.recv_any_async(source, tag, out=out)
        return TorchWork(handle, self._ending(tensors, finish), is_any=True)

    def _ending(self, tensors: Sequence[Any], finish: Any) -> Ending:
        return Ending(tensors, finish, self._completers)

    def _attend(self, tag: str, timeout_s: float, wait_all_ranks: bool) -> None:
        """On rank 0: wait for all ranks, then send them the outcome."""
        if timeout_s <= 0:
            raise CollectiveTimeout(
                "[Rank 0]: Rank 0 timed out in monitoredBarrier after 0 ms", key="monitored_barrier"
            )
        others = range(1, self._comm.size)
        come = {rank: self._comm.recv_async(rank, tag, timeout=timeout_s) for rank in others}
        missing = []
        for rank, handle in come.items():
            try:
                handle.wait()
            except CollectiveTimeout:
                missing.append(rank)
                if not wait_all_ranks:
                    break
        # An empty outcome lets the ranks continue.
        outcome = np.array(missing, np.int64)
        for rank, handle in come.items():
            # A rank that has arrived by now, as its receive could not be cancelled any more, waits for the outcome.
            if rank not in missing and (handle.done() or not handle.cancel()):
                self._comm.send(outcome, rank, f"{tag}/outcome")
        if missing:
            raise self._late(missing, timeout_s)

    def _arrive(self, tag: str, timeout_s: float) -> None:
        """On other ranks: tell rank 0, and wait for its outcome."""
        # Longer than rank 0 waits, which then says which ranks are missing.
        said = self._comm.recv_async(0, f"{tag}/outcome", timeout=timeout_s + min(timeout_s, OUTCOME_WITHIN_S))
        self._comm.send(np.zeros(0, np.int64), 0, tag)
        missing = said.wait()
        if len(missing):
            raise self._late([int(rank) for rank in missing], timeout_s)

    def _late(self, missing: list[int], timeout_s: float) -> CollectiveTimeout:
        ranks = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
        rank = self._comm.rank
        text = f"[Rank {rank}]: {ranks} failed to pass monitoredBarrier in {1e3 * timeout_s:.0f} ms"
        if rank:
            reached = (
                "successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0"
            )
            text = f"[Rank {rank}]: Rank {rank} {reached}: {ranks} failed to pass it in {1e3 * timeout_s:.0f} ms"
        arrived = [one for one in range(self._comm.size) if one not in missing]
        return CollectiveTimeout(text, key="monitored_barrier", arrived=arrived, missing=missing)


if TYPE_CHECKING:
    from kfcomm.torch.registration import Worlds


@uncompiled_methods
class KfcommBackend(Collectives, TorchMessages, Base):  # type: ignore[misc]
    """The backend of a process group; see `bases`."""

    def __init__(self, comm: Communicator, store: Any, timeout: timedelta, keeper: Worlds) -> None:
        Base.__init__(self, comm.rank, comm.size)
        # Threads of the pool start with the first futures, so that groups without asynchronous calls have none.
        self._completers = ThreadPoolExecutor(MAX_COMPLETERS, "kfcomm-torch")
        self._options = Options(NAME, timeout)
        self._keeper = keeper
        self._enter(comm, store)
        self.set_timeout(timeout)
        num_kept = kept_calls()
        self.flight_record = FlightRecord(num_kept, store) if num_kept else None

    def _enter(self, comm: Communicator, store: Any) -> None:
        """Work on this communicator from now on."""
        self._comm = comm
        self._owned: list[Communicator] = [comm]  # closed with this backend, in this order
        self._latest = comm  # of the ranks that are left, while the group is being shrunk
        self._store = store
        self._calls = TorchCalls(store, comm.rank, comm.mismatched)
        self._buffers = SharedBuffers(comm) if comm.shares_memory else None
        self._reported, self._reported_twice = (Reported(self._calls, comm, steps) for steps in (1, 2))

    @property
    def communicator(self) -> Communicator:
        """Of the ranks of this group."""
        return self._comm

    def getBackendName(self) -> str:  # noqa: N802  torch's
        """Its name."""
        return NAME

    @property
    def options(self) -> Any:
        """Options as torch reads them: the timeout, which a group that is split from this one inherits."""
        return self._options

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of calls from now on that have none of their own."""
        self._timeout = self._options._timeout = timeout
        self._comm.set_timeout(timeout)

    # torch looks these up on the class; a missing one would send its own property into endless recursion.
    supports_coalescing = supports_window = False
    supports_splitting = supports_shrinking = supports_reconfigure = True
    _supports_time_estimate = False

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Whether peers read tensors of ``allocate_tensor`` where they are."""
        return self._buffers is not None and isinstance(device, torch.device) and device.type == "cpu"

    def _get_sequence_number_for_group(self) -> int:
        """Number of collectives called without a name."""
        return self._calls.number

    # ---------------------------------------------------------------- groups made of this one

    def eager_connect_single_device(self, device: Any) -> None:
        """Do nothing: links are opened when they are used."""

    def split(self, store: Any, ranks: Sequence[int], opts: Any) -> KfcommBackend:
        """The backend of some of this group's ranks, which alone call it; see ``dist.split_group``."""
        made = new_backend(self._comm.group(ranks, opts.group_name or "split"), store, opts._timeout, self._keeper)
        self._keeper.keep(made)
        return made

    def shrink(
        self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, opts_override: Any = None
    ) -> KfcommBackend:
        """The backend of the remaining ranks, which alone call it; see ``dist.shrink_group``."""
        # ``shrink_flags`` ask to abort calls in flight: needless, as calls match by name.
        uids = [uid for rank, uid in enumerate(self._comm.births) if rank not in ranks_to_exclude]
        try:
            self._latest = without_others(self._latest, uids, self._timeout.total_seconds())
            check_uids(self._latest, uids)
        except KfcommError as error:
            raise as_torch(error) from None
        timeout = self._timeout if opts_override is None else opts_override._timeout
        # A new group counts its calls from 0 and needs keys of its own; its size, which only falls, makes them unique.
        store = dist.PrefixStore(f"{SHRUNK}/{len(uids)}", self._store)
        made = new_backend(self._latest, store, timeout, self._keeper)
        # Their links may still be in use by groups made of this one: they are closed with the smaller group.
        made._owned += self._owned
        self._owned = []
        self._keeper.follow(self, made)
        return made

    def find_lost(self, timeout_s: float | None) -> list[int]:
        """Ranks of this group that are lost. The survivors agree on them, and are in the next epoch afterwards."""
        seconds = self._timeout.total_seconds() if timeout_s is None else timeout_s
        self._latest = of_those_that_live(self._latest, seconds)
        return [rank for rank, uid in enumerate(self._comm.births) if uid not in self._latest.births]

    # ---------------------------------------------------------------- other processes

    def get_reconfigure_handle(self) -> str:
        """The handle by which other processes find this one in ``reconfigure``."""
        return str(own.handle(self.rank(), address_of(self._store)))

    def reconfigure(self, opts: Any) -> Any:
        """Continue with these processes; see ``dist._reconfigure``. Complete when it returns."""
        timeout = self._timeout if opts.timeout is None else opts.timeout
        try:
            self._check_ranks(in_order(opts.handles))
            store, rank = own.meet(opts.handles, opts.uuid, timeout)
            self._abort()
            # If the next line fails, the group has no world, as before its first reconfigure, instead of a closed one.
            unmet: Any = Unmet(rank, self.size())
            self._enter(unmet, store)
            self._enter(make_world(store, rank, self.size(), timeout), store)
        except KfcommError as error:
            raise as_torch(error) from None
        self.set_timeout(self._timeout)
        return NOTHING

    def _check_ranks(self, handles: Sequence[ProcessHandle]) -> None:
        """Refuse other ranks or another size: torch's C++ keeps those of a backend unchanged."""
        moved = [(rank, one.rank) for rank, one in enumerate(handles) if one.rank != rank]
        if moved or len(handles) != self.size():
            why = f"process {moved[0][1]} would be rank {moved[0][0]}" if moved else f"{len(handles)} processes came"
            raise ConfigError(
                f"a group of {self.size()} ranks keeps its size and its ranks when it is reconfigured, and {why}: "
                "call kfcomm.torch.reconfigure, which makes the group anew"
            )

    # ---------------------------------------------------------------- the end

    def shutdown(self) -> None:
        """Close the communicator. May be called again."""
        self._keeper.forget(self)
        self._calls.close()
        if self.flight_record is not None:
            self.flight_record.close()
        self._completers.shutdown(wait=False)
        for comm in self._owned:
            with contextlib.suppress(KfcommError):
                comm.close()

    def abort(self) -> None:
        """Close the communicator without waiting for what other ranks may still need of this one."""
        self._abort()
        self.shutdown()

    def _abort(self) -> None:
        self._calls.close()
        for comm in self._owned:
            with contextlib.suppress(KfcommError):
                comm.__exit__(KfcommError, KfcommError("the process group is aborted"), None)


def new_backend(comm: Communicator, store: Any, timeout: timedelta, keeper: Worlds) -> KfcommBackend:
    """A backend, which records its calls if torch's variables say so."""
    made: KfcommBackend = _kind(is_recorded=kept_calls() > 0)(comm, store, timeout, keeper)
    return made


@cache
def _kind(*, is_recorded: bool) -> type[Any]:
    return with_kept_works(recorded(KfcommBackend) if is_recorded else KfcommBackend)


class Unmet:
    """Placeholder for a communicator until ``reconfigure`` makes one."""

    shares_memory = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name, name=name, obj=self)
        raise ConfigError(f"{name}: the ranks of this process group have not met: call dist._reconfigure first")

    def mismatched(self, name: str, seq: int, message: str) -> None:
        """Do nothing: no calls are made here."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: the backend keeps it."""

    def close(self) -> None:
        """Do nothing."""

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


SHRUNK = "shrunk"


def without_others(comm: Communicator, uids: Collection[int], timeout_s: float) -> Communicator:
    """The communicator of the surviving ranks of ``comm``, which alone have to call it, within the timeout."""
    if len(uids) == comm.size:
        return comm
    excluded = {rank for rank, uid in enumerate(comm.births) if uid not in uids}
    left = comm.group([rank for rank in range(comm.size) if rank not in excluded], SHRUNK, timeout=timeout_s)
    if comm.size < comm._session.layout.size:  # comm is a group: its world continues
        return left
    # If all of them know of the losses, the next epoch follows: then nothing is kept for the lost ranks any more.
    knows = comm._session.engine.router.lost.keys() >= excluded
    if not left.all_reduce(np.array([knows], np.uint8), f"{SHRUNK}/known", op="min")[0]:
        return left
    left.close()
    return comm.shrink(timeout=timeout_s)


def of_those_that_live(comm: Communicator, timeout_s: float) -> Communicator:
    """The communicator of the next epoch; ``comm`` itself, if the surviving ranks know of no loss."""
    is_whole = comm.agree(not comm._session.engine.router.lost, timeout=timeout_s)
    return comm if is_whole else comm.shrink(timeout=timeout_s)


def check_uids(comm: Communicator, uids: Collection[int]) -> None:
    """Refuse an epoch that lacks one of these uids."""
    lost = [uid for uid in uids if uid not in comm.births]
    if lost:
        raise PeerLost(f"more ranks were lost meanwhile: {lost}, by their first numbers; leave them out, too")
