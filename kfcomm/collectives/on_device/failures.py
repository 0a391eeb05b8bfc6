"""Failed calls of a group, and whether they end its formation: decided by one rank for all.

A call that only some ranks launch holds up every later launch: it *ends* the formation. A failed call that no rank has
launched ends nothing, provided that no rank launches it later. So where a call fails::

    a rank that fails at it     REPORT to the leader: whether it has launched it
    the leader, unless it has   ASK to all: a rank that hears it launches the call no more, and ANSWERs whether it
    been launched               has; one that does not answer in time may have
    the leader                  OUTCOME to all: whether the formation is over

A rank that has failed at a call begins nothing before the outcome: else it might begin the next one in a formation that
others are about to end. Nor does it begin a call that it knows to have failed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from kfcomm.core.collective import shown
from kfcomm.core.launch_order import LEADER

if TYPE_CHECKING:
    from kfcomm.collectives.group import Group

Use: TypeAlias = tuple[str, int]
"""A key, and the number of its use. What fails without a call has an empty key, and a number below 0."""

REPORT, ASK, ANSWER, OUTCOME = range(4)

MAX_KNOWN = 4096
"""Failures that are remembered; of more, the first is forgotten."""
ANSWER_WITHIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Ways:
    """Functions that send messages about failures and carry out what follows.

    Attributes:
        tell: one rank; without a rank all others, which only the leader does.
        forbid: this use is never to be launched here; returns whether it has been.
        end: the formation is over, for this reason.
        go_on: nothing is held back any more.
    """

    tell: Callable[..., None]
    forbid: Callable[[Use], bool]
    end: Callable[[str], None]
    go_on: Callable[[], None]


class Failures:
    """This rank's part; everything runs on the engine's loop."""

    def __init__(self, group: Group, ways: Ways) -> None:
        self._group = group
        self._ways = ways
        self._leads = group.view.rank == LEADER
        self._known: OrderedDict[Use, None] = OrderedDict()
        self._undecided: set[Use] = set()  # here, until the outcome
        self._asked: dict[Use, set[int]] = {}  # by the leader: who has yet to answer

    @property
    def hold(self) -> bool:
        """Whether this rank is to begin nothing for now."""
        return bool(self._undecided)

    def knows(self, use: Use) -> bool:
        """Whether this use has failed."""
        return use in self._known

    def failed(self, use: Use, *, launched: bool) -> None:
        """A call has failed on this rank; or what all calls go by, which is as good as launched."""
        if use in self._known and use not in self._asked:
            return
        self._know(use)
        self._undecided.add(use)
        if self._leads:
            self._look(use, launched=launched)
        else:
            self._ways.tell([REPORT, *use, launched], LEADER)
            if launched:
                self._ways.end(_reason(use))

    def hear(self, sender: int, said: list[Any], *, is_current: bool) -> None:
        """A message of another rank about a failure; ``is_current``: it is about the formation in force here.

        Raises:
            ValueError, TypeError: that makes no sense.
        """
        kind, key, seq, *rest = said
        use = (str(key), int(seq))
        if self._leads and kind == REPORT:
            if use not in self._known or use in self._asked:
                self._know(use)
                self._look(use, launched=bool(rest[0]) and is_current)
        elif self._leads and kind == ANSWER:
            self._answered(use, sender, launched=bool(rest[0]) and is_current)
        elif kind == ASK:
            self._know(use)
            self._ways.tell([ANSWER, *use, self._ways.forbid(use)], LEADER)
        elif kind == OUTCOME:
            self._know(use)
            self._undecided.discard(use)
            if rest[0] and is_current:
                self._ways.end(_reason(use))
            self._ways.go_on()

    def _know(self, use: Use) -> None:
        self._known[use] = None
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    # ---------------------------------------------------------------- the leader

    def _look(self, use: Use, *, launched: bool) -> None:
        view = self._group.view
        if launched or self._ways.forbid(use):
            self._decide(use, ends=True)
        elif view.size == 1:
            self._decide(use, ends=False)
        elif use not in self._asked:
            self._asked[use] = set(range(view.size)) - {LEADER}
            self._ways.tell([ASK, *use])
            self._group.engine.reactor.call_later(ANSWER_WITHIN_S, self._unanswered, use)

    def _answered(self, use: Use, rank: int, *, launched: bool) -> None:
        left = self._asked.get(use)
        if left is None:
            return
        left.discard(rank)
        if launched or not left:
            self._decide(use, ends=launched)

    def _unanswered(self, use: Use) -> None:
        if use in self._asked:
            self._decide(use, ends=True)

    def _decide(self, use: Use, *, ends: bool) -> None:
        self._asked.pop(use, None)
        self._undecided.discard(use)
        self._ways.tell([OUTCOME, *use, ends])
        if ends:
            self._ways.end(_reason(use))
        self._ways.go_on()


def _reason(use: Use) -> str:
    return f"{shown(use[0])} failed" if use[0] else "the order or the backend failed"
