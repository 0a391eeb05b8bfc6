"""What the asynchronous forms return: torch's ``Work``, around a handle.

torch 2.15 keeps a Work that is made in Python in one of its own, which forwards ``wait`` and ``get_future`` alone;
`forward` teaches it the rest.

Futures are completed on a pool of threads: what a program hangs on to them (communication hooks) may wait for further
collectives, which would never end on the thread that drives them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kfcomm.errors import CollectiveTimeout, KfcommError
from kfcomm.sync.handle import Handle
from kfcomm.torch.errors import as_torch

MAX_COMPLETERS = 64
"""Threads on which futures are completed; as many callbacks of a program may wait for others."""

BaseWork: Any = dist._Work


class Ending(NamedTuple):
    """What belongs to the end of a call.

    Attributes:
        tensors: what the call gives, which is the value of its future.
        finish: what is left to do when the result is there; None for nothing.
        completers: where futures are completed.
    """

    tensors: Sequence[Any]
    finish: Callable[[], object] | None
    completers: ThreadPoolExecutor


class Work(BaseWork):  # type: ignore[misc]
    """A collective under way.

    Args:
        handle: of it.
        ending: what belongs to its end.
        is_any: it is a receive from any rank, whose result says from which.
    """

    def __init__(self, handle: Handle[Any], ending: Ending, *, is_any: bool = False) -> None:
        super().__init__()
        self._handle = handle
        self._ending = ending
        self._is_any = is_any
        self._lock = threading.Lock()
        self._finish_step = ending.finish
        self._future: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the result is there; True.

        Args:
            timeout: how long to wait here, the collective goes on after that; none or 0: as long as its own lets it.

        Raises:
            CollectiveTimeout: it is not done by then.
            CollectiveError: it failed.
        """
        self._await(timeout)
        self._finish()
        return True

    def synchronize(self) -> None:
        """For tensors in host memory the same as ``wait``."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self._handle.done()

    def is_success(self) -> bool:
        """Whether it is over, with a result."""
        return self._handle.done() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Why it failed; None as long as it has not."""
        error = self._handle.exception() if self._handle.done() else None
        return as_torch(error) if isinstance(error, KfcommError) else error

    def result(self) -> list[Any]:
        """The tensors, once they are there."""
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
        with self._lock:
            is_new = self._future is None
            if is_new:
                # an error set from Python would end the process in a backward pass; what a callback raises does not
                begun = torch.futures.Future()
                self._future = begun.then(self._outcome)
        if is_new:
            self._handle.add_done_callback(lambda _: self._complete(begun))
        return self._future

    def get_future_result(self) -> Any:
        """See ``get_future``."""
        return self.get_future()

    def _await(self, timeout: timedelta | None) -> None:
        """Wait until it is over; what is left to do then is not done."""
        timeout_s = timeout.total_seconds() if timeout else 0.0
        try:
            self._handle.wait(timeout_s if timeout_s > 0 else None)
        except KfcommError as error:
            raise as_torch(error) from None
        except TimeoutError:
            if self._handle.done():
                raise
            raise as_torch(CollectiveTimeout(f"not done within {timeout_s:g} s; it goes on")) from None

    def _complete(self, begun: Any) -> None:
        try:
            self._ending.completers.submit(begun.set_result, None)
        except RuntimeError:  # the group is closed
            begun.set_result(None)

    def _outcome(self, _: Any) -> list[Any]:
        self.wait()
        return list(self._ending.tensors)

    def _finish(self) -> None:
        with self._lock:
            finish, self._finish_step = self._finish_step, None
            if finish is not None:
                finish()


class Done(BaseWork):  # type: ignore[misc]
    """What is over when the call returns.

    Args:
        tensors: what it gave.
    """

    def __init__(self, tensors: Sequence[Any] = ()) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """See ``Work.wait``."""
        return True

    def synchronize(self) -> None:
        """Nothing is left to wait for."""

    def is_completed(self) -> bool:
        """It is."""
        return True

    def is_success(self) -> bool:
        """It has a result."""
        return True

    def exception(self) -> None:
        """None."""

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
"""Of a call that gives nothing, or whose caller waits for nothing more."""

_asking = threading.local()
FORWARDED = ("is_success", "exception", "result", "source_rank", "_source_rank", "synchronize")


def forward() -> None:
    """Let torch's own Work, where it keeps one of ours, answer what ours would; works of others stay as they are."""
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
    """The Work of ours that is kept in one of torch's; None if there is none."""
    if type(work) is not BaseWork:
        return None
    found: list[Any] = []
    _asking.found = found
    try:
        work.get_future()
    except RuntimeError:  # a work without
        return None
    finally:
        del _asking.found
    return found[0] if found else None
