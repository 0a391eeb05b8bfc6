"""Samples of each step: their order, positions for joining ranks and checkpoints, and which of them count as used.

There is one order for each pass, and one batch of all ranks for each step. A sampler does not know which ranks are
alive: the shares that were not used are given back to it, and it gives those samples again before the pass ends. All
ranks hold equal samplers, and make the same calls of them.

A sampler is identified by its name or, without one, by the order in which the program first uses its samplers. A rank
that joins or resumes from a checkpoint runs the program from its beginning: each sampler gets its position when the
program reaches it, and loops that the other ranks have finished are skipped.

Samples count as used by the calls of their step, or by the calls of some names. Each rank reports its outcome of these
calls, and all ranks decide from all reports alike: a call may be done on one rank and have failed on another that
cancelled it or timed out, so a rank must not decide from its own outcome.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np

from kfcomm.common.arguments import hint
from kfcomm.elastic.call_log import CallLog, Standing, Uids
from kfcomm.errors import ConfigError, EpochChanged, PeerLost

Name: TypeAlias = str | int
Indices: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


class ElasticSampler:
    """Samples of one pass after another, in steps of one global batch.

    Each sample is used once in each pass, however the number of ranks changes. Samples of a rank that died before they
    were used are given again later in the same pass. The last batch of a pass may be smaller.

    Args:
        length: number of samples.
        batch: number of samples of one step, of all ranks together.
        seed: seed of the order of each pass, below ``2**64``; None for the natural order.
        name: name in checkpoints and for joining ranks; without one, its number in the order in which a program first
            uses its samplers. Needed where that order is not always the same.

    Raises:
        ConfigError: an argument is not valid.

    Attributes:
        passes: number of complete passes.
    """

    def __init__(self, length: int, batch: int, seed: int | None = 0, *, name: str | None = None) -> None:
        self.name = None if name is None else _text(name)
        self.length = _count("length", length, 1)
        self.batch = batch
        self._first_batch = self.batch
        self.seed = None if seed is None else _count("seed", seed, 0)
        if self.seed is not None and self.seed >> 64:
            raise ConfigError(f"the seed of a sampler is below 2**64, not {seed!r}")
        self.passes = 0
        self._position = 0
        self._again: list[int] = []
        self._order = self._order_of(0)

    def __repr__(self) -> str:
        again = f", {len(self._again)} to be given again" if self._again else ""
        return f"<ElasticSampler: pass {self.passes}, {self._position} of {self.length} given{again}>"

    @property
    def batch(self) -> int:
        """Number of samples of the next step, of all ranks together. May be set in any step, on all ranks alike.

        Raises:
            ConfigError: on setting: it is not a whole number from 1 on.
        """
        return self._batch

    @batch.setter
    def batch(self, batch: int) -> None:
        self._batch = _count("batch", batch, 1)

    @property
    def left(self) -> int:
        """Number of samples of this pass that are still to be given."""
        return self.length - self._position + len(self._again)

    def take(self) -> Indices:
        """Take the indices of the next global batch; empty at the end of the pass."""
        end = min(self._position + self.batch, self.length)
        taken = self._order[self._position : end]
        self._position = end
        missing = self.batch - len(taken)
        if missing and self._again:
            again, self._again = self._again[:missing], self._again[missing:]
            taken = np.concatenate([taken, np.array(again, np.int64)])
        return taken

    def take_until(self, passes: int) -> Indices:
        """Take the next global batch, also of the next pass; empty once this number of passes is complete."""
        taken = self._order[:0]
        while not len(taken) and self.passes < passes:
            taken = self.take()
            if not len(taken):
                self.end_pass()
        return taken

    def give_back(self, indices: Sequence[int] | Indices) -> None:
        """Give unused samples again before the pass ends."""
        self._again.extend(int(index) for index in indices)

    def end_pass(self) -> None:
        """Begin the next pass: all samples have been used."""
        self.passes += 1
        self._position = 0
        self._order = self._order_of(self.passes)

    def state_dict(self) -> dict[str, Any]:
        """Position, for checkpoints and joining ranks; msgpack can carry it."""
        return {
            "length": self.length, "batch": self._first_batch, "seed": self.seed, "passes": self.passes,
            "position": self._position, "again": list(self._again), "next_batch": self.batch,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position of another sampler, with its batch.

        Raises:
            ConfigError: that sampler was made with another length, batch or seed.
        """
        for name, mine in (("length", self.length), ("batch", self._first_batch), ("seed", self.seed)):
            if state[name] != mine:
                raise ConfigError(f"{name} of this sampler is {mine}, that of the state {state[name]}")
        self.batch = state.get("next_batch", self._first_batch)  # without one: a checkpoint from before it was kept
        made, self.passes = self.passes, int(state["passes"])
        self._position = int(state["position"])
        self._again = [int(index) for index in state["again"]]
        if made != self.passes:  # 40 ms for a million samples, in which no other thread of this process runs
            self._order = self._order_of(self.passes)

    def _order_of(self, number: int) -> Indices:
        if self.seed is None:
            return np.arange(self.length)
        # frozen by NumPy's policy (NEP 19): the same in every version, which ranks and checkpoints rely on
        random = np.random.RandomState([self.seed & 0xFFFFFFFF, self.seed >> 32 & 0xFFFFFFFF, number])
        return random.permutation(self.length).astype(np.int64)


def _text(name: Any) -> str:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ConfigError(f"the name of a sampler is text that can be printed, not {name!r}")
    return str.__str__(name)


def _count(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ConfigError(f"{name} of a sampler is a whole number from {least} on, not {value!r}")
    return int(value)


def share(indices: Indices, rank: int, size: int) -> Indices:
    """Return the part of a global batch for one of ``size`` ranks; the first ones may be longer by one."""
    each, more = divmod(len(indices), size)
    start = rank * each + min(rank, more)
    return indices[start : start + each + (rank < more)]


ANY = ""
"""Name in a position without names: the sampler that the program uses first."""


class Position(NamedTuple):
    """Position of training; msgpack can carry it as a list."""

    steps: int = 0  # before it
    samplers: dict[Name, Any] = {}  # noqa: RUF012  position of each, by name; never written to
    # The loop under way: the sampler's name, and the arguments ``passes`` and ``used_in``. None before the first step,
    # or if it is not known.
    walk: list[Any] | None = None
    lineage: list[str] = []  # noqa: RUF012  ids of jobs, see `checkpoint`

    @classmethod
    def of(cls, told: Any) -> Position:
        """Parse the report of a rank or a checkpoint, also of a version without names of samplers."""
        if len(told) == len(cls._fields):
            return cls(*told)
        steps, sampler = told
        return cls(steps, {} if sampler is None else {ANY: sampler})


class Samplers:
    """Samplers that this rank has used, by name."""

    def __init__(self) -> None:
        self.waiting: dict[Name, Any] = {}  # positions of the samplers that this rank has not used yet, by name
        self._found: dict[Name, ElasticSampler] = {}
        self._first: dict[Name, Any] = {}
        self._names: weakref.WeakKeyDictionary[ElasticSampler, Name] = weakref.WeakKeyDictionary()
        self._num_unnamed = 0

    def name_of(self, sampler: ElasticSampler) -> Name:
        """Return the name of a sampler; at its first use, set it to its position."""
        if not isinstance(sampler, ElasticSampler):
            raise ConfigError(f"steps go through a kfcomm.elastic.ElasticSampler, not through {sampler!r:.80}")
        name = self._names.get(sampler)
        if name is None:
            return self._first_time(sampler)
        if self._found[name] is not sampler:
            raise ConfigError(f"two samplers have the name {name!r}: give each one of its own")
        return name

    def _first_time(self, sampler: ElasticSampler) -> Name:
        name: Name = self._num_unnamed if sampler.name is None else sampler.name
        # Checkpoints from before samplers had names hold one position, without a name.
        place = self.waiting.pop(name, None) or self.waiting.pop(ANY, None)
        if place is not None:
            try:
                sampler.load_state_dict(place)
            except ConfigError as error:
                raise ConfigError(f"sampler {name!r} does not fit the place of the job: {error}") from None
        self._num_unnamed += sampler.name is None
        self._names[sampler] = name
        self._found[name] = sampler
        self._first[name] = sampler.state_dict()
        return name

    def places(self) -> dict[Name, Any]:
        """Position of each sampler."""
        return self.waiting | {name: one.state_dict() for name, one in self._found.items()}

    def restore(self, places: dict[Name, Any]) -> None:
        """Return to former positions; samplers that were first used later return to their beginning."""
        for name, one in self._found.items():
            one.load_state_dict(places.get(name, self._first[name]))


class Step:
    """One step of training.

    If the ``Elastic`` restarts steps, the body of the loop is below ``with step:``, which ends it silently when ranks
    are lost during the step.

    Attributes:
        number: number of the step, from 0 since training began; a repeated step keeps its number.
        indices: indices of the samples that this rank trains on.
        batch: indices of the samples of all ranks.
        sampler: sampler that gave them; ``sampler.passes`` is the number of the pass.
        is_void: it has ended because ranks were lost, and is repeated.
    """

    __slots__ = ("_restarts", "batch", "indices", "is_void", "number", "sampler")

    def __init__(
        self, number: int, indices: Indices, batch: Indices, sampler: ElasticSampler, *, restarts: bool = False
    ) -> None:
        self.number = number
        self.indices = indices
        self.batch = batch
        self.sampler = sampler
        self.is_void = False
        self._restarts = restarts

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


class Told(NamedTuple):
    """Report of a rank about its step; msgpack can carry it."""

    is_tried: bool  # it has made a call that counts
    is_whole: bool  # such calls have succeeded, and no named call has failed
    lacking: list[int]  # uids whose contributions are missing in a successful call
    missing: list[str]  # names without a call, as far as that is known
    made: list[str]  # names of the calls that were made


class EndedStep(NamedTuple):
    """Step that is over, and its ranks; which of its samples are used is not known yet."""

    step: Step
    uids: Uids


def check_names(number: int, told: Sequence[Told]) -> None:
    """Refuse names by which no rank has made a call in a step of this number."""
    missing = sorted(set.intersection(*(set(one.missing) for one in told)))
    if missing:
        made = told[0].made
        raise ConfigError(
            f"used_in names {', '.join(map(repr, missing))}, and no call of step {number} has that name; its calls are "
            f"{', '.join(map(repr, made))}: only collectives of all ranks that survive a loss count"
            f"{hint(missing[0], made)}"
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
        self._uids: Uids = ()  # ranks of the step
        self._met: set[str] = set()  # names of calls of all steps
        self._begin()

    def __repr__(self) -> str:
        return f"{self.sampler!r} (sampler {self.name!r}), passes={self.passes}, used_in={self.names}"

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

    def note(self, log: CallLog, *, is_innermost: bool) -> None:
        """Add the calls since the last boundary, which are over."""
        calls = log.since_boundary()
        self._made.update(one.name for one in calls if not one.is_own)
        self._is_unknown |= any(one.standing is Standing.FAILED for one in calls)
        for one in calls:
            if one.is_counted(self.names):
                self._is_tried = True
                self._is_void |= is_innermost and one.is_void
                if one.standing is Standing.DONE:
                    self._is_done = True
                    # of the ranks of the step: some may have been lost at a boundary before this call
                    self._lacking |= set(self._uids) - set(one.contributors)
                else:
                    self._has_failed = True

    @property
    def is_void(self) -> bool:
        """Whether its step is void, as far as this rank knows: a call has failed because ranks were lost."""
        return self._is_void or (self.step is not None and self.step.is_void)

    def told(self) -> Told:
        """Report of this rank, when the step is over."""
        self._met |= self._made
        # A failed or void step may lack calls for that reason, and says nothing about a misspelt name.
        is_known = bool(self._made) and not self.is_void and not self._is_unknown
        missing = sorted(set(self.names) - self._met) if self.names and is_known else []
        is_whole = self._is_done and (self.names is None or not self._has_failed)
        return Told(self._is_tried, is_whole, sorted(self._lacking), missing, sorted(self._made))

    def ended(self) -> EndedStep | None:
        """End the step; returns it, for `settle`. None between steps."""
        step, self.step, self._is_void = self.step, None, False
        return None if step is None else EndedStep(step, self._uids)

    def settle(self, ended: EndedStep | None, uids: Uids, told: Sequence[Told], *, is_void: bool) -> None:
        """Repeat unused samples of a step that has ended; ``uids``: the remaining ranks, with their reports."""
        if ended is not None:
            if not is_void:
                check_names(ended.step.number, told)
            # All ranks have equal reports and samplers, so all give back the same shares.
            counted = () if is_void else self._counted(ended.uids, uids, told)
            for rank, uid in enumerate(ended.uids):
                if uid not in counted:
                    self.sampler.give_back(share(ended.step.batch, rank, len(ended.uids)))

    def _counted(self, former: Uids, uids: Uids, told: Sequence[Told]) -> Uids:
        """Uids of the ranks whose samples are used; ``former`` are those of the step."""
        if any(one.is_whole for one in told):
            # One rank that has the result decides: a rank that cancelled the call does not know the contributors.
            lacking = {uid for one in told for uid in one.lacking}
            return tuple(uid for uid in former if uid not in lacking)
        is_tried = any(one.is_tried for one in told)
        return () if is_tried and self.names is not None else uids
