"""One rank's part in the control plane, on the loop of its control thread: gossip over links, and what follows from it.

It joins `Gossip` (which rank gets which message), `ControlLinks` (how it gets there), `Questions` and the engine's
`Upcalls`. A rank changes its state for the others in this order and never back::

    living ──▶ leaving   it announced it; its sockets may close without being missed
       └─────▶ lost      its port is closed, its launcher saw it end, or another rank reports it

A rank that leaves lingers: the others still ask it what it has posted, and when all have, they need it no longer. It
floods its *leave question*, which goes to all ranks and names no collective. Each of the others answers it when it has
no questions left, unless it leaves too, which says the same. So leaving takes two floods, and one answer from
each rank that stays. A flood from each of these, as for any other question, was size³ messages where all leave at once,
and a third of the processor time of a job of 32 ranks that met once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kfcomm.core.frame import Header, Kind
from kfcomm.core.gossip import EVERYBODY, MAX_NAMED_RANKS, Body, CollectiveId, Effect, Effects, Gossip, batches, clip
from kfcomm.core.handshake import Hello, Purpose
from kfcomm.core.membership import FailureDetector, Message, from_wire, to_wire
from kfcomm.engine.control import GONE, Answer, StatusSource, Upcalls, World
from kfcomm.engine.control.links import ControlLinks
from kfcomm.errors import RemoteProtocolError

EXPECTED_DIAL_S = 1.0
"""How long a neighbour that should dial this rank is waited for before it is dialled instead."""
DEAD_HOST_SHARE = 1 / 3
"""Of the time after which a silent peer is lost: so soon it is if its kernel, which needs no turns, is silent, too."""
ASK_AGAIN_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Pauses after which a question without a full answer is asked again; after the last it is given up."""

_LOG = logging.getLogger("kfcomm.control")


class ControlNode:
    """The control plane of ``rank`` in a world of ``size``; made and used on the loop of the control thread.

    A peer silent for ``lost_after_s`` is lost; its launcher has ``launcher_word_s`` to report how its process ended.
    """

    def __init__(self, world: World, tasks: asyncio.TaskGroup, upcalls: Upcalls, status: StatusSource) -> None:
        self._launcher_word_s = world.launcher_word_s
        self.rank = world.rank
        self.links = ControlLinks(tasks, world.reach, self, world.lost_after_s * DEAD_HOST_SHARE)
        self._detector = FailureDetector(world.lost_after_s)
        self._next_beat: asyncio.TimerHandle | None = None
        self._upcalls = upcalls
        self._status = status
        self._gossip = Gossip(world.rank, len(world.peers))
        self._questions = Questions()
        self._lost: set[int] = set()
        self._ended: set[int] = set()
        self._left: set[int] = set()
        self._released: set[int] = set()
        self._is_over = False
        self._is_leaving = False
        self._leave_question: Question | None = None
        self._leave_questions: dict[int, int] = {}
        self._done_with: set[int] = set()
        self._when_free: list[Callable[[], None]] = []

    # What the engine wants (see ControlPlane).

    def abort(self, group: bytes, key: str, seq: int, cause: Sequence[Any]) -> None:
        """Tell all ranks that a collective has failed. A long cause is cut to what fits a frame."""
        kind, rank, message, arrived, missing = cause
        named = [list(arrived)[:MAX_NAMED_RANKS], list(missing)[:MAX_NAMED_RANKS]]
        self._flood([Body.ABORT, group, key, seq, [clip(kind), rank, clip(message), *named]])

    def suspect(self, rank: int, reason: str) -> None:
        """Check whether a rank is alive, by a link to it."""
        if rank != self.rank and not self.is_gone(rank):
            _LOG.info("rank %d: is rank %d alive? %s", self.rank, rank, reason)
            self.links.reach(rank, suspect=True)

    def declare_lost(self, rank: int, reason: str, *, has_ended: bool = False) -> None:
        """Tell all ranks that one is lost, unless that is known."""
        is_new = not self.is_gone(rank) or (has_ended and rank in self._lost and rank not in self._ended)
        if rank != self.rank and is_new:
            self._flood([Body.LOST, rank, clip(reason), has_ended])
            self._on_lost(rank, reason, has_ended)

    def agree(self, number: int, message: Message) -> None:
        """Send a message of an agreement to all ranks."""
        self._flood([Body.AGREE, number, to_wire(message)])

    def ended(self, rank: int, found: str) -> None:
        """Declare ``rank`` lost, whose process has ended, after a delay for its launcher's report."""
        reason = f"its process has ended ({found})"
        declare = partial(self.declare_lost, rank, reason, has_ended=True)
        asyncio.get_running_loop().call_later(self._launcher_word_s, declare)

    def query(self, ops: Sequence[CollectiveId], target: int, answer: Answer) -> None:
        """Ask a rank which of these collectives it has posted; ``answer`` gets the reply."""
        if target == self.rank:
            self._upcalls.post(answer, self.rank, self._posted(ops), self._status.activity())
        elif target in self._left and not ops:
            self._release(target)
            self._upcalls.post(answer, target, [], "")
        elif target not in self._lost:
            self._ask(self._questions.ask(ops, target, answer))

    def leave(self, when_free: Callable[[], None]) -> None:
        """Announce that this rank leaves. ``when_free`` is called once no rank needs it, or its plane closes."""
        self._when_free.append(when_free)
        if not self._is_leaving:
            self._is_leaving = True
            self._flood([Body.LEAVING, self.rank])
            self._look_who_needs_me()
            if self._when_free:
                self._leave_question = self._questions.ask([], EVERYBODY, None)
                self._ask(self._leave_question)
        self._look_who_needs_me()

    def needed_by(self) -> list[int]:
        """Ranks that may still ask this one, ascending. May be called on any thread."""
        return sorted(set(range(self._gossip.size)) - {self.rank} - self._released - self._left - self._lost)

    async def close(self, goodbye_s: float) -> None:
        """Say goodbye on every link; bounded, see `ControlLinks.close`."""
        if self._next_beat is not None:
            self._next_beat.cancel()
        self._free()
        await self.links.close(goodbye_s)

    def linger(self) -> None:
        """End the epoch here, but keep listening for ranks that have missed it."""
        self._is_over = True
        if self._next_beat is not None:
            self._next_beat.cancel()
        self.links.end_all()

    def objection(self, hello: Hello) -> str | None:
        """Reason to refuse this dialler, or None."""
        is_lost = hello.rank in self._lost
        if self._is_over:
            # it may be right, and this rank lost, until the epoch is over; then it hears what has become of it
            is_to_hear = is_lost and hello.purpose == Purpose.CONTROL
            return None if is_to_hear else "this epoch is over"
        return f"rank {hello.rank} has been declared lost" if is_lost else None

    @property
    def seeks(self) -> bool:
        """Whether this rank dials others: not once they have given it up, nor when the epoch is over."""
        return not self._is_over and self.rank not in self._lost

    def maintain(self) -> None:
        """Dial the neighbours without a link."""
        if not self.seeks:
            return
        for rank in self._gossip.missing:
            expected_s = 0.0 if self._gossip.is_dialler(rank) else EXPECTED_DIAL_S
            self.links.reach(rank, delay_s=expected_s)

    def beat(self) -> None:
        """Check the neighbours for silence, and schedule the next check: ask some for a sign of life, give others up.

        Only the neighbours are watched: each rank is a neighbour of another, which floods the loss.
        """
        loop = asyncio.get_running_loop()
        self._detector.watch(self._gossip.neighbours if self.seeks else (), loop.time())
        gone, quiet, next_s = self._detector.look(loop.time())
        for rank, silent_s in gone:
            self.declare_lost(rank, f"silent for {silent_s:.1f} s: stopped, stuck, or its host cannot be reached")
        for rank in quiet:
            self.links.send(rank, (Kind.PING,))
        self._next_beat = loop.call_at(next_s, self.beat)

    # Who is there, and what `ControlLinks` tell.

    def heard(self, rank: int) -> None:
        """Note a sign of life of a neighbour."""
        self._detector.heard(rank, asyncio.get_running_loop().time())

    def is_gone(self, rank: int) -> bool:
        """Whether ``rank`` has left, or is lost."""
        return rank in self._lost or rank in self._left

    def wants(self, rank: int) -> bool:
        """Whether a link to ``rank`` is missing."""
        return rank in self._gossip.missing

    def link_up(self, rank: int) -> None:
        """Repeat to ``rank``, on a new link or the rest of two, what it may have missed."""
        self._carry_out(self._gossip.neighbour_joined(rank))

    def link_down(self, rank: int) -> None:
        """Look for other neighbours, since the last link to ``rank`` is gone."""
        self._gossip.neighbour_lost(rank)
        self.maintain()

    def receive(self, rank: int, header: Header) -> None:
        """Handle a GOSSIP frame of the neighbour ``rank``; ``RemoteProtocolError`` ends the link on which it came."""
        self._carry_out(self._gossip.receive(rank, header))

    # Gossip.

    def _flood(self, body: list[Any]) -> None:
        _, effects = self._gossip.flood(body)
        self._carry_out(effects)

    def _carry_out(self, effects: Effects) -> None:
        for tag, *fields in effects:
            if tag == Effect.SEND:
                self.links.send(*fields)
            elif tag == Effect.DELIVER:
                self._deliver(*fields)
            else:
                rank, reason = fields
                raise RemoteProtocolError(f"rank {rank} sent {reason}")

    def _deliver(self, origin: int, number: int, body: Sequence[Any]) -> None:
        tag, *fields = body
        if tag == Body.ABORT:
            self._upcalls.post(self._upcalls.events.on_abort, *fields)
        elif tag == Body.LOST:
            self._on_lost(*fields)
        elif tag == Body.LEAVING:
            self._on_leaving(origin)
        elif tag == Body.QUERY:
            self._on_query(origin, number, *fields)
        elif tag == Body.AGREE:
            self._upcalls.post(self._upcalls.events.on_agreement, origin, fields[0], from_wire(fields[1]))
        else:
            self._on_status(number, *fields)

    def _on_lost(self, rank: int, reason: str, has_ended: bool) -> None:
        if not self.is_gone(rank):
            self._give_up(rank, reason)
        if has_ended and rank in self._lost and rank not in self._ended:
            self._ended.add(rank)
            self._upcalls.post(self._upcalls.events.on_ended, rank)

    def _give_up(self, rank: int, reason: str) -> None:
        self._lost.add(rank)
        self.links.drop(rank)
        for question in self._questions.about(rank):
            self._questions.close(question)
        self._upcalls.post(self._upcalls.events.on_peer_lost, rank, reason)
        self._look_who_needs_me()
        self.maintain()  # the ring has closed over the gap: others may be neighbours now

    def _on_leaving(self, rank: int) -> None:
        if self.is_gone(rank):
            return
        self._left.add(rank)
        self._upcalls.post(self._upcalls.events.on_leaving, rank)
        self._look_who_needs_me()

    # Questions and answers.

    def _posted(self, ops: Sequence[CollectiveId] | Sequence[list[Any]]) -> list[bool]:
        return [self._status.is_posted(group, key, seq) for group, key, seq in ops]

    def _on_query(self, origin: int, number: int, target: int, ops: list[list[Any]]) -> None:
        # on every way a LEAVING comes before the leave question that follows it
        is_leave_question = target == EVERYBODY and not ops and origin in self._left
        if is_leave_question and origin not in self._done_with:
            self._leave_questions[origin] = number
        elif target in (EVERYBODY, self.rank):
            self._carry_out(self._gossip.answer(origin, number, self._posted(ops), self._status.activity()))

    def _release(self, rank: int) -> None:
        """Note that this rank needs nothing more of ``rank``, which leaves."""
        self._done_with.add(rank)
        if rank in self._leave_questions and not self._is_leaving:
            self._carry_out(self._gossip.answer(rank, self._leave_questions.pop(rank), [], self._status.activity()))

    def _on_status(self, number: int, rank: int, posted: list[bool], activity: str) -> None:
        found = self._questions.reply(number, rank, posted)
        if found is None:
            return
        question, whole = found
        if question is self._leave_question:
            self._released.add(rank)
            self._look_who_needs_me()
        if question.answer is not None:
            self._upcalls.post(question.answer, rank, whole, activity)
        if question.target == rank:
            self._close(question)

    def _ask(self, question: Question) -> None:
        if not self._questions.is_open(question):
            return
        if question.times_asked == len(ASK_AGAIN_S) or not self._unanswered(question):
            if question.answer is not None and question.target in self._left:
                ops = [op for part in question.parts for op in part]
                self._upcalls.post(question.answer, question.target, [False] * len(ops), GONE)
            self._questions.close(question)
            return
        for part, ops in enumerate(question.parts):
            # The number is noted before any effect is carried out: an answer cannot come before its question.
            number, effects = self._gossip.flood([Body.QUERY, question.target, ops])
            self._questions.sent(number, question, part)
            self._carry_out(effects)
        asyncio.get_running_loop().call_later(ASK_AGAIN_S[question.times_asked], self._ask, question)
        question.times_asked += 1

    def _unanswered(self, question: Question) -> set[int]:
        asked = {question.target} if question.target != EVERYBODY else set(self._gossip.living) - {self.rank}
        return asked - question.answered

    def _close(self, question: Question) -> None:
        self._questions.close(question)
        named_any = question.parts != [[]]
        if named_any and question.target in self._left and not self._questions.about(question.target):
            self._release(question.target)

    # Leaving.

    def _look_who_needs_me(self) -> None:
        if self._is_leaving and not self.needed_by():
            self._free()

    def _free(self) -> None:
        if self._leave_question is not None:
            self._questions.close(self._leave_question)
        while self._when_free:
            self._when_free.pop()()


@dataclass(eq=False, slots=True)
class Question:
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
        self._open: dict[Question, None] = {}
        self._floods: dict[int, tuple[Question, int]] = {}

    def ask(self, ops: Sequence[CollectiveId], target: int, answer: Answer | None) -> Question:
        """Open a question."""
        question = Question(target, batches(ops), answer)
        self._open[question] = None
        return question

    def is_open(self, question: Question) -> bool:
        """Whether answers are still waited for."""
        return question in self._open

    def sent(self, number: int, question: Question, part: int) -> None:
        """Note that the flood of that number carries this part."""
        self._floods[number] = (question, part)

    def reply(self, number: int, rank: int, posted: list[bool]) -> tuple[Question, list[bool]] | None:
        """Take a STATUS of ``rank``; return the question that it completes and the whole answer, or None."""
        question, part = self._floods.get(number, (None, 0))
        if question is None or question.target not in (-1, rank):
            return None
        whole = question.add(part, rank, posted)
        return None if whole is None else (question, whole)

    def close(self, question: Question) -> None:
        """Forget a question."""
        self._open.pop(question, None)
        self._floods = {number: asked for number, asked in self._floods.items() if asked[0] is not question}

    def about(self, rank: int) -> list[Question]:
        """The open questions to ``rank`` alone."""
        return [question for question in self._open if question.target == rank]
