"""Ways into a running job: the entrance to an ``Elastic``, and the handover of the state.

At the entrance each rank first reports whether it sees the checkpoint. Then the lowest rank that sees it reads it, and
sends it to the others. If that rank is lost, another one reads it; if no other rank sees it, all survivors end with an
error: a job with a checkpoint never starts from step 0.

Each round of a handover begins with a report of each rank on its state, from which all ranks derive who sends and who
receives, and ends with the result of the transfer. If a rank was lost meanwhile, the others begin again. The reports
are calls that survive losses, so that all surviving ranks see the same.

A joining rank receives into the arrays of its state. Where every rank has a state, and that of the lowest rank is
taken, ranks receive into other memory: if the lowest rank is lost during the transfer, the state of the next must be
intact.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kfcomm.elastic.call_log import Uids
from kfcomm.elastic.checkpoint import Checkpoint, Found
from kfcomm.elastic.checks import sendable, unreadable
from kfcomm.elastic.communicator import ElasticCommunicator
from kfcomm.elastic.dispatcher import Dispatcher
from kfcomm.elastic.merging import Merging
from kfcomm.elastic.replicas import spread
from kfcomm.elastic.sampler import Position
from kfcomm.elastic.snapshots import Form, Kept, Snapshot, load_form
from kfcomm.elastic.state import State, difference, fault_of, places_of
from kfcomm.elastic.trees import Array
from kfcomm.errors import CollectiveError, ConfigError, KfcommError, PeerLost
from kfcomm.world.communicator import Communicator

logger = logging.getLogger("kfcomm")


class StateOffer(NamedTuple):
    """Report of a rank on its state."""

    plan: list[list[Any]]  # see ``Form``
    outline: list[Any]  # see ``Form``
    told: list[Any]  # position of training, the rest of the form, and forms and places of kept copies
    wrong: str | None  # fault for which it can neither send nor receive a state
    program: str
    options: dict[str, Any]  # of its ``Elastic``, by name

    @property
    def form(self) -> Form:
        """Values of its state without the contents of arrays."""
        return Form(self.plan, self.outline, *self.told[1])

    @property
    def kept(self) -> list[tuple[Form, Any]]:
        """Copies of its state that it has kept: their forms, and positions of samplers."""
        return [(Form(*form), place) for form, place in self.told[2]]


class HeldState(NamedTuple):
    """Values of a rank's state while it is handed over."""

    objects: Mapping[str, Any] | None  # states of its objects
    arrays: list[Array]  # flat, those of kept copies last


class Handover:
    """Handover of one state, while an ``Elastic`` is open."""

    def __init__(
        self, comm: ElasticCommunicator, calls: Dispatcher, state: State, program: str, options: dict[str, Any]
    ) -> None:
        self.comm = comm
        self.calls = calls
        self.merging = Merging(calls, state)
        self._state = state
        self._program = program  # see ``program_digest``, from when training began
        self._options = options  # options of this rank's ``Elastic``, by name; the same on all ranks

    async def carry_out(
        self, place: Any, having: Uids | None = None, *, wrong: str | None = None, are_new: bool = False
    ) -> Any:
        """Bring all ranks, which all call it, to the same state; returns the position of those that have it.

        Args:
            place: position of training of this rank.
            having: uids of the ranks that have the state; None if each has one, and that of the lowest rank is taken.
            wrong: fault for which this rank cannot send its state.
            are_new: all ranks begin together.
        """
        # Among ranks that begin together the fault of one is an error on all; that of a joining rank is an error on
        # that rank alone, as training must not end by it.
        are_new = are_new or having is None
        is_merged = not self.merging.may_differ
        while True:
            mine, offer = self._offer(place, wrong)
            rows, uids = await self.calls.gather(list(offer), "plans")
            offers = [StateOffer(*row) for row in rows]
            # Computed on each rank from the same reports: no rank has to tell another its role.
            owners = [rank for rank, uid in enumerate(uids) if having is None or uid in having]
            if not owners:
                raise PeerLost("all ranks that had the state are lost before this rank had it from them")
            me = uids.index(self.comm.current.births[self.comm.current.rank])
            if me not in owners and not are_new and self._program not in {offers[rank].program for rank in owners}:
                raise ConfigError(
                    "this process runs another program than the ranks that it was to join: the file is another one, or"
                    " was changed after they had begun"
                )
            _check(offers, range(len(offers)) if are_new else [*owners, *({me} - set(owners))], me)
            if having is None and not is_merged:
                await self.merging.convert(uids)
                is_merged = True
                continue
            givers, first = (owners[:1] if having is None else owners), offers[owners[0]]
            _check_parts(offers, givers, me)
            takers = [rank for rank in _fitting(offers, owners, are_new=are_new) if rank not in givers]
            arrays = self._places(first, mine, is_own=having is None) if me in takers else mine.arrays
            # A rank was lost on the way: reports and roles may differ now, so the round begins again.
            if takers and not await self._spread(uids, givers, takers, arrays):
                continue
            if me in takers:
                self._take(first, arrays, mine)
            # Values were converted for all ranks of the planned epoch, also for those that are lost by now.
            self.merging.uids = uids if are_new else self.calls.log.shown
            return first.told[0]

    def _offer(self, place: Any, wrong: str | None) -> tuple[HeldState, StateOffer]:
        """Values of this rank's state, and its report; no values if it has a fault."""
        wrong = wrong or fault_of(self._state)
        try:
            if wrong is None:
                now = Snapshot.of(self._state)
                (plan, outline, *rest), flat = now.forms()
                kept = [[list(one.form), one.place] for one in self.merging.copies]
                told = [place, rest, kept]
                arrays = [*flat, *(array for one in self.merging.copies for array in one.arrays)]
                return HeldState(now.objects, arrays), StateOffer(
                    plan, outline, told, None, self._program, self._options
                )
        except ConfigError as error:
            wrong = sendable(str(error))
        except Exception as error:  # noqa: BLE001  whatever the caller's arrays raise, the others learn of it
            wrong = unreadable("the state", error)
        return HeldState(None, []), StateOffer([], [], [None, None, []], wrong, self._program, self._options)

    def _places(self, first: StateOffer, mine: HeldState, *, is_own: bool) -> list[Array]:
        """Return memory for the arrays that are sent; ``is_own``: this rank may have to send its own state."""
        # That is so where each rank has one, and the lowest is lost.
        plain = places_of(self._state)
        if is_own:
            plain = [np.empty_like(one) for one in mine.arrays[: len(plain)]]
        kept = [np.empty(nbytes, np.uint8).view(kind) for form, _ in first.kept for nbytes, kind in form.sizes()]
        return [*plain, *first.form.new_parts(), *kept]

    def _take(self, first: StateOffer, arrays: list[Array], mine: HeldState) -> None:
        """Load what was received, also the copies that the others have kept."""
        end = len(first.form.sizes())
        load_form(self._state, first.form, arrays[:end], likes=mine.objects)
        self.merging.copies.clear()
        for form, place in first.kept:
            begin, end = end, end + len(form.sizes())
            self.merging.copies.append(Kept(self._state))
            self.merging.copies[-1].take(form, arrays[begin:end], place)

    async def _spread(self, uids: Uids, givers: Sequence[int], takers: Sequence[int], arrays: Sequence[Array]) -> bool:
        """Transfer the arrays once; False if all ranks have to begin again."""
        sums: dict[int, int] = {}
        why = None
        try:
            if self.comm.current.births != uids:
                raise PeerLost("another rank was lost")
            sums = await spread(self.comm.current, arrays, givers, takers)
        except KfcommError as error:
            why = str(error)
        rows, present = await self.calls.gather([why, list(sums.items())], "state")
        seen = {(number, value) for _, found in rows for number, value in found}
        failures = [text for text, _ in rows if text is not None]
        # Each stripe has one checksum if giver and takers have seen the same bytes.
        if not failures and len(seen) > len({number for number, _ in seen}):
            failures = ["what came is not what was sent"]
        if failures and len(present) == len(uids):
            raise CollectiveError(f"the state did not come from rank to rank: {failures[0]}")
        if failures:
            logger.info("the state is given again: %s", failures[0])
        return not failures


def _check(offers: Sequence[StateOffer], ranks: Iterable[int], me: int) -> None:
    """Check that reports fit together; all ranks know all reports, and so come to the same result."""
    judged = [(rank, offers[rank]) for rank in ranks]
    for rank, offer in judged:
        if offer.wrong is not None:
            raise ConfigError(f"rank {rank}: {offer.wrong}")
    check_options({rank: offer.options for rank, offer in judged})
    forms = [(offer.plan, offer.outline) for _, offer in judged]
    if any(one != forms[0] for one in forms):
        unlike = (_unlike(offers[me], offer, f"rank {rank}") for rank, offer in judged)
        text = next((one for one in unlike if one is not None), "two other ranks differ")
        raise ConfigError(f"the states of the ranks differ: {text}")


def _check_parts(offers: Sequence[StateOffer], givers: Sequence[int], me: int) -> None:
    """Check that objects have one form on all ranks that send their state."""
    parts = {rank: offers[rank].form.parts for rank in givers}
    first = parts[givers[0]]
    other = next((rank for rank, one in parts.items() if one != first), None)
    if other is not None:
        here, there = (me, givers[0]) if parts.get(me, first) != first else (givers[0], other)
        text = difference(parts[here], parts[there], f"rank {there}")
        raise ConfigError(f"the states of the ranks differ: on rank {here}, {text}")


def _unlike(mine: StateOffer, other: StateOffer, there: str) -> str | None:
    if mine.outline == other.outline:
        return difference(mine.plan, other.plan, there)
    if mine.outline[0] != other.outline[0]:
        return f"this rank's has {', '.join(mine.outline[0])}, that of {there} {', '.join(other.outline[0])}"
    lists = "lists and dictionaries are others"
    return difference(mine.plan, other.plan, there) or f"{lists} on this rank than on {there}"


def check_options(said: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise a `ConfigError` unless the options of these ranks' ``Elastic`` are the same."""
    first, options = next(iter(said.items()))
    for rank, others in said.items():
        for name in options:
            if options[name] != others.get(name):
                raise ConfigError(
                    f"{name} of an Elastic is the same on all ranks: it is {options[name]!r} on rank {first} and"
                    f" {others.get(name)!r} on rank {rank}"
                )


def _fitting(offers: Sequence[StateOffer], owners: Sequence[int], *, are_new: bool) -> list[int]:
    """Ranks that have the state of the owners, or can receive it."""
    first, programs = offers[owners[0]], {offers[rank].program for rank in owners}
    return [
        rank
        for rank, one in enumerate(offers)
        if one.wrong is None
        and (one.plan, one.outline, one.options) == (first.plan, first.outline, first.options)
        and (are_new or one.program in programs)
    ]


def program_digest() -> str:
    """Return a digest of the file with which this process was started, read now; empty without a file."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return "" if path is None else hashlib.blake2b(Path(path).read_bytes(), digest_size=8).hexdigest()
    except OSError:
        return ""


class Entrance:
    """Entrance of one rank to an ``Elastic``; ``options``: see `Handover`."""

    def __init__(
        self, comm: Communicator, handover: Handover, checkpoint: Checkpoint | None, options: dict[str, Any]
    ) -> None:
        self._me = comm.births[comm.rank]
        self._births = comm.births
        self._hosts = dict(zip(comm.births, comm.layout.hosts, strict=True))
        self._handover = handover
        self._checkpoint = checkpoint
        self._options = options
        self._told: tuple[Found, int] | None = None

    async def join(self, num_old: int) -> Position:
        """Receive the state, and the position, of the first ``num_old`` ranks, which train already."""
        return self._begun(await self._handover.carry_out(None, self._births[:num_old]))

    async def begin(self) -> Position:
        """Agree with the other ranks on the position from which all begin."""
        while True:
            holders = await self._holders()
            if not holders:
                place = Position(lineage=[secrets.token_hex(8)])
                return self._begun(await self._handover.carry_out(list(place)))
            place, wrong = await self._read() if holders[0] == self._me else (Position(), None)
            try:
                told = await self._handover.carry_out(list(place), holders[:1], wrong=wrong, are_new=True)
            except PeerLost:
                continue  # the rank that read the file: no other has what it read, so another one reads it
            self._handover.merging.split()
            return self._begun(told)

    async def _holders(self) -> Uids:
        """The ranks that see the checkpoint; empty without a checkpoint."""
        found, wrong = None, None
        try:
            found = None if self._checkpoint is None else await self._checkpoint.find()
        except ConfigError as error:
            wrong = str(error)
        said = [self._options, None if found is None else list(found), wrong]
        rows, uids = await self._handover.calls.gather(said, "begin")
        for rank, (_, _, fault) in enumerate(rows):
            if fault is not None:
                raise ConfigError(f"rank {rank}: {fault}")
        check_options({rank: options for rank, (options, _, _) in enumerate(rows)})
        seen = {uid: Found(*one) for uid, (_, one, _) in zip(uids, rows, strict=True) if one is not None}
        self._check(seen, uids)
        if seen:
            self._told = next(iter(seen.values())), min(seen)
        return tuple(uid for uid in uids if uid in seen)

    def _check(self, seen: dict[int, Found], uids: Uids) -> None:
        """Check that all ranks see the same checkpoint."""
        if self._checkpoint is None:
            return
        name, other = self._checkpoint.name, {one: uid for uid, one in reversed(seen.items())}
        if len(other) > 1:
            steps = ", ".join(f"of step {one.number} on rank {uids.index(uid)}" for one, uid in other.items())
            raise ConfigError(f"checkpoint {name!r} is not the same file on all ranks: it is one {steps}; keep one")
        if seen:
            return
        if self._told is not None:
            found, uid = self._told
            raise ConfigError(
                f"rank {uid} is lost, which saw checkpoint {name!r} of step {found.number}, and no other rank sees"
                " it: start the job again, with a path that leads to the same file on all hosts"
            )
        # A rank that sees no file cannot tell "no checkpoint" from "not on this host". Only the first rank's
        # path counts for that, or another rank on its host.
        first = self._births[0]
        if first not in uids and self._hosts[first] not in {self._hosts[one] for one in uids}:
            raise ConfigError(
                f"rank {first} was lost before it reported whether it sees a checkpoint {name!r}, and no rank is left "
                "on its host that could: start the job again"
            )

    async def _read(self) -> tuple[Position, str | None]:
        """Load the checkpoint; returns its position, and its fault."""
        if self._checkpoint is None:
            return Position(), None
        try:
            told = await self._checkpoint.read()
            if told is None:
                return Position(), f"checkpoint {self._checkpoint.name!r} was removed while it was read"
            return Position.of(told)._replace(lineage=[*self._checkpoint.lineage, secrets.token_hex(8)]), None
        except ConfigError as error:
            return Position(), str(error)
        except (TypeError, ValueError):
            return Position(), f"{self._checkpoint.name} has no position from which an Elastic can resume"

    def _begun(self, told: Any) -> Position:
        place = Position.of(told)
        if self._checkpoint is not None:
            self._checkpoint.lineage = place.lineage
        return place
