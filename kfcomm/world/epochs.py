"""From one epoch to the next: the surviving ranks agree on the members of the next world, and these make it.

A world never changes. The next one is made by the code that made the first, with the agreement in the place of the
store: each rank listens at a new port before it takes part, and the decision holds the ports of all members. The
engine, plans, links, slots and memory of the old epoch end on a rank when it knows the decision, but for an arena
without readers (`transports.shm.segment`) and slots that all ranks have (`engine.inherited`). Its control plane still
answers, until all ranks are in the new epoch and so know it, too.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import operator
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import numpy as np

from kfcomm.collectives.handle import Handle, looked_at
from kfcomm.collectives.objects import packed, unpacked
from kfcomm.common.arguments import whole_number
from kfcomm.core.cause import Cause, CauseKind
from kfcomm.engine.agreements import AgreementCall
from kfcomm.engine.inherited import InheritedSlots
from kfcomm.engine.session import Session
from kfcomm.errors import CollectiveMismatch, ConfigError, EpochChanged, KfcommError, RendezvousError
from kfcomm.types import Candidate

if TYPE_CHECKING:
    from kfcomm.world.prepared import PreparedEpoch

logger = logging.getLogger("kfcomm")

NUM_TELLERS = 2
"""So many of the first ranks report joined, released and lost ranks to the store."""
RETIRE_AFTER_S = 0.25
"""Delay before an old epoch is closed: that takes a rank some milliseconds, in which others would wait."""


class EpochPlan(NamedTuple):
    """Change that all ranks have agreed on before: made if every surviving rank knows it. Leavers are given by uid."""

    joiners: tuple[Candidate, ...] = ()
    leavers: tuple[int, ...] = ()

    @property
    def digest(self) -> bytes:
        """Eight bytes."""
        return hashlib.blake2b(msgpack.packb(self), digest_size=8).digest()

    @classmethod
    def of(cls, fields: Sequence[Any]) -> EpochPlan:
        """The plan of decoded msgpack."""
        joiners, leavers = fields
        return cls(tuple(Candidate(*one) for one in joiners), tuple(leavers))


NO_PLAN = EpochPlan()
NO_SLOTS = InheritedSlots({})


class Released(KfcommError):
    """This rank leaves by a plan."""


class Succession(NamedTuple):
    """Successor of an epoch."""

    session: Session
    parts: dict[int, bytes]  # of the surviving ranks, by rank in the epoch that is over
    is_planned: bool  # the plan was carried out


async def agree(session: Session, value: Any, timeout_s: float) -> bool | int:
    """Return the logical AND of what the surviving ranks give, see ``Communicator.agree``."""
    is_flag = isinstance(value, (bool, np.bool_))
    given = bool(value) if is_flag else whole_number(value)
    if given is None or not -(1 << 63) <= given < 1 << 63:
        raise ConfigError(f"agree expects a bool or a 64-bit integer, got {value!r}")
    part = packed([given]).tobytes()
    said = await session.agreements.decide(AgreementCall.AGREE, part, timeout_s, session.network.membership.has_word)
    values = [unpacked(np.frombuffer(one, np.uint8))[0] for one in said.values()]
    if len({type(one) for one in values}) > 1:
        raise CollectiveMismatch("agree expects one type on all ranks, got bool and integer", key="agree")
    together = functools.reduce(operator.and_, (int(one) for one in values))
    return bool(together) if is_flag else together


async def next_epoch(
    session: Session, part: bytes, timeout_s: float, plan: EpochPlan = NO_PLAN, prepared: PreparedEpoch | None = None
) -> Succession:
    """Continue with the surviving ranks, which all call it; ``Released`` if this rank leaves by the plan.

    If all ranks are there and have prepared the epoch of this plan, it begins as it is.
    """
    # Kept until a decision: after a timeout the next call takes it up, and the others may know its address.
    if session.entry is None:
        session.entry = await session.network.open_entry(session.epoch + 1)
    entry, network, slots = session.entry, session.network, session.engine.slots
    if slots.bequest is None and session.engine.router.lost:
        slots.bequest = InheritedSlots.of(session.engine.router.names.of_group(session.world.id), slots.pending)
    bequest = NO_SLOTS if slots.bequest is None else slots.bequest
    given: bytes = msgpack.packb([entry.part, part, plan.digest, prepared is not None, bequest.digest])
    said = await session.agreements.decide(AgreementCall.SHRINK, given, timeout_s, network.membership.has_word)
    session.entry = None
    opened = {rank: msgpack.unpackb(one) for rank, one in said.items()}
    # A rank that has died may have told the plan to some only: it counts if all surviving ranks gave its digest.
    is_planned = plan != NO_PLAN and all(row[2] == plan.digest for row in opened.values())
    is_prepared = is_planned and len(said) == session.layout.size and all(row[3] for row in opened.values())
    uids = session.network.births
    members = tuple(rank for rank in said if not (is_planned and uids[rank] in plan.leavers))
    if session.rank not in said:
        await entry.close()
        raise EpochChanged(
            f"epoch {session.epoch + 1} begins without this rank: the others took it for lost; it can close its "
            "communicator and join as a new rank", epoch=session.epoch + 1, members=members,
        )  # fmt: skip
    gone = [rank for rank in range(session.layout.size) if rank not in members]
    without = f", without ranks {gone}" if gone else ""
    joiners = plan.joiners if is_planned else ()
    more = f", with {len(joiners)} new ones" if joiners else ""
    text = f"epoch {session.epoch} is over: ranks {list(members)} go on as epoch {session.epoch + 1}{without}{more}"
    session.end_epoch(Cause(CauseKind.EPOCH, session.epoch + 1, text, members))
    logger.info("rank %d: %s", session.rank, text)
    if session.rank not in members:
        await entry.close()
        await network.membership.let_go([uids[session.rank]])
        raise Released(text)
    if is_prepared and prepared is not None and prepared.comm is not None:
        await entry.close()
        follower = session.hand_on(prepared.comm._session)
    else:
        follower = session.follow(entry.enter({rank: opened[rank][0] for rank in members}, joiners))
        heaps = follower.network.heaps()
        if heaps is not None and not is_planned and {row[4] for row in opened.values()} == {bequest.digest}:
            ranks = {rank: place for place, rank in enumerate(members)}
            follower.engine.slots.inherited = bequest.for_next(ranks, heaps)
    return Succession(follower, {rank: row[1] for rank, row in opened.items()}, is_planned)


async def tell_store(session: Session, former: Collection[int], plan: EpochPlan, strategy: str) -> None:
    """Report joined, released and lost ranks of this epoch to the store; ``former`` are uids of the epoch before."""
    # The first ranks do this; if these are lost, the others do. Repeated reports have no effect.
    if session.rank >= NUM_TELLERS and not session.engine.router.lost.keys() >= set(range(NUM_TELLERS)):
        return
    network = session.network
    lost = set(former) - set(network.births) - set(plan.leavers)
    joiners = [one.birth for one in plan.joiners]
    with contextlib.suppress(RendezvousError):
        if lost:
            await network.membership.give_up(lost)
        if plan != NO_PLAN:
            # From both ends: the ranks that report are at it together, and each joining rank waits for one of them.
            await network.membership.welcome(
                len(network.births) - len(joiners), joiners[:: -1 if session.rank % 2 else 1], strategy
            )
            await network.membership.let_go(plan.leavers)


def settle(session: Session, arrived: Handle[None], plan: EpochPlan = NO_PLAN) -> None:
    """Close what came before this epoch once ``arrived``, a barrier of its ranks, is done."""
    # At once where ranks have left by ``plan``, which end with it. If a rank is lost before, the others find out by
    # their next call, and the old control planes stay until the next change, or the end.

    def retire() -> None:
        if session.over is None:
            session.retire_former()

    def done(_: Handle[None]) -> None:
        looked_at(arrived)
        if not arrived.cancelled() and arrived.exception() is None:
            session.engine.reactor.call_later(0.0 if plan.leavers else RETIRE_AFTER_S, retire)

    arrived.when_done(session.engine.reactor, done)
