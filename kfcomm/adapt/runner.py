"""Runner of a policy on this rank: calls its methods, keeps its requests, and stops it where it fails."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from kfcomm.adapt.policy import Context, Policy
from kfcomm.adapt.requests import FAILED, NOTHING, Request, sign_of
from kfcomm.collectives.objects import packed
from kfcomm.common.arguments import plain_text
from kfcomm.errors import ConfigError, EpochChanged, PeerLost

if TYPE_CHECKING:
    from kfcomm.adapt.host import PolicyHost

logger = logging.getLogger("kfcomm.adapt")

MAX_REASON = 500
"""Characters of a failure that are sent to the other ranks."""

Hook = Literal["on_start", "on_epoch_start", "before_step", "after_step", "on_epoch_end", "on_end"]
T = TypeVar("T")


class Runner:
    """Policy and its state on this rank."""

    def __init__(self, policy: Policy, host: PolicyHost) -> None:
        self.policy = policy
        self.name = plain_text(policy.name)
        self.is_off = False  # it is not called any more, on any rank
        self.failure = ""  # its error on this rank, in words; empty without one
        self.at_rest = asyncio.Event()  # set while its method has returned, or waits for the ranks
        self.at_rest.set()
        self._context = Context(host, self)
        self._host = host
        self._requests: list[Request[Any]] = []
        self._task: asyncio.Task[None] | None = None
        self._is_dropped = False
        self._is_ended = False

    @property
    def requests(self) -> Sequence[Request[Any]]:
        """Pending requests."""
        return self._requests

    @property
    def sign(self) -> int:
        """Number for the other ranks: nothing, failed, or a digest of the requests."""
        if self.is_off:
            return NOTHING
        return FAILED if self.failure else sign_of(self._requests)

    @property
    def words(self) -> str:
        """The same in words, for messages."""
        if self.failure:
            return self.failure[:MAX_REASON]
        return ("asks for " + ", ".join(one.words for one in self._requests)) if self._requests else "asks for nothing"

    async def call(self, hook: Hook) -> None:
        """Call a method of the policy, unless it is off, has failed, or still runs another method."""
        # A method that waits for the ranks may last for steps: two methods of one policy never run at once.
        if self.is_off or self.failure or self._task is not None:
            return
        try:
            result = getattr(self.policy, hook)(self._context)
        except Exception as error:  # noqa: BLE001  a policy may raise anything: the job continues
            self._fail(hook, error)
            return
        if inspect.isawaitable(result):
            self.at_rest.clear()
            self._task = asyncio.create_task(self._finish(hook, result), name=f"kfcomm policy {self.name}")
            await self.settle()

    async def settle(self) -> None:
        """Wait until the policy's method has returned, or waits for the ranks."""
        await self.at_rest.wait()

    def ask(self, request: Request[T]) -> Request[T]:
        """Add a request of the policy."""
        if self._is_ended:
            raise ConfigError("on_end is called after the last step: nothing can be asked for any more")
        request.runner = self
        self._requests.append(request)
        return request

    async def carry_out(self, lost: Collection[Request[Any]] = ()) -> None:
        """Carry out requests, the same on all ranks, except overruled (``lost``) ones; then let the policy continue."""
        requests, self._requests = self._requests, []
        for request in requests:
            try:
                if request in lost:
                    request.overrule()
                else:
                    await request.carry_out()
            except Exception as error:  # noqa: BLE001  as if the policy had raised it
                self._fail("its request", error)
        # The method continues now; the meeting continues when it has returned or waits again.
        if any(request.is_awaited for request in requests) and self._task is not None:
            self.at_rest.clear()
        await self.settle()

    async def switch_off(self) -> None:
        """Stop calling the policy, and cancel a method that is under way."""
        self.is_off = True
        await self._drop()

    async def end(self) -> None:
        """Cancel a method that is under way, and call ``on_end``."""
        self._is_ended = True
        await self._drop()
        await self.call("on_end")

    # ---------------------------------------------------------------- changes of the ranks

    def state(self) -> list[Any]:
        """Whether it is off, its state, and the fault of that; msgpack can carry it."""
        if self.is_off:
            return [True, None, ""]
        try:
            state = self.policy.state_dict()
            packed(state)
        except Exception as error:  # noqa: BLE001  a policy may raise anything
            return [False, None, f"{type(error).__name__} in state_dict: {error}"]
        return [False, state, ""]

    async def begin_anew(self, state: Sequence[Any]) -> None:
        """Drop its requests and a method that is under way, and begin with the state that a rank has sent."""
        is_off, known, failure = state
        await self._drop()
        self.is_off, self.failure = bool(is_off), str(failure)
        await self.call("on_start")
        if known is not None and not self.is_off and not self.failure:
            try:
                self.policy.load_state_dict(known)
            except Exception as error:  # noqa: BLE001  see call
                self._fail("load_state_dict", error)

    async def _drop(self) -> None:
        self._requests.clear()  # other ranks may not have made them
        task = self._task
        if task is not None:
            self._is_dropped = True
            task.cancel()
            # Not awaited by itself: its error, if it has one, is not this rank's.
            await asyncio.wait({task})
            self._is_dropped = False

    async def _finish(self, hook: Hook, awaitable: Awaitable[Any]) -> None:
        try:
            await awaitable
        except asyncio.CancelledError:
            if not self._is_dropped:
                self._fail(hook, RuntimeError("it was cancelled"))
            raise
        except Exception as error:  # noqa: BLE001  see call
            self._fail(hook, error)
        finally:
            self._task = None
            self.at_rest.set()

    def _fail(self, where: str, error: Exception) -> None:
        self._requests.clear()
        self.failure = f"{type(error).__name__} in {where}: {error}"
        # a rank that is lost is no fault of the policy: it begins anew with the others
        level = logging.DEBUG if isinstance(error, (PeerLost, EpochChanged)) else logging.ERROR
        logger.log(level, "rank %d: policy %s raised in %s", self._host.comm.rank, self.name, where, exc_info=error)
