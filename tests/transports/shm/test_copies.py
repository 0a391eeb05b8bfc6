"""Memory traffic of a long all_reduce, in bytes for each rank: figures without noise.

A copy counts what it reads and what it writes, a fold what it reads and its result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kfcomm import testing
from kfcomm.transports.shm import slots as shm_slots
from kfcomm.transports.shm.parted import PartedSlot
from kfcomm.world.communicator import Communicator

RANKS = 4
COUNT = 3 << 20
"""Of float32: several windows."""
WARM = 4
"""Uses until all is read where it is, if it can be."""

Array = np.ndarray[Any, np.dtype[Any]]

BUDGETS = {
    "ordinary arrays": 4.75,  # what the others fold is shown, the own part folded, the result copied
    "what is given in symmetric memory": 3.25,  # nothing is shown
    "both": 2.75,  # the own part is folded where the result is
    "shared result": 2.75,  # what the others fold is shown, the own part folded where all see it
    "shared result of what is in symmetric memory": 1.25,
}
"""In sizes of the message, of each of four ranks."""

SLACK = 1.01


class Counted(np.ndarray[Any, np.dtype[Any]]):
    """An array that counts what is copied to it."""

    nbytes_moved = 0

    def __setitem__(self, where: Any, value: Any) -> None:
        Counted.nbytes_moved += 2 * self[where].nbytes
        super().__setitem__(where, value)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """All slots count what they copy and fold."""
    init, look = PartedSlot.__init__, PartedSlot.look
    own_array = shm_slots.SlotMemory.own_array

    def made(self: PartedSlot, *args: Any) -> None:
        init(self, *args)
        combine = self.combine

        def fold(given: Any, out: Array) -> None:
            Counted.nbytes_moved += sum(one.nbytes for one in given) + out.nbytes
            combine(given, out.view(np.ndarray))

        self.combine = fold

    monkeypatch.setattr(PartedSlot, "__init__", made)
    views: dict[int, Counted] = {}

    def looked(self: PartedSlot, word: int, out: Array) -> bool:
        return look(self, word, views.setdefault(id(out), out.view(Counted)))  # it is asked whether it is the same

    monkeypatch.setattr(PartedSlot, "look", looked)
    monkeypatch.setattr(shm_slots.SlotMemory, "own_array", lambda *args: own_array(*args).view(Counted))


def call_of(kind: str, comm: Communicator) -> Callable[[], Any]:
    """One all_reduce of a rank."""
    x = comm.empty(COUNT) if "symmetric" in kind or kind == "both" else np.empty(COUNT, np.float32)
    x[:] = 1
    if kind.startswith("shared"):
        return lambda: comm.all_reduce(x, "x", shared=True)
    out = comm.empty(COUNT) if kind == "both" else np.empty(COUNT, np.float32)
    return lambda: comm.all_reduce(x, "x", out=out)


@pytest.mark.asyncio
@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("kind", BUDGETS)
async def test_no_more_is_moved_than_was(kind: str) -> None:
    async def main() -> int:
        async with testing.world(RANKS, transport="shm", strategy="direct") as comms:
            calls = [call_of(kind, comm) for comm in comms]
            for _ in range(WARM + 1):
                Counted.nbytes_moved = 0
                for handle in [call() for call in calls]:
                    assert (await handle)[-1] == RANKS
            return Counted.nbytes_moved

    moved = await main() / RANKS / (4 * COUNT)
    assert BUDGETS[kind] / SLACK <= moved <= BUDGETS[kind] * SLACK
