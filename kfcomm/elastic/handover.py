"""The state to those who come: they tell each other what they have, the arrays travel, and all agree that they have.

Each round begins with what all ranks say of their states, from which every rank finds out by itself who gives and who
takes, and ends with what became of it. If a rank was lost on the way the others begin again. Both meetings are calls
of the ledger, so that all ranks that live hear the same.

A newcomer receives into the arrays of its state. Where every rank has a state of its own, of which the lowest one's
is taken, that is made beside: if the lowest is lost in the midst, the next one's must be whole.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kfcomm.arrays import adapt
from kfcomm.elastic.communicator import ElasticCommunicator
from kfcomm.elastic.entry import Births
from kfcomm.elastic.ledger import Ledger
from kfcomm.elastic.state import State, arrays_of, difference, load, places_of, plan_of, small_of
from kfcomm.elastic.stripes import Array, spread
from kfcomm.errors import CollectiveError, ConfigError, KfcommError, PeerLost

logger = logging.getLogger("kfcomm")


class Offer(NamedTuple):
    """What a rank says of its state.

    Attributes:
        plan: of its arrays.
        told: its place in the pass, and all of the state that is no array.
        wrong: why it cannot give any; else None.
        program: see ``program_digest``.
    """

    plan: list[list[Any]]
    told: list[Any]
    wrong: str | None
    program: str


class Handover:
    """Of one state, while an ``Elastic`` is open.

    Args:
        comm: of all ranks.
        ledger: of its calls.
        state: of this rank.
        program: see ``program_digest``, as it was when training began.
    """

    def __init__(self, comm: ElasticCommunicator, ledger: Ledger, state: State, program: str) -> None:
        self._comm = comm
        self._ledger = ledger
        self._state = state
        self._program = program

    async def carry_out(self, place: Any, having: Births | None = None, *, wrong: str | None = None) -> Any:
        """All ranks call it, and have the same state then.

        Args:
            place: of this rank in the pass.
            having: births of those that have the state; None if each has one, and that of the lowest is meant.
            wrong: why this rank cannot give its own.

        Returns:
            The place of those that have the state.

        Raises:
            ConfigError: the states differ in more than their values. Where some have come to others, to those alone;
                to them also if they run another program than any of the others.
            PeerLost: nobody is left who has it.
            CollectiveError: it does not come through, though no rank is lost.
        """
        while True:
            mine = Offer(plan_of(self._state), [place, small_of(self._state)], wrong, self._program)
            rows, births = await self._gathered(list(mine), "plans")
            offers = [Offer(*row) for row in rows]
            owners = [rank for rank, birth in enumerate(births) if having is None or birth in having]
            if not owners:
                raise PeerLost("all ranks that had the state are lost before this rank had it from them")
            self._check(offers, owners, is_newcomer=births.index(self._birth()) not in owners)
            givers, first = (owners[:1] if having is None else owners), offers[owners[0]]
            takers = [rank for rank in _fitting(offers, owners) if rank not in givers]
            is_taker = births.index(self._birth()) in takers
            arrays = self._taken_into(having) if is_taker else self._views()
            if takers and not await self._spread(births, givers, takers, arrays):
                continue
            if is_taker:
                load(self._state, arrays, first.told[1])
            return first.told[0]

    def _birth(self) -> int:
        current = self._comm.current
        return current.births[current.rank]

    def _views(self) -> list[Array]:
        return [adapt(array).flat for _, array in arrays_of(self._state)]

    def _taken_into(self, having: Births | None) -> list[Array]:
        """Where a taker receives."""
        return [np.empty_like(one) for one in self._views()] if having is None else places_of(self._state)

    def _check(self, offers: Sequence[Offer], owners: Sequence[int], *, is_newcomer: bool) -> None:
        """All ranks know what the others have, and so find out together whether it fits."""
        mine, first = plan_of(self._state), offers[owners[0]]
        for offer in offers:
            if offer.wrong is not None:
                raise ConfigError(offer.wrong)
        if is_newcomer and self._program not in {offers[rank].program for rank in owners}:
            raise ConfigError(
                "this process runs another program than the ranks that it was to join: the file is another one, or was"
                " changed after they had begun"
            )
        if mine == first.plan and all(offers[rank].plan == first.plan for rank in owners):
            return
        unlike = (difference(mine, offer.plan, f"rank {rank}") for rank, offer in enumerate(offers))
        text = next((one for one in unlike if one is not None), "two other ranks differ")
        raise ConfigError(f"the ranks' states are not alike: {text}")

    async def _spread(
        self, births: Births, givers: Sequence[int], takers: Sequence[int], arrays: Sequence[Array]
    ) -> bool:
        """One attempt; whether all takers have the arrays."""
        sums: dict[int, int] = {}
        why = None
        try:
            if self._comm.current.births != births:
                raise PeerLost("another rank was lost")
            sums = await spread(self._comm.current, arrays, givers, takers)
        except KfcommError as error:
            why = str(error)
        rows, present = await self._gathered([why, list(sums.items())], "state")
        seen = {(number, value) for _, found in rows for number, value in found}
        failures = [text for text, _ in rows if text is not None]
        if not failures and len(seen) > len({number for number, _ in seen}):
            failures = ["what came is not what was sent"]
        if failures and len(present) == len(births):
            raise CollectiveError(f"the state did not come from rank to rank: {failures[0]}")
        if failures:
            logger.info("the state is given again: %s", failures[0])
        return not failures

    async def _gathered(self, value: Any, about: str) -> tuple[list[Any], Births]:
        """What each rank that lives says, and their births."""
        handle = self._ledger.begin("all_gather_object", (value, f"kfcomm/{about}"), {})
        rows = await handle
        return rows, handle.contributors or ()


def _fitting(offers: Sequence[Offer], owners: Sequence[int]) -> list[int]:
    """The ranks that have, or can take, the state of the owners."""
    plan, programs = offers[owners[0]].plan, {offers[rank].program for rank in owners}
    return [rank for rank, one in enumerate(offers) if one.plan == plan and one.program in programs]


def program_digest() -> str:
    """A few letters that stand for the file which this process was started with, as it is now; none if there is none.

    What that imports may differ all the same.
    """
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return "" if path is None else hashlib.blake2b(Path(path).read_bytes(), digest_size=8).hexdigest()
    except OSError:
        return ""
