"""What a program holds to adapt: it marks the steps, and policies are called between them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kfcomm.adapt.measuring import EngineMeter, StepMeter
from kfcomm.adapt.meeting import Meetings
from kfcomm.adapt.metrics import Reading, StepMetrics
from kfcomm.adapt.policy import Decision, Policy
from kfcomm.adapt.runner import Runner
from kfcomm.errors import ConfigError

if TYPE_CHECKING:
    from kfcomm.communicator import Communicator

logger = logging.getLogger("kfcomm.adapt")


class Adaptation:
    """Policies that watch a program's steps and change its communication. Made alike on every rank.

    ::

        async with Adaptation(comm, [AutoStrategy(("ring", "star"))]) as adaptation:
            for batch in batches:
                async with adaptation.step():
                    ...                              # the collectives of a step

    Args:
        comm: whose strategy may be changed.
        policies: called in this order; the same on every rank.
        every: the ranks meet, and policies are called, at every so many steps; the metrics are of all these steps.
        meter: tells how this rank is doing; None for the totals of its engine.

    Attributes:
        comm: as given.
        decisions: what was decided, with the evidence; the same on every rank.
        metrics: of the last step at whose end the ranks met; None before.
        num_steps: steps that have ended.

    Raises:
        ConfigError: something is no policy, or ``every`` is not at least 1.

    Cost: for each meeting one all_reduce of ``8 n (6 + number of policies)`` bytes, along a binary tree; see
    "Adaptation".
    """

    def __init__(
        self, comm: Communicator, policies: Sequence[Policy], *, every: int = 1, meter: StepMeter | None = None
    ) -> None:
        for policy in policies:
            if not isinstance(policy, Policy):
                raise ConfigError(f"a policy is an instance of kfcomm.adapt.Policy, not {policy!r}")
        if type(every) is not int or every < 1:
            raise ConfigError(f"every is a whole number of steps, at least 1, not {every!r}")
        self.comm = comm
        self.decisions: list[Decision] = []
        self.metrics: StepMetrics | None = None
        self.num_steps = 0
        self._every = every
        self._meter = meter or EngineMeter(comm)
        self._runners = [Runner(policy, self) for policy in policies]
        self._meetings: Meetings | None = None
        self._is_over = False
        self._in_step = False
        self._measured = Reading.nothing(comm.size)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """Those that are not switched off."""
        return tuple(runner.policy for runner in self._runners if not runner.is_off)

    def step(self) -> Step:
        """One step of the program: ``async with adaptation.step(): ...``, on every rank.

        The ranks meet at its end. If its block raises, this rank does not come, and the others' meeting fails.

        Raises:
            ConfigError: on entering, when another step is under way, or after ``close``.
            CollectiveMismatch: on entering the first: the ranks have different policies; on leaving: they are at
                different steps.
            CollectiveAborted, CollectiveTimeout, PeerLost, SessionClosed: on leaving: not all ranks came.
        """
        return Step(self)

    async def start(self) -> None:
        """Meet the other ranks, and call ``on_start``; entering the first step does it, if nothing did before.

        Raises:
            CollectiveMismatch: the ranks have different policies, or another ``every``.
        """
        await self._started()

    async def _started(self) -> Meetings:
        if self._is_over:
            raise ConfigError("this adaptation is closed")
        if self._meetings is None:
            group = await self.comm.group(range(self.comm.size), "adaptation", strategy="binary_tree")
            meetings = Meetings(self.comm, group, self._runners, self._record_of)
            try:
                await meetings.introduce(self._every)
            except BaseException:
                await meetings.close()
                raise
            self._meetings = meetings
            for runner in self._runners:
                await runner.call("on_start")
        return self._meetings

    async def close(self) -> None:
        """Call ``on_end``, and meet no more; what was asked for and is not done is dropped. May be called again."""
        if self._is_over:
            return
        self._is_over = True
        for runner in self._runners:
            await runner.end()
        if self._meetings is not None:
            await self._meetings.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def record(self, decision: Decision, level: int = logging.INFO) -> None:
        """Keep and log a decision; on ranks other than 0, which decide the same, the log has it for debugging only."""
        self.decisions.append(decision)
        logger.log(level if self.comm.rank == 0 else logging.DEBUG, "%s", decision)
        tracer = self.comm._session.engine.tracer
        if tracer is not None:
            tracer.instant("decision", policy=decision.policy, what=decision.what, why=decision.why)

    def _record_of(self, runner: Runner, what: str, level: int, evidence: Mapping[str, Any]) -> None:
        self.record(Decision(self.num_steps, runner.name, what, evidence), level)

    # ---------------------------------------------------------------- a step

    @property
    def _meets(self) -> bool:
        """Whether the ranks meet at the end of the step that is under way."""
        return (self.num_steps + 1) % self._every == 0

    async def begin(self) -> Reading:
        """A step begins; see `Step`."""
        if self._in_step:
            raise ConfigError("a step is under way: steps follow one another")
        await self._started()
        self._in_step = True
        try:
            if self._meets:
                for runner in self._runners:
                    await runner.call("before_step")
            return self._meter.read()
        except BaseException as error:
            self.give_up(error)
            raise

    async def end(self, begun: Reading) -> None:
        """A step has ended well; see `Step`."""
        meetings = await self._started()
        self._measured = self._measured.plus(self._meter.read().since(begun))
        try:
            if self._meets:
                strategy = self.comm.strategy
                table = await meetings.exchange(self.num_steps, self._measured)
                self.metrics = table.metrics(strategy)
                done = await meetings.follow(table, {})
                for runner in self._runners:
                    await runner.call("after_step")
                await meetings.to_the_end(self.num_steps, done)
        except asyncio.CancelledError as error:
            meetings.interrupted(error)
            raise
        finally:
            self._next_step()

    def give_up(self, error: BaseException) -> None:
        """A step has failed on this rank; see `Step`."""
        if self._meets and self._meetings is not None:
            self._meetings.refuse(error)
        self._next_step()

    def _next_step(self) -> None:
        if self._meets:
            self._measured = Reading.nothing(self.comm.size)
        self._in_step = False
        self.num_steps += 1


class Step:
    """One step of an ``Adaptation``: ``async with``, once."""

    def __init__(self, adaptation: Adaptation) -> None:
        self._adaptation = adaptation
        self._begun: Reading | None = None

    async def __aenter__(self) -> None:
        if self._begun is not None:
            raise ConfigError("a step is entered once: call step() for each")
        self._begun = await self._adaptation.begin()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._adaptation.give_up(error)
        elif self._begun is not None:
            await self._adaptation.end(self._begun)
