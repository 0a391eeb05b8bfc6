"""What users write: a policy, and what it is given.

A policy reads what all ranks share and asks for changes. It runs on every rank; nothing that it asks for happens
before all ranks have asked for the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from kfcomm.adapt.metrics import StepMetrics
from kfcomm.adapt.requests import Request, words_of
from kfcomm.plugins import build
from kfcomm.strategies import AnyStrategy, StrategySpec
from kfcomm.types import Layout

if TYPE_CHECKING:
    from kfcomm.adapt.adaptation import Adaptation
    from kfcomm.adapt.runner import Runner
    from kfcomm.communicator import Communicator

T = TypeVar("T")

MAX_SHOWN = 16
"""Of a sequence, in the log."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Something that was decided, and why.

    Attributes:
        step: number of the step at whose end it was.
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


class Policy:
    """Base of policies: override what you need. Each method may be a plain or an ``async`` one.

    The same policies, in the same order, are given to ``Adaptation`` on every rank. They decide by what ``ctx`` holds,
    which is the same on every rank, and by nothing else: no clock, no chance, no rank.

    A policy that raises, on one rank or on all, or that asks for something else on one rank than on another, is
    switched off on every rank, which is logged with its name; the job goes on as it is.
    """

    @property
    def name(self) -> str:
        """By which it is logged."""
        return type(self).__name__

    def on_start(self, ctx: Context) -> Any:
        """Before the first step."""

    def before_step(self, ctx: Context) -> Any:
        """Before a step at whose end the ranks meet."""

    def after_step(self, ctx: Context) -> Any:
        """After it, with ``ctx.metrics`` of it."""

    def on_end(self, ctx: Context) -> Any:
        """After the last step; nothing can be asked for any more."""


class Context:
    """What a policy sees: what all ranks share. It is the same object in every call."""

    def __init__(self, adaptation: Adaptation, runner: Runner) -> None:
        self._adaptation = adaptation
        self._runner = runner

    @property
    def step(self) -> int:
        """Number of the step, from 0."""
        return self._adaptation.num_steps

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._adaptation.comm.size

    @property
    def layout(self) -> Layout:
        """Hosts of the ranks."""
        return self._adaptation.comm.layout

    @property
    def strategy(self) -> AnyStrategy:
        """The strategy in force."""
        return self._adaptation.comm.strategy

    @property
    def metrics(self) -> StepMetrics | None:
        """Of the last step at whose end the ranks met; None before the first."""
        return self._adaptation.metrics

    def decide(self, what: str, **evidence: Any) -> None:
        """Log and record a decision, with the numbers behind it."""
        self._adaptation.record(Decision(self.step, self._runner.name, what, evidence))

    def set_strategy(self, strategy: StrategySpec, **evidence: Any) -> Request[None]:
        """Ask for another strategy; see ``Communicator.set_strategy``.

        The ranks compare what they ask for when they meet next: at the end of the next step or, where they have just
        done something together, at once. Then all of them change.

        Args:
            strategy: a name, a ``Strategy``, a ``GraphPair`` or a ``Graph``.
            evidence: numbers to be logged with the change.

        Returns:
            What may be awaited: the policy goes on when the strategy is in force. Until its method has returned, it
            is not called again.

        Raises:
            ConfigError: there is no such strategy, or it is for another number of ranks.
        """
        chosen = build(strategy, self.layout)

        async def change(comm: Communicator) -> None:
            before = comm.strategy
            if before.digest != chosen.digest:
                await comm.set_strategy(chosen)
            self.decide(f"strategy {before.name} -> {chosen.name}", **evidence)

        return self._runner.ask(Request(words_of(f"strategy {chosen.name}", chosen.digest), change))

    def together(self, what: str, call: Callable[[Communicator], Awaitable[T]]) -> Request[T]:
        """Ask for something that all ranks do together, such as a probe: ``call(comm)``, on every rank.

        Args:
            what: in words; ranks that say the same are taken to mean the same.
            call: may use collectives, since all ranks run it at the same place. Its result should be the same on
                every rank, if the policy is to decide by it.

        Returns:
            What may be awaited; the result is that of ``call``.
        """
        return self._runner.ask(Request(words_of(what), call))


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (tuple, list)):
        left_out = len(value) - MAX_SHOWN
        return "[" + ", ".join(map(_shown, value[:MAX_SHOWN])) + (f", {left_out} more]" if left_out > 0 else "]")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_shown(one)}" for key, one in value.items()) + "}"
    return str(value)
