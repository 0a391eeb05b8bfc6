"""``kfcomm.elastic`` for programs without an event loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kfcomm.elastic.calls import KINDS
from kfcomm.elastic.communicator import ElasticCommunicator as Async
from kfcomm.elastic.loop import Elastic as AsyncElastic
from kfcomm.elastic.loop import Step
from kfcomm.elastic.sampler import ElasticSampler
from kfcomm.elastic.state import State
from kfcomm.sync.communicator import Communicator
from kfcomm.sync.driver import Driver
from kfcomm.sync.skin import ARRAY, MANY, OBJECT, OBJECTS, PARTS, Given, Skin, begun, blocking
from kfcomm.sync.tracebacks import outermost

if TYPE_CHECKING:
    from kfcomm.session import Session

_GIVEN: dict[str, Given | None] = {
    "all_reduce_many": MANY, "scatter": PARTS, "all_to_all": PARTS, "barrier": None, "broadcast_object": OBJECT,
    "all_gather_object": OBJECT, "gather_object": OBJECT, "scatter_object": OBJECTS,
}  # fmt: skip
"""What each verb reads on the caller's thread; the others an array."""


class ElasticCommunicator(Skin[Async]):
    """The blocking ``kfcomm.elastic.ElasticCommunicator``: it has all that a ``kfcomm.sync.Communicator`` has.

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
            return getattr(self._plain, name)
        return getattr(self._inner, name)

    @property
    def _plain(self) -> Communicator:
        """The blocking communicator of the epoch."""
        if self._latest._inner is not self._inner.current:
            self._latest = Communicator(self._driver, self._inner.current)
        return self._latest

    @property
    def _session(self) -> Session:  # type: ignore[override]
        return self._inner.current._session.latest

    def _check_open(self) -> None:
        self._inner.check_open()

    @outermost
    def shrink(self, *, timeout: Any = None) -> Self:
        """Go on with the ranks that live; this communicator is theirs then."""
        self._io.wait_for(lambda: self._inner.shrink(timeout=timeout))
        return self

    @outermost
    def agree(self, value: Any, *, timeout: Any = None) -> Any:
        """See ``kfcomm.Communicator.agree``."""
        return self._io.wait_for(lambda: self._inner.agree(value, timeout=timeout))

    @outermost
    def propose_size(self, size: int) -> None:
        """Ask for so many ranks. See ``kfcomm.elastic.ElasticCommunicator.propose_size``."""
        self._io.wait_for(lambda: self._inner.propose_size(size))

    def elastic_over(self, state: State, *, on_loss: str) -> Elastic:
        """The blocking ``Elastic`` over this communicator."""
        return Elastic(self, state, on_loss=on_loss)

    def close(self) -> None:
        """See ``kfcomm.sync.Communicator.close``."""
        self._first.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._first.__exit__(kind, error, trace)


for _verb in KINDS:
    _given = _GIVEN.get(_verb, ARRAY)
    setattr(ElasticCommunicator, _verb, blocking(getattr(Async, _verb), _given))
    setattr(ElasticCommunicator, f"{_verb}_async", begun(getattr(Async, _verb), _given))


class Elastic:
    """The blocking ``kfcomm.elastic.Elastic``; made by that, over what ``kfcomm.sync.init(elastic=True)`` returns."""

    def __init__(self, comm: ElasticCommunicator, state: State, *, on_loss: str = "finish") -> None:
        self._comm = comm
        self._io = comm._io
        self._inner: AsyncElastic = AsyncElastic(comm._inner, state, on_loss=on_loss)

    @property
    def is_released(self) -> bool:
        """Whether this rank was taken away by a change of size."""
        return self._inner.is_released

    @property
    def num_changes(self) -> int:
        """How often the ranks have changed while it was open."""
        return self._inner.num_changes

    @property
    def paused_s(self) -> float:
        """For how long calls have waited for that, in seconds."""
        return self._inner.paused_s

    @outermost
    def __enter__(self) -> Self:
        self._io.wait_for(self._inner.__aenter__)
        return self

    @outermost
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._io.is_stopped:
            self._io.wait_for(lambda: self._inner.__aexit__(kind, error, trace))

    def steps(self, sampler: ElasticSampler, *, used_in: str | Sequence[str] | None = None) -> Iterator[Step]:
        """The steps of one pass; all ranks go through them together. See ``kfcomm.elastic.Elastic.steps``."""
        found = self._inner.steps(sampler, used_in=used_in)
        while True:
            try:
                yield self._io.wait_for(found.__anext__)
            except StopAsyncIteration:
                return
