"""Adaptation: marks the steps of a program, and calls policies between them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kfcomm.adapt.epochs import Epoch, Epochs
from kfcomm.adapt.guarded import ElasticStep, StepGuard
from kfcomm.adapt.host import PolicyHost
from kfcomm.adapt.hyperparameters import Hyperparameters
from kfcomm.adapt.meeting import MeetingPlace, Meetings
from kfcomm.adapt.metrics import EngineMeter, Reading, StepMeter, StepMetrics
from kfcomm.adapt.policy import Decision, Policy
from kfcomm.adapt.recording import StepRecorder
from kfcomm.adapt.steps import Step
from kfcomm.errors import ConfigError, EpochChanged, KfcommError, PeerLost

if TYPE_CHECKING:
    from kfcomm.world.communicator import Communicator

logger = logging.getLogger("kfcomm.adapt")


class Adaptation:
    """Policies that watch a program's steps and change its communication and its training. Made alike on every rank.

    ::

        given = Hyperparameters(batch_size=256, learning_rate=0.1)
        async with Adaptation(comm, [AutoStrategy(("ring", "star"))], hyperparameters=given) as adaptation:
            while training:
                async with adaptation.step():
                    ...                              # the collectives of a step, with adaptation.batch_size samples

    Changes of policies take effect between steps, never within one: the program reads the hyperparameters at the
    beginning of each step.

    In a program whose ranks change, open it inside the ``Elastic``. Joining ranks receive the hyperparameters, and the
    state of the policies, before their first step.

    Args:
        comm: communicator whose strategy may be changed.
        policies: called in this order; the same on every rank. If several ask for the same thing, the first one wins.
        every: number of steps from one meeting of the ranks to the next; metrics are of all these steps.
        meter: measures this rank; None for the totals of its engine.
        hyperparameters: hyperparameters that policies may change, with their first values.
        record: file to which the first rank writes the metrics and decisions of each step, for ``replay``. It is begun
            again where the steps are.
        rest: number of steps for which policies cannot set a value again that was changed and taken back: such requests
            are refused and logged. Policies with ``changes_back`` are left alone. 0 for no such rule.

    Attributes:
        comm: the communicator.

    Raises:
        ConfigError: an argument is not a policy, or ``every`` is not at least 1.

    Cost: for each meeting one all_reduce of ``8 n (7 + number of policies + number of names observed)`` bytes, along a
    binary tree; see "Adaptation".
    """

    def __init__(
        self, comm: Communicator, policies: Sequence[Policy], *, every: int = 1, meter: StepMeter | None = None,
        hyperparameters: Hyperparameters | None = None, record: str | os.PathLike[str] | None = None,
        rest: int = 10,
    ) -> None:  # fmt: skip
        for policy in policies:
            if not isinstance(policy, Policy):
                raise ConfigError(f"a policy is an instance of kfcomm.adapt.Policy, not {policy!r}")
        if type(every) is not int or every < 1:
            raise ConfigError(f"every is a whole number of steps, at least 1, not {every!r}")
        if type(rest) is not int or rest < 0:
            raise ConfigError(f"rest is a whole number of steps, not negative, and not {rest!r}")
        if not isinstance(hyperparameters, (Hyperparameters, type(None))):
            raise ConfigError(f"hyperparameters are kfcomm.adapt.Hyperparameters, not {hyperparameters!r}")
        self.comm = comm
        self._host = PolicyHost(comm, hyperparameters or Hyperparameters(), policies, self._log, rest)
        self._guard = StepGuard(self._host)
        self._every = every
        self._meter = meter or EngineMeter(comm)
        self._has_own_meter = meter is None
        self._host.recorder = None if record is None else StepRecorder(record, self._host)
        self._meetings: Meetings | None = None
        self._births = comm.births
        self._is_closed = False
        self._in_step = False
        self._num_samples = 0  # of the step under way
        self._epochs = Epochs(self._host)
        self._loaded: dict[str, Any] | None = None  # state to continue with
        self._measured = Reading.nothing(comm.size)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """Policies that are not switched off."""
        return tuple(runner.policy for runner in self._host.runners if not runner.is_off)

    @property
    def decisions(self) -> list[Decision]:
        """Decisions, with their evidence; the same on every rank, from its first step on."""
        return self._host.decisions

    @property
    def metrics(self) -> StepMetrics | None:
        """Metrics of the last step at whose end the ranks met; None before."""
        return self._host.metrics

    @property
    def guard(self) -> StepGuard:
        """Guard of the steps, for algorithms that reduce gradients; see ``Step.guarded``."""
        return self._guard

    @property
    def num_steps(self) -> int:
        """Number of steps that have ended."""
        return self._host.num_steps

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Hyperparameters in force; the same object until one changes."""
        return self._host.hyperparameters

    @property
    def batch_size(self) -> int | None:
        """Number of samples of a step, of all ranks together; None if the program has not given it."""
        return self.hyperparameters.batch_size

    @property
    def local_batch_size(self) -> int | None:
        """This rank's share of the batch; shares differ by at most one, the first ones are larger."""
        whole = self.batch_size
        return None if whole is None else whole // self.comm.size + (self.comm.rank < whole % self.comm.size)

    @property
    def learning_rate(self) -> float | None:
        """Learning rate of the next step, lowered after a void one by `GuardSteps`; None if it was not given."""
        rate = self.hyperparameters.learning_rate
        return None if rate is None else rate * self._guard.rate

    @property
    def agreement(self) -> str | None:
        """Name of the algorithm by which the replicas agree; None if the program has not given it."""
        return self.hyperparameters.agreement

    @property
    def wire_dtype(self) -> str | None:
        """Dtype of gradients on the wire, for the argument ``wire_dtype`` of collectives."""
        return self.hyperparameters.wire_dtype

    def value(self, name: str) -> Any:
        """Value of a hyperparameter by its name, also of a free one, in the next step.

        Raises:
            ConfigError: the program has given none of this name.
        """
        return self.learning_rate if name == "learning_rate" else self.hyperparameters.value(name)

    @property
    def num_samples(self) -> int:
        """Number of samples of all steps that count; see ``Context.num_samples``."""
        return self._host.progress.num_samples

    @property
    def is_over(self) -> bool:
        """Whether a policy has asked for the end of training; the same on all ranks after each step."""
        return self._host.stopped is not None

    def observe(self, /, **values: float) -> None:
        """Report numbers of this step to the policies of all ranks, at the next meeting.

        The values are in ``StepMetrics.observed`` by name and rank, for this one meeting. The last value of a name
        counts; nan is a value like others.

        Raises:
            ConfigError: a value is not a number, or there are more than 64 names.
        """
        self._host.observed.observe(values)

    def step(self, step: ElasticStep | None = None) -> Step:
        """One step of the program: ``async with adaptation.step(): ...``, on every rank.

        The ranks meet at its end. If its block raises, this rank does not come, and the others' meeting fails.

        Args:
            step: step of an ``Elastic`` that it is: what `GuardSteps` makes void gives its samples again.

        Raises:
            ConfigError: on entering, when another step is under way, or after ``close``; or the ranks have changed
                without an open ``Elastic``.
            CollectiveMismatch: on entering the first: the ranks have different policies; on leaving: they are at
                different steps.
            CollectiveAborted, CollectiveTimeout, PeerLost, SessionClosed: on leaving: not all ranks came.
        """
        return Step(self, step)

    def epoch(self) -> Epoch:
        """One epoch: ``async with adaptation.epoch(): ...`` around its steps, on every rank.

        Policies' ``on_epoch_start`` is called before its first step, ``on_epoch_end`` at its end; not if it has no
        steps, as on a rank that has joined later. Where steps of an ``Elastic`` are given, ``adaptation.step(step)``,
        and no epochs, the passes of the first step's sampler are the epochs.

        Raises:
            ConfigError: on entering: an epoch is under way.
        """
        return Epoch(self._epochs)

    def state_dict(self) -> Any:
        """State for a checkpoint: hyperparameters, counts, and policies; None before the first step.

        Given to ``kfcomm.elastic.State(adaptation=adaptation)``, it survives the loss of all ranks; open the adaptation
        inside the ``Elastic`` all the same.
        """
        return self._loaded if self._meetings is None else self._host.state()

    def load_state_dict(self, state: Any) -> None:
        """Continue with the ``state_dict`` of another adaptation, from the next step on; called on all ranks."""
        self._loaded = state

    async def start(self) -> None:
        """Meet the other ranks, and call ``on_start``; entering the first step does it, if nothing did before.

        Raises:
            ConfigError: the record cannot be written.
            CollectiveMismatch: the ranks have different policies, other hyperparameters, or another ``every``.
        """
        await self._started()

    async def _started(self) -> Meetings:
        if self._is_closed:
            raise ConfigError("this adaptation is closed")
        if self._meetings is None:
            meetings = Meetings(self._host, await MeetingPlace.of(self.comm))
            try:
                await self._meet_the_others(meetings, knows=False)
            except BaseException:
                await self._end_meetings(meetings)
                raise
            # Only once all ranks have met: a start that has failed may be tried again.
            self._meetings = meetings
        return self._meetings

    async def _meet_the_others(self, meetings: Meetings, *, knows: bool) -> None:
        """Begin like all ranks: with the state of a rank that was there before, if there is one."""
        self._births = self.comm.births
        self._measured = Reading.nothing(self.comm.size)
        recorder = self._host.recorder
        # Before the introduction, by which all ranks learn of a record that cannot be written.
        wrong = recorder.open() if recorder is not None and self.comm.rank == 0 else None
        loaded, self._loaded = self._loaded, None
        knowing = await meetings.introduce(self._every, knows=2 if knows else loaded is not None, wrong=wrong)
        own = self._host.state() if knows or loaded is None else loaded
        state = await meetings.place.take(own, knowing) if knowing else None
        if recorder is not None:
            recorder.begin(state)
        if state is not None:
            await self._host.load_state(state)
            return
        for runner in self._host.runners:
            await runner.call("on_start")

    async def _end_meetings(self, meetings: Meetings) -> None:
        await meetings.place.close()
        if self._host.recorder is not None:
            self._host.recorder.close()

    async def close(self) -> None:
        """Call ``on_end``, and end the meetings; pending requests are dropped. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        for runner in self._host.runners:
            await runner.end()
        if self._meetings is not None:
            await self._end_meetings(self._meetings)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self._epochs.close()
        await self.close()

    def _log(self, decision: Decision, level: int) -> None:
        # all ranks decide the same: the other ranks' lines would only repeat those of rank 0
        logger.log(level if self.comm.rank == 0 else logging.DEBUG, "%s", decision)
        for observer in self.comm._session.engine.all_observers():
            observer.instant("decision", policy=decision.policy, what=decision.what, why=decision.why)

    # ---------------------------------------------------------------- ranks that change

    async def _go_on(self) -> None:
        """Meet the new ranks, if the ranks have changed."""
        meetings = await self._started()
        outlives = meetings.place.is_world
        if self.comm.outlives and not outlives:
            raise ConfigError("open the Elastic before the Adaptation: ranks that join do")
        if self.comm.births == self._births:
            if self._loaded is not None:
                await self._return_to(self._loaded)
            return
        if not outlives:
            raise ConfigError(
                "the ranks have changed, and this adaptation with them only inside an open Elastic: make another one"
            )
        # The totals are of the engine of an epoch, and begin again with the next.
        if self._has_own_meter:
            self._meter = EngineMeter(self.comm)
        await self._meet_the_others(meetings, knows=True)

    async def _return_to(self, state: dict[str, Any]) -> None:
        """Continue with a former state of the same ranks."""
        self._loaded = None
        if self._host.recorder is not None:
            self._host.recorder.begin(state)
        await self._host.load_state(state)

    # ---------------------------------------------------------------- a step

    @property
    def _meets(self) -> bool:
        """Whether the ranks meet at the end of the step that is under way."""
        return (self.num_steps + 1) % self._every == 0

    async def begin(self, step: ElasticStep | None = None) -> Reading:
        """Begin a step, for `Step`."""
        if self._in_step:
            raise ConfigError("a step is under way: steps follow one another")
        await self._go_on()
        self._guard.begin(step)
        self._num_samples = (self.batch_size or 0) if step is None else len(step.batch)
        await self._epochs.begin_step(step)
        self._in_step = True
        try:
            if self._meets:
                if self._host.recorder is not None:
                    self._host.recorder.began()
                for runner in self._host.runners:
                    await runner.call("before_step")
            return self._meter.read()
        except BaseException as error:
            self.give_up(error)
            raise

    async def end(self, begun: Reading, *, counts: bool = True) -> None:
        """End a step, for `Step`."""
        meetings = await self._started()
        measured = self._meter.read().since(begun)
        if len(measured.waited_s) == self.comm.size:  # else a rank is lost, and nothing follows from this step
            self._measured = self._measured.plus(measured)
        try:
            self._guard.settle()
            if counts and self._guard.void is None:
                self._host.progress.num_samples += self._num_samples
            if self._meets:
                await meetings.meet(self._measured)
        # The other ranks may be at this meeting already, and must not wait for its end.
        except asyncio.CancelledError as error:
            meetings.interrupted(error)
            raise
        finally:
            self._next_step()

    async def end_badly(self, begun: Reading, error: BaseException) -> None:
        """End a step that has failed on this rank, for `Step`."""
        # In an ``Elastic`` a lost rank may end calls of a step on some ranks only: all ranks come to the meeting, and
        # see there that one is missing.
        if self.comm.outlives and isinstance(error, (PeerLost, EpochChanged)):
            try:
                await self.end(begun, counts=False)
            except KfcommError:
                return  # the program sees the first error
        else:
            self.give_up(error)

    def give_up(self, error: BaseException) -> None:
        """End a step that has failed on this rank, which does not come to the meeting."""
        if self._meets and self._meetings is not None:
            self._meetings.place.refuse(error)
        self._next_step()

    def _next_step(self) -> None:
        if self._meets:
            self._measured = Reading.nothing(self.comm.size)
        self._in_step = False
        self._host.num_steps += 1
