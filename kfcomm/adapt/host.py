"""What a policy's context stands on: what holds, and how what all ranks ask for is done.

Two things are hosts: a running ``Adaptation``, and a `GivenHost`, on which a replay of what one has recorded stands.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kfcomm.adapt.decision import Decision
from kfcomm.adapt.hyperparameters import Hyperparameters
from kfcomm.adapt.metrics import StepMetrics
from kfcomm.common.arguments import whole_number
from kfcomm.errors import ConfigError
from kfcomm.strategies import AnyStrategy
from kfcomm.types import Layout

if TYPE_CHECKING:
    from kfcomm.adapt.requests import Request
    from kfcomm.adapt.runner import Runner
    from kfcomm.world.communicator import Communicator

STRATEGY, SIZE = "strategy", "size"
"""Subjects beside the names of hyperparameters."""

T = TypeVar("T")


class Named(Protocol):
    """Who changes something: a policy, or what stands for one that is not here."""

    @property
    def name(self) -> str:
        """By which it is logged."""


@dataclass(frozen=True, slots=True)
class Held:
    """What held before something was done for a policy."""

    strategy: AnyStrategy
    hyperparameters: Hyperparameters


class Host(ABC):
    """What holds, the same on every rank.

    Attributes:
        decisions: what was decided.
        metrics: of the last step at whose end the ranks met; None before.
        num_steps: steps that have ended.
        hyperparameters: what holds of the training.
        holders: the policy that has last changed a subject.
    """

    def __init__(self, hyperparameters: Hyperparameters) -> None:
        self.decisions: list[Decision] = []
        self.metrics: StepMetrics | None = None
        self.num_steps = 0
        self.hyperparameters = hyperparameters
        self.holders: dict[str, Named] = {}

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of ranks."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This one."""

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """Hosts of the ranks."""

    @property
    @abstractmethod
    def strategy(self) -> AnyStrategy:
        """The strategy in force."""

    def record(self, decision: Decision, level: int = logging.INFO) -> None:
        """Keep a decision."""
        self.decisions.append(decision)

    def decide(self, runner: Named, what: str, evidence: Mapping[str, Any], level: int = logging.INFO) -> None:
        """Keep a decision of a policy."""
        self.record(Decision(self.num_steps, runner.name, what, evidence), level)

    @property
    def held(self) -> Held:
        """What holds now."""
        return Held(self.strategy, self.hyperparameters)

    # ---------------------------------------------------------------- what is done together

    @abstractmethod
    async def change_strategy(self, chosen: AnyStrategy, runner: Named | None) -> None:
        """Set it on all ranks."""

    async def change_hyperparameter(self, name: str, value: Any, runner: Named | None) -> None:
        """It holds from the next step on."""
        self.hyperparameters = self.hyperparameters.having(name, value)
        self._held_by(name, runner)

    @abstractmethod
    def check_size(self, size: int) -> int:
        """A number of ranks that may be asked for.

        Raises:
            ConfigError: it may not, or the ranks cannot change.
        """

    @abstractmethod
    async def change_size(self, size: int, runner: Named) -> None:
        """Ask for so many ranks; they are there at a later step."""

    @abstractmethod
    def check_rank(self, rank: int) -> int:
        """A rank in whose place another may be asked for.

        Raises:
            ConfigError: it may not, or the ranks cannot change.
        """

    @abstractmethod
    async def replace_rank(self, rank: int) -> None:
        """Ask that another come in its place."""

    @abstractmethod
    async def together(self, what: str, call: Callable[[Communicator], Awaitable[T]], runner: Runner) -> T:
        """What all ranks do at this place."""

    def overruled(self, request: Request[Any], by: str, words: str) -> None:
        """A policy did not have its way, since another one asks for something else, in these words."""
        what = f"asks for {request.words}: overruled by {by}, which comes before it"
        self.decide(request.runner, what, {f"{by} asks for": words})

    def met_again(self) -> None:
        """The ranks meet once more at the end of the same step."""
        return

    def switched_off(self, runner: Runner, what: str, evidence: Mapping[str, Any]) -> None:
        """A policy is not called any more."""
        self.decide(runner, f"switched off: {what}", evidence, logging.WARNING)

    async def restore(self, runner: Runner, before: Held) -> None:
        """Whatever a policy has changed, and no other since, is again as it was before."""
        mine = [subject for subject, holder in self.holders.items() if holder is runner]
        for subject in mine:
            if subject == STRATEGY:
                await self.change_strategy(before.strategy, None)
            elif subject != SIZE:
                await self.change_hyperparameter(subject, getattr(before.hyperparameters, subject), None)

    def _held_by(self, subject: str, runner: Named | None) -> None:
        if runner is None:
            self.holders.pop(subject, None)
        else:
            self.holders[subject] = runner


class GivenHost(Host):
    """A host without ranks: what holds is what it is told, as rank 0 sees it.

    Attributes:
        can_change: whether the ranks can.
    """

    can_change = True
    _layout: Layout
    _strategy: AnyStrategy

    @property
    def size(self) -> int:
        """Of the layout."""
        return self._layout.size

    @property
    def rank(self) -> int:
        """The first."""
        return 0

    @property
    def layout(self) -> Layout:
        """As it was told."""
        return self._layout

    @property
    def strategy(self) -> AnyStrategy:
        """The one that was told, or asked for, last."""
        return self._strategy

    async def change_strategy(self, chosen: AnyStrategy, runner: Named | None) -> None:
        """It is in force."""
        self._strategy = chosen
        self._held_by(STRATEGY, runner)

    def check_size(self, size: int) -> int:
        """See `checked_size`."""
        return checked_size(size, can_change=self.can_change)

    async def change_size(self, size: int, runner: Named) -> None:
        """It is asked for; the layout stays."""
        self._held_by(SIZE, runner)

    def check_rank(self, rank: int) -> int:
        """See `checked_rank`."""
        return checked_rank(rank, self.size, can_change=self.can_change)

    async def replace_rank(self, rank: int) -> None:
        """It is asked for; the layout stays."""


def checked_size(size: Any, *, can_change: bool) -> int:
    """A number of ranks that may be asked for.

    Raises:
        ConfigError: it may not, or the ranks cannot change.
    """
    number = whole_number(size)
    if number is None or number < 1:
        raise ConfigError(f"a size is a whole number from 1 on, not {size!r}")
    if not can_change:
        raise ConfigError(f"{size} ranks were asked for, but these cannot change: that needs an open Elastic")
    return number


def checked_rank(rank: Any, size: int, *, can_change: bool) -> int:
    """A rank in whose place another may be asked for.

    Raises:
        ConfigError: it may not, or the ranks cannot change.
    """
    number = whole_number(rank)
    if number is None or not 0 <= number < size:
        raise ConfigError(f"a rank is a whole number from 0 to {size - 1}, not {rank!r}")
    if not can_change:
        raise ConfigError(f"another was asked for in place of rank {rank}, but these cannot change: open an Elastic")
    return number
