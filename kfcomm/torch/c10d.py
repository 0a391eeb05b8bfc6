"""Types of ``torch.distributed`` in terms of kfcomm's: errors, reduce ops, and the ``TorchWork`` of asynchronous calls.

torch 2.15 wraps a Work that is made in Python in one of its own, which forwards ``wait`` and ``get_future`` alone;
`forward` makes it forward the rest.

Sparse tensors are summed as Gloo does it: the entries of all ranks are gathered, and added up on each rank in the order
of the ranks. With n ranks, z entries per rank and r elements per entry, a rank receives n·z·(r elements + indices).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from datetime import timedelta
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from kfcomm.errors import CollectiveTimeout, ConfigError, KfcommError
from kfcomm.sync.handle import Handle
from kfcomm.torch.compiling import uncompiled_methods
from kfcomm.torch.failures import keep
from kfcomm.torch.kept_works import KEPT
from kfcomm.torch.steps import PassEnding, called_by_pass, queue_callback
from kfcomm.torch.tensors import place, read
from kfcomm.types import Op


def as_torch(error: KfcommError) -> KfcommError:
    """The same error, which ``except RuntimeError`` and ``except DistBackendError`` catch as well as its own class."""
    kind: Any = type(error)
    if not issubclass(kind, dist.DistBackendError):
        error.__class__ = _both(kind)
        if isinstance(error, CollectiveTimeout):  # the word by which programs for torch know it
            error.args = (f"{error} (the timeout of the call, or of its process group)",)
    return error


@cache
def _both(kind: type[KfcommError]) -> type[KfcommError]:
    base: Any = dist.DistBackendError
    made = type(kind.__name__, (kind, base), {"__doc__": kind.__doc__, "__module__": kind.__module__})
    return cast("type[KfcommError]", made)


Kind = dist.ReduceOp.RedOpType

OPS = {
    Kind.SUM: Op.SUM,
    Kind.AVG: Op.AVG,
    Kind.PRODUCT: Op.PROD,
    Kind.MIN: Op.MIN,
    Kind.MAX: Op.MAX,
    Kind.BAND: Op.AND,
    Kind.BOR: Op.OR,
    Kind.BXOR: Op.XOR,
    Kind.PREMUL_SUM: Op.SUM,
}
# An enum of C++: two that are equal need not be the same object.
BY_NUMBER = {hash(kind): op for kind, op in OPS.items()}
PLAIN_SUM, PREMULTIPLIED = hash(Kind.SUM), hash(Kind.PREMUL_SUM)
FOR_BOOL = {Op.SUM: Op.OR, Op.PROD: Op.AND, Op.MAX: Op.OR, Op.MIN: Op.AND}
"""A bool cannot hold a count: a sum is true if any summand is."""


def meaning_of(reduce_op: Any, dtype: Any) -> tuple[Op, Any]:
    """The op of a ``ReduceOp`` for tensors of this dtype, and the factor of each tensor before it; None for 1."""
    number = hash(reduce_op)  # its number, in one call of C++
    if number == PLAIN_SUM and dtype is not torch.bool:
        return Op.SUM, None
    op = BY_NUMBER.get(number)
    if op is None:
        kind = reduce_op.op if isinstance(reduce_op, dist.ReduceOp) else reduce_op
        raise ConfigError(f"op {kind} is not supported; supported are {', '.join(one.name for one in OPS)}")
    if dtype is torch.bool:
        op = FOR_BOOL.get(op, op)
    factor = reduce_op.__getstate__()[1] if number == PREMULTIPLIED else None
    return op, factor


def whole_mean(op: Op, finish: Callable[[], object] | None, tensor: Any, size: int) -> tuple[Op, Any]:
    """Turn an average of integers into a sum and a division by the size, truncated as NCCL does it."""
    if op is not Op.AVG or tensor.is_floating_point() or tensor.is_complex():
        return op, finish

    def divide() -> None:
        if finish is not None:
            finish()
        tensor.detach().div_(size, rounding_mode="trunc")

    return Op.SUM, divide


def sparse_parts(tensor: Any, reduce_op: Any) -> tuple[Any, Any]:
    """Indices and values of a tensor in COO layout, one row for each entry."""
    op, factor = meaning_of(reduce_op, tensor.dtype)
    if op is not Op.SUM:
        raise ConfigError(f"sparse tensors can be summed; {op} of them has no meaning here")
    whole = tensor.detach().coalesce()
    entries = whole._nnz()
    values = whole.values() if factor is None else whole.values() * factor
    indices = read(whole.indices().t().contiguous()).reshape(entries, tensor.sparse_dim())
    width = max(1, values[:1].numel()) if entries else prod(tensor.shape[tensor.sparse_dim() :])
    return indices, read(values).reshape(entries, width)


def add_up_sparse(tensor: Any, indices: Any, values: Any) -> None:
    """Make ``tensor`` the sum of the entries of all ranks."""
    count = len(indices)
    rows = torch.empty((count, *tensor.shape[tensor.sparse_dim() :]), dtype=tensor.dtype)
    place(rows)[0][:] = values.reshape(-1)
    made = torch.sparse_coo_tensor(torch.from_numpy(indices).t(), rows, tensor.shape, check_invariants=True)
    with torch.no_grad():
        tensor.copy_(made.coalesce())


MAX_COMPLETERS = 64
"""Threads that complete futures: the number of callbacks that may wait for other collectives at a time."""

BaseWork: Any = dist._Work


class Ending(NamedTuple):
    """Completion of a call."""

    tensors: Sequence[Any]  # result of the call, and value of its future
    finish: Callable[[], object] | None  # when the result has arrived
    completers: ThreadPoolExecutor  # of futures


@uncompiled_methods
class TorchWork(BaseWork):  # type: ignore[misc]
    """A collective under way; ``is_any``: it is a receive from any rank, whose result says from which."""

    def __init__(self, handle: Handle[Any], ending: Ending, *, is_any: bool = False) -> None:
        super().__init__()
        self._handle = handle
        self._ending = ending
        self._is_any = is_any
        self._lock = threading.Lock()
        self._finish_step = ending.finish
        self._future: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the result, at most for ``timeout``, after which the collective continues (None, 0: no limit)."""
        self._await(timeout)
        self._finish()
        return True

    def synchronize(self) -> None:
        """Wait for the result, as ``wait`` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is done."""
        return self._handle.done()

    def is_success(self) -> bool:
        """Whether it is done, and has not failed."""
        return self._handle.done() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The error of a collective that has failed; else None."""
        error = self._handle.exception() if self._handle.done() else None
        return as_torch(error) if isinstance(error, KfcommError) else error

    def result(self) -> list[Any]:
        """Wait, and return the tensors."""
        self.wait()
        return list(self._ending.tensors)

    def source_rank(self) -> int:
        """Of a receive: the rank in the group that sent the message."""
        if not self._is_any:
            raise RuntimeError("only a receive has a source")
        return int(self._handle.wait()[1])

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A ``torch.futures.Future`` of the tensors."""
        asked = getattr(_asking, "found", None)
        if asked is not None:
            asked.append(self)
            return torch.futures.Future()
        # Two threads may ask for the future at once; the callback below must be registered once.
        with self._lock:
            is_new = self._future is None
            if is_new:
                # an error set from Python would end the process in a backward pass; what a callback raises does not
                begun = torch.futures.Future()
                self._future = begun.then(self._outcome)
        if is_new and called_by_pass():
            queue_callback(PassEnding(partial(self._complete_here, begun), partial(self._complete_when_done, begun)))
        elif is_new:
            self._complete_when_done(begun)
        return self._future

    def get_future_result(self) -> Any:
        """A future of the tensors, as of ``get_future``."""
        return self.get_future()

    def _await(self, timeout: timedelta | None) -> None:
        """Wait until it is done, without ``finish``."""
        if KEPT:
            KEPT.discard(self)
        timeout_s = timeout.total_seconds() if timeout else 0.0
        try:
            self._handle.wait(timeout_s if timeout_s > 0 else None)
        except KfcommError as error:
            raise as_torch(error) from None
        except TimeoutError:
            if self._handle.done():
                raise
            raise as_torch(CollectiveTimeout(f"not done within {timeout_s:g} s; the call continues")) from None

    def _complete_here(self, begun: Any) -> None:
        # At the end of a backward pass. The reducer, whose callback comes next, would wait in C++ while other threads
        # drove the collective and completed the future. The waiting thread does both, and Ctrl-C ends the wait.
        with contextlib.suppress(KfcommError, CancelledError):  # the future has it
            self._await(None)
        begun.set_result(None)

    def _complete_when_done(self, begun: Any) -> None:
        self._handle.add_done_callback(lambda _: self._complete(begun))

    def _complete(self, begun: Any) -> None:
        # Not on this thread, which drives collectives: a callback of the program (a communication hook) may wait for
        # further ones, which would never end here.
        try:
            self._ending.completers.submit(begun.set_result, None)
        except RuntimeError:  # the group is closed
            begun.set_result(None)

    def _outcome(self, _: Any) -> list[Any]:
        try:
            return self._result()
        except KfcommError as error:
            raise keep(error) from None

    def _result(self) -> list[Any]:
        """The value of the future."""
        self.wait()
        return list(self._ending.tensors)

    def _finish(self) -> None:
        # A thread that waits and the future's callback may both come here: the first one copies, the other waits.
        with self._lock:
            finish, self._finish_step = self._finish_step, None
            if finish is not None:
                finish()


@uncompiled_methods
class Done(BaseWork):  # type: ignore[misc]
    """Work that was complete when its call returned."""

    def __init__(self, tensors: Sequence[Any] = ()) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Do nothing."""

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True."""
        return True

    def exception(self) -> None:
        """Return None."""

    def result(self) -> list[Any]:
        """The tensors."""
        return list(self._tensors)

    def get_future(self) -> Any:
        """A ``torch.futures.Future`` of the tensors."""
        asked = getattr(_asking, "found", None)
        future = torch.futures.Future()
        if asked is not None:
            asked.append(self)
        else:
            future.set_result(list(self._tensors))
        return future


NOTHING = Done()
"""For calls without a result, and for those whose caller has waited."""

_asking = threading.local()
FORWARDED = ("is_success", "exception", "result", "source_rank", "_source_rank", "synchronize")


def forward() -> None:
    """Make torch's own Work, if it wraps one of ours, forward to it; works of other libraries stay as they are."""
    if getattr(BaseWork.is_completed, "is_forwarding", False):
        return
    completed = BaseWork.is_completed

    def is_completed(self: Any) -> bool:
        if completed(self):
            return True
        ours = _ours(self)
        return ours is not None and ours.is_completed()

    is_completed.__dict__["is_forwarding"] = True
    BaseWork.is_completed = is_completed
    for name in FORWARDED:
        setattr(BaseWork, name, _forwarding(name, getattr(BaseWork, name)))


def _forwarding(name: str, theirs: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any) -> Any:
        ours = _ours(self)
        return theirs(self) if ours is None else getattr(ours, name)()

    call.__name__, call.__doc__ = name, theirs.__doc__
    return call


def _ours(work: Any) -> Any:
    """Our Work that is wrapped in torch's; None for works of other libraries."""
    if type(work) is not BaseWork:
        return None
    # The wrapper does not show what it wraps, but asks it for its future, on this thread.
    found: list[Any] = []
    _asking.found = found
    try:
        work.get_future()
    except RuntimeError:  # a work without futures
        return None
    finally:
        del _asking.found
    return found[0] if found else None
