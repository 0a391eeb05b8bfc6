"""Guarded steps: a step with wrong numbers counts for nothing, on any rank.

All ranks judge a step by the same evidence, the loss and the gradient's norm of each rank, before they apply its
update. So all come to the same decision without another message. The driver of steps carries it out: ``Adaptation`` for
NumPy loops, ``kfcomm.torch.attach`` for torch.

Invariants:

- Judging is pure: it needs no clock, network or rank, and the same evidence gives the same bits everywhere.
- NaN and infinity are always void. Nothing else is before ``warmup`` good steps.
- Void steps teach nothing: levels are of good steps only.
- It ends: samples that make steps void again and again are set aside, a level that stays high is accepted, and steps
  that are not finite in ``most_in_a_row`` steps running are an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kfcomm.adapt.levels import Level
from kfcomm.adapt.policy import Policy
from kfcomm.common.arguments import whole_number
from kfcomm.common.sizes import ranks_in_words, share_of
from kfcomm.errors import ConfigError, GuardFailed
from kfcomm.types import override

LOSS, NORM = "loss", "gradient norm"
MAX_ROLL_BACKS = 3
"""Roll-backs to the same kept state: from there training takes the same way again."""


@dataclass(frozen=True, slots=True)
class StepEvidence:
    """Numbers of a step, the same on all ranks.

    Attributes:
        step: number of the step.
        losses: loss of each rank, by rank; None for a rank without one. May be NaN or infinite.
        sq_norms: squared norm of each rank's own gradient, by rank; None for a rank without one, which is lost.
        batch: indices of the samples of all ranks, in shares by rank as an ``ElasticSampler`` gives them; None if they
            are not known.
        raised: ranks whose block has raised an error that the guard catches.
    """

    step: int
    losses: Sequence[float | None]
    sq_norms: Sequence[float | None]
    batch: Any = None
    raised: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Void:
    """Judgement that a step counts for nothing.

    Attributes:
        step: number of the step.
        ranks: culprits; all ranks, where all jumped.
        what: in words: ``"loss is nan"``, ``"gradient norm is 3e+09, usually 2.1 (z = 84)"``.
        is_finite: it is a jump; else NaN or infinity.
        names: arrays in which the culprits have found wrong numbers, ``"rank 1: w"``; of the driver, which adds them.
    """

    step: int
    ranks: tuple[int, ...]
    what: str
    is_finite: bool
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f", in {'; '.join(self.names)}" if self.names else ""
        return f"void because of {ranks_in_words(self.ranks)}: {self.what}{where}"


@dataclass(frozen=True, slots=True)
class GuardActions:
    """Requests of the guard after a judgement, which the driver of steps carries out on all ranks.

    Attributes:
        void: do not apply the step's update, leave the state as before, and give the samples back.
        set_aside: indices of samples that are not given again.
        roll_back: continue from the state that was kept last.
        keep: the step is good: keep a copy of the state at its end.
        rate: factor of the learning rate of the next step, 1 at most.
    """

    void: bool = False
    set_aside: tuple[int, ...] = ()
    roll_back: bool = False
    keep: bool = False
    rate: float = 1.0


class GuardSteps(Policy):
    """Makes steps with wrong numbers void on all ranks.

    A step is void where the loss or the gradient of a rank is NaN or infinite; and, after ``warmup`` good steps, where
    one of them jumps: its logarithm is more than ``z`` robust standard deviations above the median of the last
    ``window`` good steps. Where all ranks jump at once all ranks are named, and no samples are blamed.

    Args:
        z: threshold of jumps, in robust standard deviations (1.4826 · MAD, at least 0.25 of a natural logarithm).
        window: number of good steps whose values are compared.
        warmup: number of good steps before a jump can be found, at least 2.
        lower_rate: factor of the learning rate after a void step, and number of good steps in which it returns to 1;
            None to leave it.
        roll_back_after: number of void steps in a row after which the kept state is restored; None for never.
        keep_every: number of good steps from one kept state to the next; only with ``roll_back_after``.
        set_aside_after: number of times that a sample was in the share of a culprit, without a good step between, after
            which it is set aside; None for never.
        most_in_a_row: number of void steps in a row after which jumps are accepted as the new level, and NaN or
            infinity is an error. Samples that are set aside begin the count again.
        catch: types of errors of a step's block that make the step void on all ranks, if they are raised before its
            gradients are exchanged; for NumPy loops, in which each step is guarded then.

    Attributes:
        num_void: number of void steps.
        catch: as given.
        options: arguments in words, which all ranks have alike.
        aside: samples that were set aside.

    Raises:
        ConfigError: a number is out of its range.

    Cost: of a step with n ranks about 20 µs, and 5 µs for each rank; with 16 ranks in a busy process 0.1 ms.
    """

    def __init__(
        self, *, z: float = 6.0, window: int = 100, warmup: int = 20, lower_rate: tuple[float, int] | None = None,
        roll_back_after: int | None = None, keep_every: int = 100, set_aside_after: int | None = 3,
        most_in_a_row: int = 50, catch: tuple[type[Exception], ...] = (ArithmeticError,),
    ) -> None:  # fmt: skip
        _check(z, lower_rate)
        for name, value, least in (
            ("window", window, 2), ("warmup", warmup, 2), ("keep_every", keep_every, 1),
            ("most_in_a_row", most_in_a_row, 1),
            ("roll_back_after", 1 if roll_back_after is None else roll_back_after, 1),
            ("set_aside_after", 1 if set_aside_after is None else set_aside_after, 1),
        ):  # fmt: skip
            if whole_number(value) is None or value < least:
                raise ConfigError(f"{name} is a whole number of at least {least}, not {value!r}")
        if not _are_errors(catch):
            raise ConfigError(f"catch is a tuple of types of errors, not {catch!r}")
        self.catch = catch
        self.options = (
            f"z={z:g}, window={window}, warmup={warmup}, lower_rate={lower_rate}, roll_back_after={roll_back_after}, "
            f"keep_every={keep_every}, set_aside_after={set_aside_after}, most_in_a_row={most_in_a_row}"
        )
        self._z = float(z)
        self._warmup = warmup
        self._lower_rate = lower_rate
        self._roll_back_after = roll_back_after
        self._keep_every = keep_every
        self._set_aside_after = set_aside_after
        self._most_in_a_row = most_in_a_row
        self._levels = {LOSS: Level(window), NORM: Level(window)}
        self._suspects: dict[int, int] = {}  # how often each sample was in the share of a culprit
        self._counts = _Counts()
        self.aside: tuple[int, ...] = ()
        self.actions = GuardActions()

    @property
    def num_void(self) -> int:
        """Number of void steps."""
        return self._counts.num_void

    @property
    def has_suspects(self) -> bool:
        """Whether samples have been in the share of a culprit, and in no good step since."""
        return bool(self._suspects)

    def judge(self, evidence: StepEvidence) -> Void | None:
        """Judge a step, once, before its update is applied; ``actions`` has the requests that follow.

        All ranks call it with the same evidence.

        Returns:
            None for a good step.

        Raises:
            GuardFailed: ``most_in_a_row`` steps in a row were not finite, or restoring the state did not help.
        """
        void = self._not_finite(evidence) or self._jump(evidence)
        if void is not None and void.is_finite and self._counts.in_a_row + 1 >= self._most_in_a_row:
            for level in self._levels.values():
                level.forget()
            void = None
        self.actions = self._good(evidence) if void is None else self._void(evidence, void)
        return void

    # ---------------------------------------------------------------- judgement

    def _not_finite(self, evidence: StepEvidence) -> Void | None:
        found = dict.fromkeys(evidence.raised, "an error was raised")
        for what, values in _numbers(evidence).items():
            for rank, value in values.items():
                if not math.isfinite(value):
                    found.setdefault(rank, f"{what} is {value}")
        words = " and ".join(dict.fromkeys(found.values()))
        return Void(evidence.step, tuple(sorted(found)), words, is_finite=False) if found else None

    def _jump(self, evidence: StepEvidence) -> Void | None:
        ranks: set[int] = set()
        words = []
        for what, values in _numbers(evidence).items():
            level = self._levels[what]
            if level.num_steps < self._warmup:
                continue
            scores = {rank: level.z(value) for rank, value in values.items()}
            if high := {rank for rank, score in scores.items() if score > self._z}:
                ranks |= high
                worst = max(sorted(high), key=scores.__getitem__)
                words.append(f"{what} is {values[worst]:.4g}, usually {level.median:.4g} (z = {scores[worst]:.3g})")
        return Void(evidence.step, tuple(sorted(ranks)), " and ".join(words), is_finite=True) if ranks else None

    # ---------------------------------------------------------------- what follows

    def _good(self, evidence: StepEvidence) -> GuardActions:
        for what, values in _numbers(evidence).items():
            # A gradient of zeros says nothing about the level of others.
            self._levels[what].add(value for value in values.values() if what == LOSS or value > 0)
        if self._suspects and evidence.batch is not None:
            for sample in evidence.batch:
                self._suspects.pop(int(sample), None)
        counts = self._counts
        keeps = self._roll_back_after is not None and counts.num_good % self._keep_every == 0
        self._counts = replace(
            counts, num_good=counts.num_good + 1, since_void=counts.since_void + 1, in_a_row=0, since_roll_back=0,
            num_roll_backs=0 if keeps else counts.num_roll_backs,
        )  # fmt: skip
        return GuardActions(keep=keeps, rate=self._rate)

    def _void(self, evidence: StepEvidence, void: Void) -> GuardActions:
        aside = self._blame(evidence, void)
        counts = self._counts
        in_a_row = 0 if aside else counts.in_a_row + 1
        since = counts.since_roll_back + 1
        rolls_back = since == self._roll_back_after and counts.has_good
        self._counts = replace(
            counts, num_void=counts.num_void + 1, since_void=0, in_a_row=in_a_row,
            since_roll_back=0 if rolls_back else since, num_roll_backs=counts.num_roll_backs + rolls_back,
        )  # fmt: skip
        if in_a_row >= self._most_in_a_row:
            raise GuardFailed(
                f"{in_a_row} steps in a row are void, so the model itself may be damaged; the last: {void}"
            )
        if self._counts.num_roll_backs > MAX_ROLL_BACKS:
            raise GuardFailed(f"restoring the kept state {MAX_ROLL_BACKS} times did not help; the last step: {void}")
        return GuardActions(void=True, set_aside=aside, roll_back=rolls_back, rate=self._rate)

    def _blame(self, evidence: StepEvidence, void: Void) -> tuple[int, ...]:
        """Count the samples of the culprits; returns those that are set aside now."""
        size = len(evidence.sq_norms)
        # All ranks at once: a jump without a culprit, as after a change of the learning rate.
        is_common = void.is_finite and len(void.ranks) == size > 1
        if evidence.batch is None or self._set_aside_after is None or is_common:
            return ()
        aside = []
        for rank in void.ranks:
            for sample in share_of(evidence.batch, rank, size):
                count = self._suspects.get(int(sample), 0) + 1
                self._suspects[int(sample)] = count
                if count >= self._set_aside_after:
                    aside.append(int(sample))
        for sample in aside:
            del self._suspects[sample]
        self.aside += tuple(aside)
        return tuple(aside)

    @property
    def _rate(self) -> float:
        if self._lower_rate is None or not self._counts.num_void:
            return 1.0
        factor, steps = self._lower_rate
        returned = min(self._counts.since_void, steps) / steps
        return factor + (1 - factor) * returned

    # ---------------------------------------------------------------- state

    @override
    def state_dict(self) -> dict[str, Any]:
        """Levels, suspects and counts; msgpack can carry it."""
        return {
            "levels": {what: level.state for what, level in self._levels.items()},
            "suspects": [list(one) for one in self._suspects.items()],
            "aside": list(self.aside),
            "counts": self._counts.as_list(),
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the judgement of another rank, or of a checkpoint."""
        for what, level in self._levels.items():
            level.state = state["levels"][what]
        self._suspects = {int(sample): int(count) for sample, count in state["suspects"]}
        # A roll-back restores a state that knows nothing of it, nor of samples that stay aside.
        self.aside = tuple(dict.fromkeys([*map(int, state["aside"]), *self.aside]))
        known = _Counts(*state["counts"])
        self._counts = replace(known, num_roll_backs=max(known.num_roll_backs, self._counts.num_roll_backs))
        self.actions = GuardActions(rate=self._rate)


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counts of steps."""

    num_good: int = 0
    num_void: int = 0
    since_void: int = 0  # good steps since the last void one
    in_a_row: int = 0  # void steps since the last good one, or since samples were set aside
    since_roll_back: int = 0  # void steps since the last good one, or since the state was restored
    num_roll_backs: int = 0  # since a state was kept

    @property
    def has_good(self) -> bool:
        return self.num_good > 0

    def as_list(self) -> list[int]:
        return [getattr(self, name) for name in self.__slots__]


def _numbers(evidence: StepEvidence) -> dict[str, dict[int, float]]:
    """Losses and norms by rank, without those that are not there."""
    losses = {rank: float(loss) for rank, loss in enumerate(evidence.losses) if loss is not None}
    norms = {
        rank: math.sqrt(one) if one >= 0 else math.nan for rank, one in enumerate(evidence.sq_norms) if one is not None
    }
    return {LOSS: losses, NORM: norms}


def _are_errors(kinds: Any) -> bool:
    return isinstance(kinds, tuple) and all(isinstance(one, type) and issubclass(one, Exception) for one in kinds)


def _check(z: Any, lower_rate: Any) -> None:
    if isinstance(z, bool) or not isinstance(z, (int, float)) or not 0 < z < math.inf:
        raise ConfigError(f"z is a number of standard deviations above 0, not {z!r}")
    if lower_rate is None:
        return
    try:
        factor, steps = lower_rate
        is_right = 0 < factor < 1 and whole_number(steps) is not None and steps >= 1
    except (TypeError, ValueError):
        is_right = False
    if not is_right:
        raise ConfigError(
            f"lower_rate is a factor between 0 and 1 and a number of steps, such as (0.5, 100), not {lower_rate!r}"
        )
