"""Shared state of the policies of one ``Adaptation``, and the changes that all ranks make for them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kfcomm.adapt.hyperparameters import Hyperparameters
from kfcomm.adapt.metrics import StepMetrics
from kfcomm.common.arguments import whole_number
from kfcomm.errors import ConfigError
from kfcomm.strategies import AnyStrategy
from kfcomm.types import Layout

if TYPE_CHECKING:
    from kfcomm.adapt.policy import Request
    from kfcomm.adapt.recording import StepRecorder

STRATEGY, SIZE = "strategy", "size"
"""Subjects beside the names of hyperparameters."""
MAX_SHOWN = 16
"""Items of a sequence in the log."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision of a policy, with its evidence.

    Attributes:
        step: number of the step at whose end it was made.
        policy: name of the policy.
        what: in words.
        evidence: the numbers behind it.
    """

    step: int
    policy: str
    what: str
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def why(self) -> str:
        """The evidence in words."""
        return ", ".join(f"{name.replace('_', ' ')} {_shown(value)}" for name, value in self.evidence.items())

    def __str__(self) -> str:
        return f"step {self.step}: {self.policy}: {self.what}" + (f" ({self.why})" if self.why else "")


class Named(Protocol):
    """Source of a change: the runner of a policy, or a stand-in for one that is not here."""

    @property
    def name(self) -> str:
        """Name for the log."""


@dataclass(frozen=True, slots=True)
class Held:
    """Strategy and hyperparameters before a change for a policy."""

    strategy: AnyStrategy
    hyperparameters: Hyperparameters


@dataclass
class StaticWorld:
    """Stand-in for a communicator, for policies without ranks: a replay or a simulation, as rank 0 sees it.

    Attributes:
        layout: hosts of the ranks.
        strategy: set or asked for last.
        outlives: whether the number of ranks can change.
    """

    layout: Layout
    strategy: AnyStrategy
    outlives: bool = True
    rank: int = 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.layout.size

    async def set_strategy(self, strategy: AnyStrategy) -> None:
        """Set the strategy."""
        self.strategy = strategy

    async def propose_size(self, size: int) -> None:
        """Accept a size; the layout stays."""

    async def propose_replacement(self, rank: int) -> None:
        """Accept a replacement; the layout stays."""

    async def broadcast_object(self, value: Any, root: int, name: str) -> Any:
        """Return the value: there is one rank that speaks."""
        return value


class PolicyHost:
    """Shared state of policies, the same on every rank, and the changes that all ranks make together.

    Args:
        comm: communicator of all ranks, or a `StaticWorld`.
        hyperparameters: at first.
        on_decision: called with each decision, and its level for the log.

    Attributes:
        recorder: writes down what happens; None without a record.
        decisions: all decisions.
        metrics: of the last step at whose end the ranks met; None before.
        num_steps: number of steps that have ended.
        hyperparameters: of the next step.
        holders: by subject, the policy that has changed it last.
    """

    def __init__(
        self, comm: Any, hyperparameters: Hyperparameters, on_decision: Callable[[Decision, int], None] | None = None
    ) -> None:
        self.comm = comm
        self.hyperparameters = hyperparameters
        self.recorder: StepRecorder | None = None
        self.decisions: list[Decision] = []
        self.metrics: StepMetrics | None = None
        self.num_steps = 0
        self.holders: dict[str, Named] = {}
        self._on_decision = on_decision

    @property
    def held(self) -> Held:
        """Strategy and hyperparameters, for a later ``restore``."""
        return Held(self.comm.strategy, self.hyperparameters)

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

    def switched_off(self, runner: Named, what: str, evidence: Mapping[str, Any]) -> None:
        """Log that a policy is not called any more."""
        self.decide(runner, f"switched off: {what}", evidence, logging.WARNING)
        self._note("", runner, off=what, evidence=evidence)

    # ---------------------------------------------------------------- changes that all ranks make together

    async def change_strategy(self, chosen: AnyStrategy, runner: Named | None) -> None:
        """Set the strategy, for a policy or (None) to restore it."""
        # A swap costs a collective; setting the strategy in force again would cost it for nothing.
        if self.comm.strategy.digest != chosen.digest:
            await self.comm.set_strategy(chosen)
        self._hold(STRATEGY, runner, [chosen.name, chosen.digest.hex()])

    async def change_hyperparameter(self, name: str, value: Any, runner: Named | None) -> None:
        """Set a hyperparameter from the next step on, for a policy or (None) to restore it."""
        self.hyperparameters = self.hyperparameters.having(name, value)
        self._hold(name, runner, value)

    async def change_size(self, size: int, runner: Named) -> None:
        """Ask the job for this number of ranks, which come or go at a later step."""
        await self._propose(self.comm.propose_size, size)
        self._hold(SIZE, runner, size)

    async def replace_rank(self, rank: int) -> None:
        """Ask the job for another process in the place of a rank."""
        await self._propose(self.comm.propose_replacement, rank)

    async def together(self, what: str, call: Callable[[Any], Awaitable[T]], runner: Named) -> T:
        """Call a function that uses collectives, at the same place on all ranks."""
        result = await call(self.comm)
        if self.recorder is not None:
            self.recorder.done_together(runner, what, result)
        return result

    async def restore(self, runner: Named, before: Held) -> None:
        """Undo what a policy has changed, except where another one has changed it since."""
        for subject in [subject for subject, holder in self.holders.items() if holder is runner]:
            if subject == STRATEGY:
                await self.change_strategy(before.strategy, None)
            # Ranks that have come or gone cannot be undone.
            elif subject != SIZE:
                await self.change_hyperparameter(subject, getattr(before.hyperparameters, subject), None)

    # ---------------------------------------------------------------- arguments of requests

    def check_size(self, size: Any) -> int:
        """Check a number of ranks that a policy asks for.

        Raises:
            ConfigError: it is not a number of ranks, or the ranks of this program cannot change.
        """
        number = whole_number(size)
        if number is None or number < 1:
            raise ConfigError(f"a size is a whole number from 1 on, not {size!r}")
        if not self.comm.outlives:
            raise ConfigError(f"{size} ranks were asked for, but these cannot change: that needs an open Elastic")
        return number

    def check_rank(self, rank: Any) -> int:
        """Check a rank that a policy asks to replace.

        Raises:
            ConfigError: the rank is out of range, or the ranks of this program cannot change.
        """
        number = whole_number(rank)
        if number is None or not 0 <= number < self.comm.size:
            raise ConfigError(f"a rank is a whole number from 0 to {self.comm.size - 1}, not {rank!r}")
        if not self.comm.outlives:
            raise ConfigError(
                f"another was asked for in place of rank {rank}, but these cannot change: open an Elastic"
            )
        return number

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


def _shown(value: Any) -> str:
    """A value, or several, as the log shows it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (tuple, list)):
        left_out = len(value) - MAX_SHOWN
        return "[" + ", ".join(map(_shown, value[:MAX_SHOWN])) + (f", {left_out} more]" if left_out > 0 else "]")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_shown(one)}" for key, one in value.items()) + "}"
    return str(value)
