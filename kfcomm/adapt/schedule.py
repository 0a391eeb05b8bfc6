"""Policies that follow a plan: a schedule of values by steps, and an end of training."""

from __future__ import annotations

from typing import Any

from kfcomm.adapt.policy import Context, Policy
from kfcomm.adapt.requests import SIZE, STRATEGY
from kfcomm.common.arguments import whole_number
from kfcomm.errors import ConfigError
from kfcomm.types import override


class Schedule(Policy):
    """Gives a hyperparameter, the number of ranks or the strategy a value for a number of steps, then the next.

    ::

        Schedule("batch_size", "64:1000,128:2000,256:1000")

    After the last value's steps that value stays. The first one is in force from the first step on if the program
    begins with it, else from the second. With ``Adaptation(every=...)`` a value begins at the next meeting.

    Args:
        what: a name of ``Hyperparameters``, also a free one, ``"size"`` or ``"strategy"``.
        plan: pairs of a value and a number of steps: ``"4:1000,8:2000"``, or ``[(4, 1000), (8, 2000)]``.
        stops: training ends after the last value's steps.

    Raises:
        ConfigError: the plan cannot be read.

    Source: KungFu's ``step_based_schedule``, Mai et al., OSDI 2020.
    """

    changes_back = True

    def __init__(self, what: str, plan: str | list[tuple[Any, int]], *, stops: bool = False) -> None:
        self._what = what
        self._plan = _parsed(plan) if isinstance(plan, str) else [(value, steps) for value, steps in plan]
        if not self._plan or not all((whole_number(steps) or 0) >= 1 for _, steps in self._plan):
            raise ConfigError(f"a schedule is like '4:1000,8:2000': values, each with a number of steps, not {plan!r}")
        self._stops = stops

    @property
    @override
    def name(self) -> str:
        return f"Schedule of {self._what}"

    def on_start(self, ctx: Context) -> None:
        """Ask for the value of the present step, if it is not in force."""
        if self._what == STRATEGY:
            ctx.take_strategy()
        self._ask(ctx, ctx.step)

    def before_step(self, ctx: Context) -> None:
        """Ask for the value of the next step."""
        self._ask(ctx, ctx.step + 1)
        num_steps = sum(steps for _, steps in self._plan)
        if self._stops and ctx.step + 1 >= num_steps:
            ctx.stop(f"the schedule of {self._what} is over", num_steps=num_steps)

    def value_at(self, step: int) -> Any:
        """Return the value of a step."""
        end = 0
        for value, steps in self._plan:
            end += steps
            if step < end:
                return value
        return self._plan[-1][0]

    def _ask(self, ctx: Context, step: int) -> None:
        value = self.value_at(step)
        if self._what == SIZE:
            if value != ctx.size:
                ctx.resize(value)
        elif self._what == STRATEGY:
            if value != ctx.strategy.name:
                ctx.set_strategy(value)
        elif ctx.hyperparameters.checked(self._what, value, ctx.size) != ctx.hyperparameters.value(self._what):
            ctx.set(self._what, value)


class StopAt(Policy):
    """Ends training after a number of steps, samples or epochs, whichever comes first.

    Training ends with the step at which the number is reached: ``Adaptation.is_over``.

    Args:
        num_steps: steps.
        num_samples: samples of all ranks together; see ``Context.num_samples``.
        num_epochs: epochs; it ends with the first step after the last of them, unless the program ends before.

    Raises:
        ConfigError: no number is given, or one is below 1.
    """

    def __init__(
        self, *, num_steps: int | None = None, num_samples: int | None = None, num_epochs: int | None = None
    ) -> None:
        self._totals = {"steps": num_steps, "samples": num_samples, "epochs": num_epochs}
        given = [total for total in self._totals.values() if total is not None]
        if not given or not all((whole_number(total) or 0) >= 1 for total in given):
            raise ConfigError(f"StopAt takes numbers of steps, samples or epochs, each at least 1, not {self._totals}")

    def before_step(self, ctx: Context) -> None:
        """Ask for the end if this step reaches a number."""
        batch = ctx.hyperparameters.batch_size or 0
        reached = {"steps": ctx.step + 1, "samples": ctx.num_samples + batch, "epochs": ctx.epoch}
        for what, total in self._totals.items():
            if total is not None and reached[what] >= total:
                ctx.stop(f"{total} {what} are reached", steps=ctx.step + 1)
                return


def _parsed(plan: str) -> list[tuple[Any, int]]:
    found = []
    for part in plan.split(","):
        value, _, steps = part.strip().rpartition(":")
        found.append((_value(value.strip()), int(steps) if steps.strip().isdecimal() else 0))
    return found if all(value != "" for value, _ in found) else []


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
