"""Shared state of the policies of one ``Adaptation``, and the runner of each policy on this rank."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from kfcomm.adapt.flapping import RecentChanges
from kfcomm.adapt.hyperparameters import Hyperparameters
from kfcomm.adapt.metrics import Observed, StepMetrics
from kfcomm.adapt.policy import Decision, Policy
from kfcomm.adapt.requests import SIZE, STOP, STRATEGY, Request
from kfcomm.adapt.runner import Runner
from kfcomm.errors import ConfigError
from kfcomm.strategies import AnyStrategy
from kfcomm.world.communicator import Communicator

if TYPE_CHECKING:
    from kfcomm.adapt.recording import StepRecorder

logger = logging.getLogger("kfcomm.adapt")

Action = Literal["keep", "roll_back", "set_aside"]
T = TypeVar("T")


class Named(Protocol):
    """Source of a change: the runner of a policy, or a stand-in for one that is not here."""

    @property
    def name(self) -> str:
        """Name for the log."""


@dataclass(slots=True)
class TrainingProgress:
    """Progress of training, the same on all ranks.

    Attributes:
        num_samples: number of samples of the steps that count.
        epoch: number of epochs that are over.
        in_epoch: whether one is under way.
    """

    num_samples: int = 0
    epoch: int = 0
    in_epoch: bool = False

    def as_list(self) -> list[Any]:
        """Encode it for JSON and msgpack."""
        return [self.num_samples, self.epoch, self.in_epoch]


@dataclass(frozen=True, slots=True)
class Held:
    """Strategy and hyperparameters before a change for a policy."""

    strategy: AnyStrategy
    hyperparameters: Hyperparameters


class PolicyHost:
    """Shared state of policies, the same on every rank, and the changes that all ranks make together."""

    def __init__(
        self, comm: Any, hyperparameters: Hyperparameters, policies: Sequence[Policy],
        on_decision: Callable[[Decision, int], None] | None = None, rest: int = 0,
    ) -> None:  # fmt: skip
        self.comm = comm  # communicator of all ranks, or a `StaticWorld`
        self.runners = [Runner(policy, self) for policy in policies]  # in an order that all ranks share
        self.observed = Observed()
        self.hyperparameters = hyperparameters  # of the next step
        self.recorder: StepRecorder | None = None  # writes down what happens; None without a record
        self.decisions: list[Decision] = []
        self.metrics: StepMetrics | None = None  # of the last step at whose end the ranks met; None before
        self.num_steps = 0  # number of steps that have ended
        self.step: Any = None  # step of an ``Elastic`` that the present one is
        self.progress = TrainingProgress()
        self.stopped: str | None = None  # reason for which training is over
        self.changes = RecentChanges(rest)
        self.holders: dict[str, Named] = {}  # by subject, the policy that has changed it last
        self._on_decision = on_decision  # called with each decision, and its level for the log

    def decide(self, runner: Named, what: str, evidence: Mapping[str, Any], level: int = logging.INFO) -> None:
        """Keep a decision of a policy, log it and record it."""
        decision = Decision(self.num_steps, runner.name, what, evidence)
        self.decisions.append(decision)
        if self._on_decision is not None:
            self._on_decision(decision, level)
        if self.recorder is not None:
            self.recorder.decided(decision)

    def overruled(self, request: Request[Any], by: str, words: str) -> None:
        """Log that a policy's request is dropped, because an earlier policy asks for something else, in these words."""
        what = f"asks for {request.words}: overruled by {by}, which comes before it"
        self.decide(request.runner, what, {f"{by} asks for": words})
        self._note(request.subject, request.runner, words=request.words, overruled=words, by=by)

    def refuses(self, runner: Runner, subject: str, value: Any, words: str) -> bool:
        """Whether a request is refused, because this value was taken back a few steps ago; then it is logged."""
        since = self.changes.steps_since(subject, value, self.num_steps)
        if since is None or runner.policy.changes_back:
            return False
        what = f"asks for {words}: refused, since that was taken back {since} steps ago"
        self.decide(runner, what, {"rest": self.changes.rest})
        return True

    def switched_off(self, runner: Named, what: str, evidence: Mapping[str, Any]) -> None:
        """Log that a policy is not called any more."""
        self.decide(runner, f"switched off: {what}", evidence, logging.WARNING)
        self._note("", runner, off=what, evidence=evidence)

    # ---------------------------------------------------------------- ranks that join

    def state(self) -> dict[str, Any]:
        """State for joining ranks, and for records: hyperparameters and policies; msgpack can carry it."""
        return {
            "num_steps": self.num_steps,
            "hyperparameters": self.hyperparameters.as_json(),
            "observed": list(self.observed.columns),
            "progress": self.progress.as_list(),
            "stopped": self.stopped,
            "changes": self.changes.state,
            "policies": [runner.state() for runner in self.runners],
        }

    async def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue with the state that a rank has sent; all ranks do, so that they are equal."""
        self.num_steps = state["num_steps"]
        self.hyperparameters = Hyperparameters.from_json(state["hyperparameters"])
        self.observed.columns = tuple(state["observed"])
        self.progress = TrainingProgress(*state["progress"])
        self.stopped = state["stopped"]
        self.changes.state = state["changes"]
        for runner, one in zip(self.runners, state["policies"], strict=True):
            await runner.begin_anew(one)

    # ---------------------------------------------------------------- changes that all ranks make together

    async def change_strategy(self, chosen: AnyStrategy, runner: Named | None) -> None:
        """Set the strategy, for a policy or (None) to restore it."""
        # A swap costs a collective; setting the strategy in force again would cost it for nothing.
        before = self.comm.strategy.digest
        if before != chosen.digest:
            await self.comm.set_strategy(chosen)
        self.changes.note(STRATEGY, self.num_steps, before.hex(), chosen.digest.hex())
        self._hold(STRATEGY, runner, [chosen.name, chosen.digest.hex()])

    def take_strategy(self) -> None:
        """Let ``auto`` improve itself no more."""
        comm = getattr(self.comm, "current", self.comm)
        if isinstance(comm, Communicator):
            comm._group.is_set = True

    async def change_hyperparameter(self, name: str, value: Any, runner: Named | None) -> None:
        """Set a hyperparameter from the next step on, for a policy or (None) to restore it."""
        self.changes.note(name, self.num_steps, self.hyperparameters.value(name), value)
        self.hyperparameters = self.hyperparameters.having(name, value)
        self._hold(name, runner, value)

    async def change_size(self, size: int, runner: Named) -> None:
        """Ask the job for this number of ranks, which come or go at a later step."""
        await self._propose(self.comm.propose_size, size)
        self.changes.note(SIZE, self.num_steps, self.comm.size, size)
        self._hold(SIZE, runner, size)

    def check_action(self, action: Action) -> None:
        """Check that the program has what an action needs."""
        if not self.comm.outlives:
            raise ConfigError(f"{action} was asked for: that needs an open Elastic")
        if action == "set_aside" and self.step is None and self.num_steps:
            raise ConfigError("set_aside was asked for: that needs steps of an Elastic, adaptation.step(step)")

    def act(self, action: Action, samples: Sequence[int]) -> None:
        """Let the open ``Elastic`` keep or restore its state, or the sampler of the step set samples aside."""
        if action == "set_aside":
            self.step.sampler.set_aside(samples)
        else:
            getattr(self.comm.elastic, action)()

    def stop(self, reason: str, runner: Named) -> None:
        """Note that training is over."""
        self.stopped = reason
        self._hold(STOP, runner, reason)

    async def replace_rank(self, rank: int) -> None:
        """Ask the job for another process in the place of a rank."""
        await self._propose(self.comm.propose_replacement, rank)

    async def together(self, what: str, call: Callable[[Any], Awaitable[T]], runner: Named) -> T:
        """Call a function that uses collectives, at the same place on all ranks."""
        result = await call(self.comm)
        # A replay has no ranks that could do it again.
        if self.recorder is not None:
            self.recorder.done_together(runner, what, result)
        return result

    async def restore(self, runner: Named, before: Held) -> None:
        """Undo what a policy has changed, except where another one has changed it since."""
        for subject in [subject for subject, holder in self.holders.items() if holder is runner]:
            if subject == STRATEGY:
                await self.change_strategy(before.strategy, None)
            # Ranks that have come or gone cannot be undone, nor an end that the program may have seen.
            elif subject not in (SIZE, STOP):
                await self.change_hyperparameter(subject, before.hyperparameters.value(subject), None)
            self.changes.forget(subject)

    # ---------------------------------------------------------------- helpers

    async def _propose(self, propose: Callable[[int], Awaitable[None]], number: int) -> None:
        """Let rank 0 ask the job; all ranks learn the answer."""
        # Only one rank asks, so that the store sees one request; the answer decides on all ranks.
        wrong = None
        if self.comm.rank == 0:
            try:
                await propose(number)
            except ConfigError as error:
                wrong = str(error)
        wrong = await self.comm.broadcast_object(wrong, 0, "kfcomm/adaptation/size")
        if wrong is not None:
            raise ConfigError(wrong)

    def _hold(self, subject: str, runner: Named | None, value: Any) -> None:
        self.held_by(subject, runner)
        self._note(subject, runner, value=value)

    def held_by(self, subject: str, runner: Named | None) -> None:
        """Note which policy has changed a subject last; None for no policy."""
        if runner is None:
            self.holders.pop(subject, None)
        else:
            self.holders[subject] = runner

    def _note(self, subject: str, who: Named | None, **what: Any) -> None:
        if self.recorder is not None:
            self.recorder.changed(subject, who, what)
