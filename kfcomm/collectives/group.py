"""One group of ranks as this process sees it: its graphs, its plans, and the order of its posts.

What always holds: posts made between a call of ``set_strategy`` and its verdict wait for the verdict, in their
order; what was posted before runs on the graphs it began with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import numpy as np

from kfcomm.collectives.handle import Handle
from kfcomm.collectives.plans import Plan, Planner
from kfcomm.core.chunk import pair_of
from kfcomm.core.collective import GroupView, shown
from kfcomm.errors import ConfigError
from kfcomm.runtime.engine import Engine
from kfcomm.runtime.operation import Operation
from kfcomm.strategies import AnyStrategy
from kfcomm.types import Layout, Op, Verb

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

UNNAMED = ""
STRATEGY_KEY = "\0strategy"
MAX_NAME_NBYTES = 1024
MAX_PLANS = 4096


class Group:
    """A group and its engine. Everything here runs on the engine's loop.

    Attributes:
        view: members, by world rank.
        layout: hosts of the members.
        planner: makes plans under the strategy in force.
    """

    def __init__(
        self, engine: Engine, view: GroupView, layout: Layout, strategy: AnyStrategy, timeout_s: float
    ) -> None:
        self.engine = engine
        self.view = view
        self.layout = layout
        self.timeout_s = timeout_s
        self.planner = Planner(view.rank, view.size, strategy, 0)
        self._plans: dict[Hashable, Plan] = {}
        self._ways: dict[Hashable, list[Plan | None]] = {}
        self._waiting: list[Callable[[], None]] | None = None

    @property
    def strategy(self) -> AnyStrategy:
        """The strategy in force."""
        return self.planner.strategy

    def plan(self, make: Callable[..., Plan], *what: Hashable) -> Plan:
        """The plan ``make(planner, *what)``, made when it is first needed."""
        key = (make, *what)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = self._plans[key] = make(self.planner, *what)
        return plan

    def plan_all_reduce(self, dtype: np.dtype[Any], shape: tuple[int, ...], op: Op, name: str | None) -> Plan:
        """The plan for an all_reduce: one of several where the key decides which graph pair is taken."""
        key = (dtype, shape, op)
        ways = self._ways.get(key)
        if ways is None:
            if len(self._ways) >= MAX_PLANS:
                self._ways.clear()
            ways = self._ways[key] = [None] * self.planner.num_ways(dtype, shape)
        way = pair_of(name or UNNAMED, len(ways)) if len(ways) > 1 else 0
        plan = ways[way]
        if plan is None:
            plan = ways[way] = self.planner.all_reduce(dtype, shape, op, way)
        return plan

    def in_order(self, begin: Callable[[], None]) -> None:
        """Run ``begin`` now, or after the verdict on a strategy that is being agreed."""
        if self._waiting is None:
            begin()
        else:
            self._waiting.append(begin)

    def post(
        self,
        plan: Plan,
        key: str,
        *,
        overlapping: bool = False,
        source: Array | None,
        result: Array | None,
        outcome: Callable[[], Any],
        timeout_s: float | None,
        handle: Handle[Any],
    ) -> None:
        """Begin a collective now; ``handle`` is resolved with ``outcome()``."""
        operation = Operation(
            handle, source=source, result=result, kernel=plan.kernel, dtype=plan.dtype, size=self.view.size,
            in_result=plan.in_result, outcome=outcome,
        )  # fmt: skip
        self.engine.post(
            self.view, key, plan.signature, plan.program, plan.sizes, operation,
            timeout_s=self.timeout_s if timeout_s is None else timeout_s, overlapping=overlapping,
        )  # fmt: skip
        handle.posted(self.engine, operation)

    def refuse(self, key: str, error: BaseException) -> None:
        """A call failed before it was posted: it fails on the other ranks too."""
        message = f"rank {self.view.rank} refused its call of {shown(key)}: {str(error) or type(error).__name__}"
        self.in_order(lambda: self.engine.refuse(self.view, key, message))

    def swap(self, strategy: AnyStrategy, timeout_s: float | None) -> asyncio.Future[None]:
        """Agree with the other members on another strategy; see ``Communicator.set_strategy``."""
        verdict: asyncio.Future[None] = self.engine.loop.create_future()
        self.in_order(lambda: self._ask(strategy, timeout_s, verdict))
        return verdict

    def _ask(self, strategy: AnyStrategy, timeout_s: float | None, verdict: asyncio.Future[None]) -> None:
        """One barrier whose signature holds the graphs' digest: who has others fails it for all."""
        self._waiting = []
        plan = self.planner.barrier(Verb.SET_STRATEGY, STRATEGY_KEY, strategy.name, strategy.digest)
        handle: Handle[None] = Handle(loop=self.engine.loop)
        handle.add_done_callback(lambda done: self._decide(strategy, done, verdict))
        self.post(
            plan, STRATEGY_KEY, source=None, result=None, outcome=lambda: None, timeout_s=timeout_s, handle=handle
        )
        verdict.add_done_callback(lambda asked: handle.cancel() if asked.cancelled() else None)

    def _decide(self, strategy: AnyStrategy, done: asyncio.Future[None], verdict: asyncio.Future[None]) -> None:
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if error is None:
            self.planner = Planner(self.view.rank, self.view.size, strategy, self.planner.generation + 1)
            self._plans.clear()
            self._ways.clear()
        waiting, self._waiting = self._waiting, None
        for begin in waiting or ():
            self.in_order(begin)
        if not verdict.done():
            if error is None:
                verdict.set_result(None)
            else:
                verdict.set_exception(error)


def check_name(name: Any) -> None:
    """Refuse a name that cannot travel.

    Raises:
        ConfigError: it is not a string, is empty or too long, or holds the reserved NUL.
    """
    if name is None:
        return
    if not isinstance(name, str) or not name or "\0" in name:
        raise ConfigError(f"a name is a string that is not empty and has no NUL, not {name!r}")
    nbytes = len(name) if name.isascii() else len(name.encode(errors="surrogatepass"))
    if nbytes > MAX_NAME_NBYTES:
        raise ConfigError(f"a name has at most {MAX_NAME_NBYTES} bytes, {name[:32]!r}... has {nbytes}")
    if any("\ud800" <= letter <= "\udfff" for letter in name if not name.isascii()):
        raise ConfigError(f"a name is valid Unicode, {name[:32]!r} is not")
