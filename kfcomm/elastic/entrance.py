"""The first agreement of the ranks that open an ``Elastic``: the state or checkpoint from which they begin.

Ranks exchange local knowledge before they act on it. First each rank reports its view of the checkpoint. Then the
lowest rank that sees it reads it, and sends it to the others. If that rank is lost, another one reads it; if no other
rank sees it, all survivors end with an error: a job with a checkpoint never starts from step 0.
"""

from __future__ import annotations

import secrets
from typing import Any

from kfcomm.elastic.checkpoint import Checkpoint, Found
from kfcomm.elastic.entry import Births
from kfcomm.elastic.handover import Handover, check_options
from kfcomm.elastic.places import Place
from kfcomm.errors import ConfigError, PeerLost
from kfcomm.world.communicator import Communicator


class Entrance:
    """Of one rank.

    Args:
        comm: of those that enter.
        handover: of its state.
        checkpoint: that it was given.
        options: see `Handover`.
    """

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

    async def join(self, num_old: int) -> Place:
        """Take the state, and the place, of the first ``num_old`` ranks, which train already."""
        return self._begun(await self._handover.carry_out(None, self._births[:num_old]))

    async def begin(self) -> Place:
        """Agree with the other ranks on the place from which all begin.

        Raises:
            ConfigError: see ``Elastic``.
        """
        while True:
            holders = await self._holders()
            if not holders:
                place = Place(lineage=[secrets.token_hex(8)])
                return self._begun(await self._handover.carry_out(list(place)))
            is_reader = holders[0] == self._me
            place, wrong = await self._read() if is_reader else (Place(), None)
            try:
                told = await self._handover.carry_out(list(place), holders[:1], wrong=wrong, are_new=True)
            except PeerLost:  # who was to give it: another one does
                continue
            return self._begun(told)

    async def _holders(self) -> Births:
        """The ranks that see the checkpoint; empty without a checkpoint."""
        found, wrong = await self._find()
        said = [self._options, None if found is None else list(found), wrong]
        rows, births = await self._handover.gathered(said, "begin")
        for rank, (_, _, fault) in enumerate(rows):
            if fault is not None:
                raise ConfigError(f"rank {rank}: {fault}")
        check_options({rank: options for rank, (options, _, _) in enumerate(rows)})
        seen = {birth: Found(*one) for birth, (_, one, _) in zip(births, rows, strict=True) if one is not None}
        self._check(seen, births)
        if seen:
            self._told = next(iter(seen.values())), min(seen)
        return tuple(birth for birth in births if birth in seen)

    def _check(self, seen: dict[int, Found], births: Births) -> None:
        """Check that all ranks see the same checkpoint."""
        if self._checkpoint is None:
            return
        name, other = self._checkpoint.name, {one: birth for birth, one in reversed(seen.items())}
        if len(other) > 1:
            steps = ", ".join(f"of step {one.number} on rank {births.index(birth)}" for one, birth in other.items())
            raise ConfigError(f"checkpoint {name!r} is not the same file on all ranks: it is one {steps}; keep one")
        if seen:
            return
        if self._told is not None:
            found, birth = self._told
            raise ConfigError(
                f"rank {birth} is lost, which saw checkpoint {name!r} of step {found.number}, and no other rank sees"
                " it: start the job again, with a path that leads to the same file on all hosts"
            )
        first = self._births[0]
        if first not in births and self._hosts[first] not in {self._hosts[one] for one in births}:
            raise ConfigError(
                f"rank {first} was lost before it reported whether it sees a checkpoint {name!r}, and no rank is left "
                "on its host that could: start the job again"
            )

    async def _find(self) -> tuple[Found | None, str | None]:
        """This rank's view of the checkpoint, and its fault."""
        try:
            return (None if self._checkpoint is None else await self._checkpoint.find()), None
        except ConfigError as error:
            return None, str(error)

    async def _read(self) -> tuple[Place, str | None]:
        """The place of the checkpoint, whose state is taken over; and what is wrong with it."""
        if self._checkpoint is None:
            return Place(), None
        try:
            told = await self._checkpoint.read()
            if told is None:
                return Place(), f"checkpoint {self._checkpoint.name!r} was removed while it was read"
            return Place.of(told)._replace(lineage=[*self._checkpoint.lineage, secrets.token_hex(8)]), None
        except ConfigError as error:
            return Place(), str(error)
        except (TypeError, ValueError):
            return Place(), f"{self._checkpoint.name} has no position from which an Elastic can resume"

    def _begun(self, told: Any) -> Place:
        place = Place.of(told)
        if self._checkpoint is not None:
            self._checkpoint.lineage = place.lineage
        return place
