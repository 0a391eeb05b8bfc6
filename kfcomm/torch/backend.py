"""One process group's backend: what torch calls, over one communicator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Backend as TorchBackend

from kfcomm.errors import KfcommError
from kfcomm.sync.communicator import Communicator
from kfcomm.torch.collectives import Collectives
from kfcomm.torch.messages import Messages
from kfcomm.torch.order import Calls
from kfcomm.torch.work import MAX_COMPLETERS

NAME = "kfcomm"
Base: Any = TorchBackend


class Backend(Collectives, Messages, Base):  # type: ignore[misc]
    """The backend of a process group, below torch's own ``ProcessGroup``.

    Args:
        comm: of the ranks of the group; closed with it.
        store: of this group alone.
        timeout: of its calls.
        closed: called with it when it is closed.
    """

    def __init__(self, comm: Communicator, store: Any, timeout: timedelta, closed: Callable[[Backend], object]) -> None:
        Base.__init__(self, comm.rank, comm.size)
        self._comm = comm
        self._store = store
        self._calls = Calls(store, comm.rank, comm.mismatched)
        self._completers = ThreadPoolExecutor(MAX_COMPLETERS, "kfcomm-torch")
        self._options = Base.Options(NAME, timeout)
        self._closed = closed
        self.set_timeout(timeout)

    @property
    def communicator(self) -> Communicator:
        """Of the ranks of this group."""
        return self._comm

    def getBackendName(self) -> str:  # noqa: N802  torch's
        """Its name."""
        return NAME

    @property
    def options(self) -> Any:
        """What torch asks for the timeout, and hands to a group that is split from this one."""
        return self._options

    def set_timeout(self, timeout: timedelta) -> None:
        """Calls that follow have this timeout, unless they are given another."""
        self._timeout = self._options._timeout = timeout
        self._comm.set_timeout(timeout)

    # torch looks these up on the class, and would ask itself for ever for those that it does not find there.
    supports_coalescing = supports_shrinking = supports_reconfigure = supports_window = False
    _supports_time_estimate = False

    def supports_tensor_alloc(self, device: int) -> bool:
        """No: tensors for exchange are allocated by torch."""
        return False

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives without a name were called."""
        return self._calls.number

    # ---------------------------------------------------------------- groups made of this one

    @property
    def supports_splitting(self) -> bool:
        """See ``dist.split_group``."""
        return True

    def eager_connect_single_device(self, device: Any) -> None:
        """Links are opened when they are used."""

    def split(self, store: Any, ranks: Sequence[int], opts: Any) -> Backend:
        """The backend of some of this group's ranks, which alone call it."""
        timeout = opts._timeout
        made = self._comm.group(ranks, opts.group_name or "split")
        return Backend(made, store, timeout, self._closed)

    # ---------------------------------------------------------------- the end

    def shutdown(self) -> None:
        """Close the communicator. May be called again."""
        self._closed(self)
        self._calls.close()
        self._completers.shutdown(wait=False)
        with contextlib.suppress(KfcommError):
            self._comm.close()

    def abort(self) -> None:
        """The same, without waiting for what the others may still need of this rank."""
        with contextlib.suppress(KfcommError):
            self._comm.__exit__(KfcommError, KfcommError("the process group is aborted"), None)
        self.shutdown()
