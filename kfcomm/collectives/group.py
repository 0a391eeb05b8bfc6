"""One group of ranks as this process sees it: its graphs, its plans by strategy, and the order of its posts.

Invariants: posts made between a call of ``set_strategy`` and its outcome wait for the outcome, in their order; what
was posted before runs on the graphs it began with. Later steps of calls begin in the order of the calls. For changes
without a place in that order see `transition`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kfcomm.collectives.compiled import MAX_NAMES, CompiledKey
from kfcomm.collectives.handle import Handle, named
from kfcomm.collectives.plans import Plan, Planner, Plans, agreement
from kfcomm.common.arguments import plain_text
from kfcomm.common.sizes import seconds_of
from kfcomm.core.collective import GroupView, Post, shown
from kfcomm.core.graph import GraphPair
from kfcomm.engine.engine import Engine
from kfcomm.engine.operation import Operation
from kfcomm.strategies import AnyStrategy, StrategySpec
from kfcomm.strategies.chunks import ChunkSizes
from kfcomm.strategies.plugins import build
from kfcomm.types import Layout, Seconds

if TYPE_CHECKING:
    from kfcomm.collectives.kept import KeptBuffers
    from kfcomm.collectives.specs import CallOptions
    from kfcomm.collectives.transition import Transition, Uses
    from kfcomm.transports.shm.heap import Heaps


class Turn:
    """A place in the order of one key; ``begin`` is called once it is ready."""

    __slots__ = ("_key", "_turns", "begin")

    def __init__(self, turns: GroupTurns, key: str) -> None:
        self._turns = turns
        self._key = key
        self.begin: Callable[[], object] | None = None

    def ready(self, begin: Callable[[], object]) -> None:
        """``begin`` may run, now or when all earlier ones have; it must not raise."""
        self.begin = begin
        self._turns.advance(self._key)


class GroupTurns:
    """The turns of one group, by key."""

    __slots__ = ("_queues",)

    def __init__(self) -> None:
        self._queues: dict[str, deque[Turn]] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def has(self, key: str) -> bool:
        """Whether something has yet to begin under this key."""
        return key in self._queues

    def next(self, key: str) -> Turn:
        """The next turn of this key."""
        turn = Turn(self, key)
        self._queues.setdefault(key, deque()).append(turn)
        return turn

    def advance(self, key: str) -> None:
        """Begin the ready turns at the front of a queue."""
        queue = self._queues.get(key)
        while queue and (begin := queue[0].begin) is not None:
            queue.popleft()
            begin()
        if not queue:
            self._queues.pop(key, None)


MAX_STRATEGIES = 64


class Generations:
    """Plans of one rank of a group, by strategy."""

    def __init__(self, rank: int, layout: Layout) -> None:
        self._rank = rank
        self._layout = layout
        here = layout.ranks_of(layout.hosts[rank])
        self._local = here if 1 < len(here) < layout.size else ()
        self._chunks = ChunkSizes(layout)
        self._tree: GraphPair | None = None
        self._plans: dict[tuple[str, bytes], Plans] = {}
        self._agreements: dict[tuple[str, bytes], Plan] = {}

    def plans(self, strategy: AnyStrategy, generation: int) -> Plans:
        """The plans under a strategy that comes into force as this generation."""
        key = (strategy.name, strategy.digest)
        known = self._plans.get(key)
        if known is None:
            self._make_room()
            planner = Planner(self._rank, self._layout.size, strategy, self._chunks, self._local)
            known = self._plans[key] = Plans(planner)
        return known.again(generation)

    def agreement(self, strategy: AnyStrategy) -> Plan:
        """The barrier in which the members agree on a strategy."""
        key = (strategy.name, strategy.digest)
        plan = self._agreements.get(key)
        if plan is None:
            self._make_room()
            if self._tree is None:
                self._tree = build("binary_tree", self._layout).select(0).pairs[0]
            plan = self._agreements[key] = agreement(self._rank, self._tree, strategy)
        return plan

    def _make_room(self) -> None:
        if len(self._plans) >= MAX_STRATEGIES or len(self._agreements) >= MAX_STRATEGIES:
            self._plans.clear()
            self._agreements.clear()


Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

UNNAMED = ""
IN_ORDER = "~"
"""First letter of names given by adapters of libraries that match calls by their order: as with calls without a name,
further ones may begin before earlier ones are complete."""
STRATEGY_KEY = "\0strategy"


class Group:
    """A group and its engine. Everything here runs on the engine's loop."""

    def __init__(
        self, engine: Engine, view: GroupView, layout: Layout, strategy: StrategySpec, timeout_s: float
    ) -> None:
        self.engine = engine
        self.view = view
        self.layout = layout
        self.timeout_s = timeout_s
        self.heaps: Heaps | None = None  # memory that all ranks of the group share, if they do
        self.kept: KeptBuffers | None = None  # buffers in that memory; None in a group that a rank may leave alone
        self._generations = Generations(view.rank, layout)
        self._built: dict[Hashable, AnyStrategy] = {}
        self.plans = self._generations.plans(self.build(strategy), 0)
        self.turns = GroupTurns()
        # By name. ``compiled`` is empty while a strategy is being agreed; ``former`` is that of the one in force then.
        self.compiled = self.former = self.plans.compiled
        self._waiting: list[Callable[[], None]] | None = None
        self._transition: Transition | None = None  # for as long as uses along former graphs are to come
        self.is_set = False  # the program has called ``set_strategy``, or a policy has a say

    @property
    def strategy(self) -> AnyStrategy:
        """The strategy in force."""
        return self.plans.planner.strategy

    def build(self, spec: StrategySpec) -> AnyStrategy:
        """The strategy that ``spec`` means for this group; names, and rules made of names, are built once.

        Raises:
            ConfigError: the strategy is unknown, or for another number of ranks.
        """
        key = _key_of(spec)
        if key is None:
            return build(spec, self.layout)
        built = self._built.get(key)
        if built is None:
            if len(self._built) >= MAX_STRATEGIES:
                self._built.clear()
            built = self._built[key] = build(spec, self.layout)
        return built

    def checked(self, options: CallOptions) -> CallOptions:
        """The same options, with a plain priority, and with the strategy that they mean.

        Raises:
            ConfigError: the timeout, the priority or the strategy is not valid.
        """
        options = options.checked()
        return options if options.strategy is None else options.but(strategy=self.build(options.strategy))

    def plans_along(self, strategy: AnyStrategy | None, key: str, seq: int | None = None) -> Plans:
        """Plans of a call that is posted now: under its own strategy, or under the one in force for this use of a key.

        They have the generation of the one in force, so a call with a strategy of its own meets calls of its place in
        the program, before or after a ``set_strategy``. ``seq``: see `Post`.
        """
        plans = self.plans
        if self._transition is not None:
            plans = self._transition.plans(key, self.last_seq(key) + 1 if seq is None else seq) or plans
            if self._transition.is_over:
                self._transition = None
        return plans if strategy is None else self._generations.plans(strategy, plans.generation)

    def compiled_key(self, name: str | None, strategy: StrategySpec | None) -> CompiledKey:
        """Key in ``compiled`` of the calls of a name, with a strategy of their own or without.

        Raises:
            ConfigError: see ``build``.
        """
        if strategy is None:
            return name
        built = self.build(strategy)
        return name, built.name, built.digest

    @property
    def waits(self) -> bool:
        """Whether a strategy is being agreed, so that posts have to wait."""
        return self._waiting is not None

    def until_s(self, timeout: Seconds | None) -> float:
        """Deadline of a call of several steps that begins now, by the reactor's clock."""
        timeout_s = seconds_of(timeout)
        return self.engine.reactor.time() + (self.timeout_s if timeout_s is None else timeout_s)

    def left_s(self, until_s: float) -> float:
        """Seconds left until the deadline, for the next step."""
        return max(0.0, until_s - self.engine.reactor.time())

    def in_order(self, begin: Callable[[], None]) -> None:
        """Run ``begin`` now, or after the pending agreement on a strategy."""
        if self._waiting is None:
            begin()
        else:
            self._waiting.append(begin)

    def post(self, post: Post, operation: Operation, handle: Handle[Any], timeout_s: float | None) -> Operation:
        """Begin a collective now; ``timeout_s``: None for the group's."""
        self.engine.post(post, operation, self.timeout_s if timeout_s is None else timeout_s)
        if operation.failed:
            handle.seq = self.last_seq(post.name)
        else:
            named(handle, operation)
        return operation

    def may_compile(self, plans: Plans) -> bool:
        """Whether these plans of a name can be cached now; the cache is emptied if it is full."""
        if self._waiting is not None or self.engine.unusual or plans.generation != self.plans.generation:
            return False
        if len(self.compiled) >= MAX_NAMES:
            self.forget()
        return True

    def forget(self) -> None:
        """Drop all cached plans."""
        # Not cleared: plans that were found in a dictionary are valid while that is the current one.
        self.compiled = self.plans.compiled = {}

    def refuse(self, key: str, error: BaseException, *, steps: int = 1) -> None:
        """Fail a call on the other ranks too, before it was posted, at its place among the posts."""
        turn = self.turns.next(later_key(key)) if steps > 1 else None

        def refuse() -> None:
            seq = self.refuse_now(key, error)
            if turn is not None:
                turn.ready(lambda: self.refuse_now(later_key(key), error, seq=seq))

        self.in_order(refuse)

    def refuse_now(self, key: str, error: BaseException, *, seq: int | None = None) -> int:
        """Do as `refuse`, but at once, even while a strategy is being agreed; return the call's sequence number."""
        did = "cancelled" if isinstance(error, asyncio.CancelledError) else "refused"
        why = "" if did == "cancelled" else f": {str(error) or type(error).__name__}"
        message = f"{self.view.called(self.view.rank)} {did} its call of {shown(key)}{why}"
        self.engine.refuse(self.view, key, message, seq=seq)
        return self.last_seq(key)

    def last_seq(self, key: str) -> int:
        """The sequence number of the latest use of a key on this rank."""
        return self.engine.router.num_uses(self.view.id, key) - 1

    def swap(self, strategy: AnyStrategy, timeout_s: float | None) -> Handle[None]:
        """Agree with the other members on another strategy; see ``Communicator.set_strategy``."""
        self.is_set = True
        outcome: Handle[None] = Handle(loop=self.engine.loop)
        self.in_order(lambda: self._ask(strategy, timeout_s, outcome))
        return outcome

    def _ask(self, strategy: AnyStrategy, timeout_s: float | None, outcome: Handle[None]) -> None:
        """Barrier whose signature holds the graphs' digest: a rank with other graphs fails it for all."""
        # From here on posts wait: which graphs they take depends on the outcome.
        self._wait()
        plan = self._generations.agreement(strategy)
        handle: Handle[None] = Handle(loop=self.engine.loop)
        operation = plan.operation(handle, None, None, plan.work)
        self.post(plan.post(self.view, STRATEGY_KEY, 0), operation, handle, timeout_s)
        handle.when_done(self.engine.reactor, lambda done: self._decide(strategy, operation, done, outcome))
        outcome.when_done(self.engine.reactor, lambda asked: handle.cancel() if asked.cancelled() else None)

    def _decide(self, strategy: AnyStrategy, operation: Operation, done: Handle[None], outcome: Handle[None]) -> None:
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if error is None:
            # Not the number of those that were agreed: ranks that differ in that would never meet again.
            self.plans = self._generations.plans(strategy, operation.seq + 1)
            self._transition = None
        for observer in self.engine.all_observers():
            observer.swapped(strategy.name, self.plans.generation, self.view.size, error)
        self._resume()
        if not outcome.done():
            if error is None:
                outcome.set_result(None)
            else:
                outcome.set_exception(error)

    # ---------------------------------------------------------------- a change without a place in the order of calls

    def hold(self) -> Uses | None:
        """Make posts wait until ``release``; return the next use of each name, or None where the program has a say."""
        if self._waiting is not None or self.is_set:
            return None
        # Callers of other threads may have found a cached plan, and not used it yet.
        self.engine.unusual.add(self._held)
        self._wait()
        return self.uses()

    def release(self) -> None:
        """Begin the posts that ``hold`` has made wait."""
        self.engine.unusual.discard(self._held)
        self._resume()

    @property
    def num_uses(self) -> int:
        """Calls that this rank has made."""
        return sum(key.next_seq for key in self.engine.router.names.of_group(self.view.id))

    def oldest_s(self) -> float | None:
        """Moment at which the oldest call under way was posted, by the reactor's clock; None without one."""
        posted_s = [one.posted_s for one in self.engine.in_flight() if one.collective.group.id == self.view.id]
        return min(posted_s, default=None)

    def sizes_in_use(self) -> dict[int, int]:
        """Number of names by the bytes of their messages, as far as plans are cached."""
        cached = self.compiled or self.former
        return dict(Counter(one.nbytes for one in list(cached.values()) if one.nbytes))

    def uses(self) -> Uses:
        """The next use of each name."""
        from kfcomm.collectives.transition import uses_of  # few groups need it

        return uses_of(self.engine.router, self.view)

    def change(self, strategy: AnyStrategy, layout: Layout, generation: int, first: Uses) -> None:
        """Take another strategy, from the ``first`` use of each name on; all members do, with the same arguments.

        No member has begun these uses. ``layout`` has the costs that the size of chunks follows from.
        """
        from kfcomm.collectives.transition import Transition

        plans = Generations(self.view.rank, layout).plans(strategy, generation)
        transition = Transition(self.plans, first, self.uses(), self._transition)
        self._transition = None if transition.is_over else transition
        self.plans = plans
        if self._waiting is None:
            self.compiled = plans.compiled
        self.engine.router.names.renew()  # as for ``hold``: plans that were found before must not be used
        for observer in self.engine.all_observers():
            observer.swapped(strategy.name, generation, self.view.size, None)

    @property
    def _held(self) -> str:
        return f"held {self.view.id.hex()}"

    def _wait(self) -> None:
        self._waiting = []
        self.former, self.compiled = self.compiled, {}

    def _resume(self) -> None:
        self.compiled = self.plans.compiled
        waiting, self._waiting = self._waiting, None
        for begin in waiting or ():
            self.in_order(begin)


def _key_of(spec: StrategySpec) -> Hashable:
    """Key under which a strategy is cached; None for those that are made already, and for rules with such."""
    if isinstance(spec, str):
        return plain_text(spec)
    if isinstance(spec, Mapping):
        rules = tuple(spec.items())
        return rules if all(isinstance(one, str) for rule in rules for one in rule) else None
    return None


def later_key(key: str) -> str:
    """The key of the second step of a call; its n-th use belongs to the n-th of ``key``."""
    return key + "\0data"


def may_overlap(name: str | None) -> bool:
    """Whether a call may begin while another of its name is under way."""
    return name is None or name.startswith(IN_ORDER)
