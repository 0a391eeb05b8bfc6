"""Steps of a walk through a sampler, and which of their samples count as used.

Samples count as used by the calls of their step, or by the calls of some names. Each rank reports its outcome of these
calls, and all ranks decide from all reports alike: a call may be done on one rank and have failed on another that
cancelled it or timed out, so a rank must not decide from its own outcome.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from kfcomm.common.arguments import hint
from kfcomm.elastic.call_log import CallLog, Entry, Standing, Uids
from kfcomm.elastic.positions import shown_walk
from kfcomm.elastic.sampler import ElasticSampler, Indices, Name, share
from kfcomm.errors import ConfigError, EpochChanged, PeerLost

KEEP, ROLL_BACK = "keep", "roll_back"
"""What a program may wish for at the boundary after a step: the methods of ``Elastic``."""


class Step:
    """One step of training.

    If the ``Elastic`` restarts steps, the body of the loop is below ``with step:``, which ends it silently when ranks
    are lost during the step.

    Attributes:
        number: number of the step, from 0 since training began; a step that is repeated gets the next number.
        indices: indices of the samples that this rank trains on.
        batch: indices of the samples of all ranks.
        sampler: sampler that gave them; ``sampler.passes`` is the number of the pass.
        counts: False after ``void``.
        is_void: it has ended because ranks were lost, and is repeated.
    """

    __slots__ = ("_is_over", "_restarts", "batch", "counts", "indices", "is_void", "number", "sampler")

    def __init__(
        self, number: int, indices: Indices, batch: Indices, sampler: ElasticSampler, *, restarts: bool = False
    ) -> None:
        self.number = number
        self.indices = indices
        self.batch = batch
        self.sampler = sampler
        self.is_void = False
        self.counts = True
        self._is_over = False
        self._restarts = restarts

    def void(self) -> None:
        """Let the step count for nothing: its samples are given again in the same pass; all ranks call it, or none.

        The program leaves its state unchanged by the step. If some ranks call it and others do not, all get a
        ``ConfigError`` with these ranks, at one of the next two boundaries.

        Raises:
            ConfigError: the step is over.
        """
        if self._is_over:
            raise ConfigError(f"step {self.number} is over: call void() before the next step begins")
        self.counts = False

    def __repr__(self) -> str:
        return f"<Step {self.number}: {len(self.indices)} of {len(self.batch)} samples>"

    def __enter__(self) -> Self:
        if not self._restarts:
            raise ConfigError('with step: is for Elastic(..., on_loss="restart_step")')
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.is_void = isinstance(error, (EpochChanged, PeerLost))
        return self.is_void


class StepReport(NamedTuple):
    """Report of a rank about its step; msgpack can carry it."""

    is_tried: bool  # it has made a call that counts
    is_whole: bool  # such calls have succeeded, and no named call has failed
    lacking: list[int]  # uids whose contributions are missing in a successful call
    missing: list[str]  # names without a call, as far as that is known
    made: list[str]  # names of the calls that were made, if names are missing
    counts: bool = True  # the program has not called ``Step.void``


class EndedStep(NamedTuple):
    """Step that is over, and its ranks; which of its samples are used is not known yet."""

    step: Step
    uids: Uids


def check_names(number: int, told: Sequence[StepReport]) -> None:
    """Refuse names by which no rank has made a call in a step of this number."""
    missing = sorted(set.intersection(*(set(one.missing) for one in told)))
    if missing:
        made = told[0].made
        raise ConfigError(
            f"used_in names {', '.join(map(repr, missing))}, and no call of step {number} has that name; its calls are "
            f"{', '.join(map(repr, made))}: only collectives of all ranks that survive a loss count"
            f"{hint(missing[0], made)}"
        )


def check_counts(number: int, told: Sequence[StepReport]) -> None:
    """Refuse a step that counts on some ranks only."""
    ranks = [rank for rank, one in enumerate(told) if not one.counts]
    if 0 < len(ranks) < len(told):
        raise ConfigError(
            f"Step.void was called in step {number} on {'rank' if len(ranks) == 1 else 'ranks'} "
            f"{', '.join(map(str, ranks))} only, of {len(told)}: all ranks call it, or none"
        )


class Course:
    """One walk through a sampler, with the calls that count for the samples of its step, on one rank."""

    def __init__(self, name: Name, sampler: ElasticSampler, passes: int | None, names: list[str] | None) -> None:
        self.name = name
        self.sampler = sampler
        self.passes = passes  # see ``Elastic.steps``
        self.names = names  # names of the calls by which samples count as used; None for all calls
        self.step: Step | None = None  # the current step; None between steps
        self.is_left = False  # the program has left its loop
        self.wishes: frozenset[str] = frozenset()  # of its present step
        self._uids: Uids = ()  # ranks of the step
        self._met: set[str] = set()  # names of calls of all steps
        self._begin()

    def __repr__(self) -> str:
        return shown_walk(self.name, self.sampler.state_dict(), self.passes, self.names)

    def begin(self, step: Step, uids: Uids) -> Step:
        """Begin a step of these ranks."""
        self.step, self._uids = step, uids
        self._begin()
        return step

    def _begin(self) -> None:
        # A step may lie over several boundaries, since a walk within it has boundaries of its own: what its calls have
        # come to adds up from one boundary to the next.
        self._is_tried = self._is_done = self._has_failed = self._is_unknown = self._is_void = False
        self._lacking: set[int] = set()
        self._made: set[str] = set()
        self.wishes = frozenset()

    def note(self, log: CallLog, *, is_innermost: bool) -> None:
        """Add the calls since the last boundary, which are over."""
        # Of calls that have ended well, and are the program's, 25 bytecodes each: a step may have hundreds.
        names, uids, step = self.names, self._uids, log.step
        done, failed = Standing.DONE, Standing.FAILED
        for one in list(log.entries.values()):
            standing = one.standing
            if one.step != step:
                continue
            if standing is failed:
                self._is_unknown = True
            if not self._counts(one, names) if names is not None else one.is_own:
                continue
            self._is_tried = True
            if is_innermost and one.is_void:
                self._is_void = True
            if standing is not done:
                self._has_failed = True
                continue
            self._is_done = True
            if one.contributors != uids:
                # of the ranks of the step: some may have been lost at a boundary before this call
                self._lacking |= set(uids) - set(one.contributors)

    def _counts(self, one: Entry, names: Collection[str]) -> bool:
        """Whether a call counts for the samples where only calls of some names do; notes its name."""
        name = one.name
        if not one.is_own:
            self._made.add(name)
        return name in names

    @property
    def is_void(self) -> bool:
        """Whether its step is void, as far as this rank knows: a call has failed because ranks were lost."""
        return self._is_void or (self.step is not None and self.step.is_void)

    def told(self) -> StepReport:
        """Report of this rank, when the step is over."""
        self._met |= self._made
        # A failed or void step may lack calls for that reason, and says nothing about a misspelt name.
        counts = self.step is None or self.step.counts
        is_known = bool(self._made) and counts and not self.is_void and not self._is_unknown
        missing = sorted(set(self.names) - self._met) if self.names and is_known else []
        is_whole = self._is_done and (self.names is None or not self._has_failed)
        made = sorted(self._made) if missing else []
        return StepReport(self._is_tried, is_whole, sorted(self._lacking), missing, made, counts)

    def ended(self) -> EndedStep | None:
        """End the step; returns it, for `settle`. None between steps."""
        step, self.step, self._is_void = self.step, None, False
        if step is None:
            return None
        step._is_over = True
        return EndedStep(step, self._uids)

    def settle(self, ended: EndedStep | None, uids: Uids, told: Sequence[StepReport], *, is_void: bool) -> None:
        """Repeat unused samples of a step that has ended; ``uids``: the remaining ranks, with their reports."""
        if ended is not None:
            if not is_void:
                check_names(ended.step.number, told)
                check_counts(ended.step.number, told)
            # All ranks have equal reports and samplers, so all give back the same shares.
            step, num = ended.step, len(ended.uids)
            if not is_void and not all(one.counts for one in told):
                # Dealt out, not in shares: samples that made the step void come to several ranks the next time, by
                # which a guard finds out which of them do.
                for rank in range(num):
                    self.sampler.give_back(step.batch[rank::num])
                return
            counted = () if is_void else self._counted(ended.uids, uids, told)
            for rank, uid in enumerate(ended.uids):
                if uid not in counted:
                    self.sampler.give_back(share(step.batch, rank, num))

    def _counted(self, former: Uids, uids: Uids, told: Sequence[StepReport]) -> Uids:
        """Uids of the ranks whose samples are used; ``former`` are those of the step."""
        if any(one.is_whole for one in told):
            # One rank that has the result decides: a rank that cancelled the call does not know the contributors.
            lacking = {uid for one in told for uid in one.lacking}
            return tuple(uid for uid in former if uid not in lacking)
        is_tried = any(one.is_tried for one in told)
        return () if is_tried and self.names is not None else uids
