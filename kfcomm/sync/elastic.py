"""Blocking form of ``kfcomm.elastic``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from kfcomm.elastic.call_log import BOUNDARY, Entry, Standing
from kfcomm.elastic.calls import KINDS
from kfcomm.elastic.communicator import ElasticCommunicator as Async
from kfcomm.elastic.communicator import is_of_step
from kfcomm.elastic.course import Step
from kfcomm.elastic.dispatcher import Dispatcher
from kfcomm.elastic.loop import Elastic as AsyncElastic
from kfcomm.elastic.sampler import ElasticSampler
from kfcomm.elastic.state import State
from kfcomm.elastic.walks import Walk, following
from kfcomm.errors import KfcommError
from kfcomm.sync.adapter import Adapter, begun, blocking, forward
from kfcomm.sync.communicator import Communicator
from kfcomm.sync.driver import Driver, outermost
from kfcomm.sync.members import ElasticMembers

if TYPE_CHECKING:
    from kfcomm.engine.session import Session
    from kfcomm.types import Seconds

SWIFT = ("all_reduce", "all_gather", "barrier")
"""Verbs that take the short way: fewer can do them, and all get the same. ``out`` is given by its name."""


class ElasticCommunicator(Adapter[Async]):
    """The blocking ``kfcomm.elastic.ElasticCommunicator``: it has every method of a ``kfcomm.sync.Communicator``.

    Made by ``kfcomm.sync.init(elastic=True)``. While an ``Elastic`` is open, the collectives of the world outlive a
    rank that dies.
    """

    def __init__(self, driver: Driver, inner: Async, *, owns_io: bool = False) -> None:
        self._driver = driver
        self._io = driver.io
        self._inner = inner
        self._first = self._latest = Communicator(driver, inner.current, owns_io=owns_io)

    def __repr__(self) -> str:
        return repr(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if hasattr(Communicator, name) and callable(getattr(Communicator, name)):
            calls = self._inner._calls
            if calls is not None and calls.log.is_unposted:  # see ``kfcomm.elastic.ElasticCommunicator``
                self._driver.run(calls.post_boundary, self._session)
            return getattr(self._of_step if is_of_step(name.removesuffix("_async")) else self._plain, name)
        return getattr(self._inner, name)

    @property
    def _plain(self) -> Communicator:
        """The blocking communicator of the epoch."""
        if self._latest._inner is not self._inner.current:
            self._latest = Communicator(self._driver, self._inner.current)
        return self._latest

    @property
    def _of_step(self) -> Communicator:
        """The blocking communicator of the ranks of the step."""
        shown = self._inner._shown
        return self._plain if shown is self._inner.current else Communicator(self._driver, shown)

    @property
    def _session(self) -> Session:  # type: ignore[override]
        return self._inner.current._session.latest

    def _check_open(self) -> None:
        self._inner.check_open()

    def set_timeout(self, timeout: Seconds) -> None:
        """Set the timeout of later calls. See ``kfcomm.elastic.ElasticCommunicator.set_timeout``."""
        self._inner.set_timeout(timeout)

    @outermost
    def refuse(self, name: str | None, error: BaseException, *, steps: int = 1) -> None:
        """Fail this rank's next call of this name before it is made. See ``kfcomm.Communicator.refuse``."""
        self._driver.run(lambda: self._inner.refuse(name, error, steps=steps), self._session)

    @outermost
    def shrink(self, *, timeout: Any = None) -> Self:
        """Continue with the surviving ranks; this communicator is theirs then."""
        self._io.wait_for(lambda: self._inner.shrink(timeout=timeout))
        return self

    @outermost
    def agree(self, value: Any, *, timeout: Any = None) -> Any:
        """Return the logical AND over the surviving ranks; see ``kfcomm.Communicator.agree``."""
        return self._io.wait_for(lambda: self._inner.agree(value, timeout=timeout))

    @outermost
    def resize(self, size: int, *, timeout: Any = None) -> bool:
        """Change the number of ranks. See ``kfcomm.elastic.ElasticCommunicator.resize``."""
        return self._io.wait_for(lambda: self._inner.resize(size, timeout=timeout))

    @outermost
    def follow_requests(self, *, timeout: Any = None) -> bool:
        """Let ranks join and leave. See ``kfcomm.elastic.ElasticCommunicator.follow_requests``."""
        return self._io.wait_for(lambda: self._inner.follow_requests(timeout=timeout))

    @outermost
    def propose_size(self, size: int) -> None:
        """Propose a number of ranks. See ``kfcomm.elastic.ElasticCommunicator.propose_size``."""
        self._io.wait_for(lambda: self._inner.propose_size(size))

    @outermost
    def propose_replacement(self, rank: int) -> None:
        """Propose to replace a rank. See ``kfcomm.elastic.ElasticCommunicator.propose_replacement``."""
        self._io.wait_for(lambda: self._inner.propose_replacement(rank))

    @outermost
    def _gone_on(self, calls: Dispatcher, entry: Entry, error: Exception) -> Any:
        """Return the result of a failed call, once the surviving ranks are known."""
        return self._driver.call(partial(calls.take_over, entry, error), self._session)

    def elastic_over(self, state: State, **options: Any) -> Elastic:
        """The blocking ``Elastic`` over this communicator."""
        return Elastic(self, state, **options)

    def close(self) -> None:
        """Close the world; see ``kfcomm.sync.Communicator.close``."""
        self._first.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._first.__exit__(kind, error, trace)


def _swift(verb: str, long_form: Callable[..., Any]) -> Callable[..., Any]:
    """Return a verb that takes a plain communicator's fast path while nothing is unusual."""
    # Only where a new array is made of one: a result in place needs the buffer that the long form provides.
    short: Callable[..., Any] = getattr(Communicator, verb)
    has_array = verb != "barrier"

    @wraps(long_form)
    def call(self: ElasticCommunicator, /, *args: Any, **kwargs: Any) -> Any:
        signals, calls = self._io.signals, self._inner._calls
        if signals.hold():
            return signals.holding(lambda: call(self, *args, **kwargs))
        if calls is None:
            return short(self._plain, *args, **kwargs)
        plain, entry = self._plain, None
        try:
            if not has_array or (args and type(args[0]) is np.ndarray and "out" not in kwargs):
                entry = calls.enter(verb, args, kwargs, plain._inner)
            if entry is not None:
                result = short(plain, *args, **kwargs)
                if calls.done(entry, result, plain._inner.births):
                    self._driver.run(partial(calls.notify, entry), self._session)
                return result
        except BaseException as error:
            # An interrupt, at any line: the record may not be in ``entry`` yet, and is found by the thread.
            if error is signals.raised or not isinstance(error, Exception):
                with contextlib.suppress(KfcommError):
                    self._driver.run(partial(calls.abandon, get_ident()), self._session)
                raise
            # Refused before it was recorded, or over already: nothing is left to finish after a loss.
            if entry is None or entry.standing is not Standing.POSTED:
                raise
            return self._gone_on(calls, entry, error)
        return long_form(self, *args, **kwargs)

    return call


for _verb in KINDS:
    _inner = getattr(Async, _verb)
    setattr(ElasticCommunicator, _verb, _swift(_verb, blocking(_inner)) if _verb in SWIFT else blocking(_inner))
    setattr(ElasticCommunicator, f"{_verb}_async", begun(_inner))


forward(
    ElasticMembers, AsyncElastic, "is_released", "is_replaying", "num_changes", "paused_s", "heirs", "inherited",
    "restore", "keep", "roll_back",
)  # fmt: skip


class Elastic(ElasticMembers):
    """The blocking ``kfcomm.elastic.Elastic``; made by that, over what ``kfcomm.sync.init(elastic=True)`` returns."""

    def __init__(self, comm: ElasticCommunicator, state: State, **options: Any) -> None:
        self._comm = comm
        self._driver, self._io = comm._driver, comm._io
        self._inner = AsyncElastic(comm._inner, state, **options)

    @outermost
    def commit(self) -> bool:
        """Let other ranks keep a copy of this rank's ``own``. See ``kfcomm.elastic.Elastic.commit``."""
        return self._io.wait_for(self._inner.commit)

    @outermost
    def __enter__(self) -> Self:
        self._io.wait_for(self._inner.__aenter__)
        return self

    @outermost
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._io.is_stopped:
            self._driver.run(self._give_up, self._comm._session)
            self._io.wait_for(lambda: self._inner.__aexit__(kind, error, trace))

    def _give_up(self) -> None:
        """Abort calls of this thread that an interrupt has left, and a second one before they could be aborted."""
        calls = self._comm._inner._calls
        if calls is not None:
            calls.abandon(get_ident())

    def steps(
        self, sampler: ElasticSampler, *, passes: int | None = None, used_in: str | Sequence[str] | None = None
    ) -> Iterator[Step]:
        """The steps of one pass, or of several. See ``kfcomm.elastic.Elastic.steps``."""
        walk, met = self._inner.walk(sampler, passes=passes, used_in=used_in), None
        while (wanted := self._following(walk, met)) is not None:
            met = None
            if isinstance(wanted, Step):
                yield wanted
            elif isinstance(wanted, np.ndarray):
                met = self._comm.all_reduce(wanted, name=BOUNDARY)
            else:
                self._io.wait_for(wanted)

    @outermost
    def _following(self, walk: Walk[None], met: Any) -> Any:
        return self._driver.run(partial(self._take_up, walk, met), self._comm._session)

    def _take_up(self, walk: Walk[None], met: Any) -> Any:
        # The boundary waits for all calls of the step, also for those that an interrupt has left.
        self._give_up()
        return following(walk, met)
