"""Questions of one rank to others about what these have posted, in as many parts as they need.

The caller sends them (see `kfcomm.core.gossip`), and asks again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kfcomm.core.gossip import CollectiveId, batches
from kfcomm.engine.control import Answer


@dataclass(eq=False, slots=True)
class LeaveQuestion:
    """One question to ``target`` (or all, -1)."""

    target: int
    parts: list[list[list[Any]]]  # the ops, as many to a part as fit one QUERY
    answer: Answer | None  # None where only the asking counts
    times_asked: int = 0
    answered: set[int] = field(default_factory=set)  # ranks whose answer is complete
    _replies: dict[int, dict[int, list[bool]]] = field(default_factory=dict)

    def add(self, part: int, rank: int, posted: list[bool]) -> list[bool] | None:
        """Add a reply to one part; return the whole answer of that rank once it is complete, else None."""
        if rank in self.answered or len(posted) != len(self.parts[part]):
            return None
        replies = self._replies.setdefault(rank, {})
        replies[part] = posted
        if len(replies) < len(self.parts):
            return None
        self.answered.add(rank)
        del self._replies[rank]
        return [flag for _, reply in sorted(replies.items()) for flag in reply]


class Questions:
    """Questions that this rank has asked and that are not fully answered yet.

    A question may name more collectives than one QUERY holds: then it travels in parts, and its answer is given when
    the last part's has come. It may be asked again under new numbers, so replies can come twice, late or in any order;
    each rank's answer is given once.
    """

    def __init__(self) -> None:
        self._open: dict[LeaveQuestion, None] = {}
        self._floods: dict[int, tuple[LeaveQuestion, int]] = {}

    def ask(self, ops: Sequence[CollectiveId], target: int, answer: Answer | None) -> LeaveQuestion:
        """Open a question."""
        question = LeaveQuestion(target, batches(ops), answer)
        self._open[question] = None
        return question

    def is_open(self, question: LeaveQuestion) -> bool:
        """Whether answers are still waited for."""
        return question in self._open

    def sent(self, number: int, question: LeaveQuestion, part: int) -> None:
        """Note that the flood of that number carries this part."""
        self._floods[number] = (question, part)

    def reply(self, number: int, rank: int, posted: list[bool]) -> tuple[LeaveQuestion, list[bool]] | None:
        """Take a STATUS of ``rank``; return the question that it completes and the whole answer, or None."""
        question, part = self._floods.get(number, (None, 0))
        if question is None or question.target not in (-1, rank):
            return None
        whole = question.add(part, rank, posted)
        return None if whole is None else (question, whole)

    def close(self, question: LeaveQuestion) -> None:
        """Forget a question."""
        self._open.pop(question, None)
        self._floods = {number: asked for number, asked in self._floods.items() if asked[0] is not question}

    def about(self, rank: int) -> list[LeaveQuestion]:
        """The open questions to ``rank`` alone."""
        return [question for question in self._open if question.target == rank]
