"""One rank's part in the control plane, on the loop of its control thread: gossip over links, and what follows from it.

It joins `Gossip` (which rank gets which message), `ControlLinks` (how it gets there), `Questions` and the engine's
`Upcalls`. A rank changes its state for the others in this order and never back::

    living ──▶ leaving   it announced it; its sockets may close without being missed
       └─────▶ lost      its port is closed, its launcher saw it end, or another rank reports it

A leaving rank lingers, since the others may still ask which calls it has posted. It ends when no rank needs it any
more; a rank that leaves, too, does not need it. If all ranks leave at once, as at the end of a program, they learn that
in log2(size) rounds (see `kfcomm.core.gossip`). If many stay, a leaving rank that has heard of no further leaving rank
for a while floods its *leave question*, which goes to all ranks and names no collective. Each staying rank answers it
when it has no questions left. If few stay, each floods, without being asked, which ranks it does not need any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kfcomm.core.frame import Header, Kind
from kfcomm.core.gossip import EVERYBODY, MAX_NAMED_RANKS, Body, CollectiveId, Effect, Effects, Gossip, clip
from kfcomm.core.handshake import Hello, Purpose
from kfcomm.core.membership import FailureDetector, Message, from_wire, to_wire
from kfcomm.engine.control import GONE, Answer, StatusSource, Upcalls, World
from kfcomm.engine.control.links import ControlLinks
from kfcomm.engine.control.questions import LeaveQuestion, Questions
from kfcomm.errors import RemoteProtocolError

EXPECTED_DIAL_S = 1.0
"""How long a neighbour that should dial this rank is waited for before it is dialled instead."""
DEAD_HOST_SHARE = 1 / 3
"""Of the time after which a silent peer is lost: so soon it is if its kernel, which needs no turns, is silent, too."""
FEW = 8
"""Worlds up to this size take no account of the number of messages: each leaving rank is reported at once."""
GATHERED_S_PER_RANK = 0.25e-3
"""How long, times the size of the world, news of leaving ranks is held back, so that one message names several."""
RELEASED_S_PER_RANK = 4e-3
"""Pause, times the size of the world, without news of leaving ranks before few that stay release the others."""
ASK_S_PER_RANK, MOST_PATIENCE_S = 16e-3, 2.0
"""The same before a rank that leaves asks those that stay; and the bound of it, which holds where few stay."""
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
        self._gathering: asyncio.TimerHandle | None = None  # before it passes on who leaves
        self._staying: asyncio.TimerHandle | None = None  # before it asks, while it leaves
        self._releasing: asyncio.TimerHandle | None = None  # before it says whom it needs no longer, while it stays
        self._leave_question: LeaveQuestion | None = None
        self._leave_questions: dict[int, int] = {}
        self._done_with: set[int] = set()
        self._said_done: set[int] = set()
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
            self._gossip.leave()
            self._pass_on_leaving()
            self._look_who_needs_me()
            self._ask_to_leave_soon()
        self._look_who_needs_me()

    def needed_by(self) -> list[int]:
        """Ranks that may still ask this one, ascending. May be called on any thread."""
        return sorted(set(range(self._gossip.size)) - {self.rank} - self._released - self._left - self._lost)

    async def close(self, goodbye_s: float) -> None:
        """Say goodbye on every link; bounded, see `ControlLinks.close`."""
        if self._next_beat is not None:
            self._next_beat.cancel()
        if self._releasing is not None:
            self._releasing.cancel()
        self._free()
        self._say_left()  # a neighbour that has yet to hear of others waits for them
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
            for rank in fields[0]:
                self._on_leaving(rank)
            self._pass_on_leaving()
        elif tag == Body.RELEASE:
            if self.rank in fields[0]:
                self._released.add(origin)
                self._look_who_needs_me()
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
        if self._is_leaving:
            self._ask_to_leave_soon()

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
        if self._releasing is not None:
            self._releasing.cancel()
        if self._gossip.size > FEW and self._are_few(self._gossip.living):
            pause_s = RELEASED_S_PER_RANK * self._gossip.size
            self._releasing = asyncio.get_running_loop().call_later(pause_s, self._say_done)

    def _say_done(self) -> None:
        """Tell the ranks that have left that this one needs them no longer."""
        if not self._is_leaving:
            ranks = sorted(self._done_with - self._said_done)
            self._said_done.update(ranks)
            for first in range(0, len(ranks), MAX_NAMED_RANKS):
                self._flood([Body.RELEASE, ranks[first : first + MAX_NAMED_RANKS]])

    def _are_few(self, ranks: Sequence[int]) -> bool:
        """Whether a flood of each of these costs less than one of each other rank."""
        return len(ranks) <= self._gossip.size.bit_length()

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

    def _ask(self, question: LeaveQuestion) -> None:
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

    def _unanswered(self, question: LeaveQuestion) -> set[int]:
        asked = {question.target} if question.target != EVERYBODY else set(self._gossip.living) - {self.rank}
        return asked - question.answered

    def _close(self, question: LeaveQuestion) -> None:
        self._questions.close(question)
        named_any = question.parts != [[]]
        if named_any and question.target in self._left and not self._questions.about(question.target):
            self._release(question.target)

    # Leaving.

    def _pass_on_leaving(self) -> None:
        """Tell the neighbours who leaves, with who else leaves within a moment."""
        if self._gossip.size <= FEW:
            self._say_left()
        elif self._gathering is None:
            pause_s = GATHERED_S_PER_RANK * self._gossip.size
            self._gathering = asyncio.get_running_loop().call_later(pause_s, self._say_left)

    def _say_left(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        self._carry_out(self._gossip.say_left())

    def _ask_to_leave_soon(self) -> None:
        """Ask the ranks that stay, once no further one has left for a while."""
        if self._staying is not None:
            self._staying.cancel()
        if not self._when_free or self._leave_question is not None:
            return
        if self._gossip.size <= FEW:
            self._ask_to_leave()
        else:
            is_told = self._are_few(self.needed_by())
            pause_s = MOST_PATIENCE_S if is_told else min(ASK_S_PER_RANK * self._gossip.size, MOST_PATIENCE_S)
            self._staying = asyncio.get_running_loop().call_later(pause_s, self._ask_to_leave)

    def _ask_to_leave(self) -> None:
        self._leave_question = self._questions.ask([], EVERYBODY, None)
        self._ask(self._leave_question)

    def _look_who_needs_me(self) -> None:
        if self._is_leaving and not self.needed_by():
            self._free()

    def _free(self) -> None:
        if self._staying is not None:
            self._staying.cancel()
        if self._leave_question is not None:
            self._questions.close(self._leave_question)
        while self._when_free:
            self._when_free.pop()()
