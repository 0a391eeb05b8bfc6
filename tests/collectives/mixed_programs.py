"""Programs of calls of many kinds, which each rank makes in an order of its own, and a look at what they gave."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np

from kfcomm.errors import CollectiveAborted
from tests.conformance.worlds import turns


class MixedProgram:
    """Calls of one rank: as many of each name as on the others, in an order of its own."""

    def __init__(self, seed: int, size: int, most_uses: int = 12) -> None:
        shared = random.Random(seed)
        kinds = ["sum", "sum", "joined", "many", "list", "persistent", "own", "barrier", "anonymous"]
        self.names = [(f"{number}/{shared.choice(kinds)}", shared.randint(1, most_uses)) for number in range(8)]
        self.lengths = {name: shared.choice([1, 7, 300, 9000]) for name, _ in self.names}
        self.cancels = {(name, seq) for name, uses in self.names for seq in range(uses) if shared.random() < 0.05}
        self.size = size

    def x(self, rank: int, name: str, seq: int) -> Any:
        random_of = np.random.default_rng([rank, seq, len(name), int(name.split("/")[0])])
        return random_of.standard_normal(self.lengths[name]).astype(np.float32)

    def call(self, comm: Any, name: str, seq: int, kept: dict[str, Any]) -> Any:
        x, kind = self.x(comm.rank, name, seq), name.split("/")[1]
        match kind:
            case "joined":
                return comm.all_gather(x[: comm.rank + 1], name, concat=True)
            case "many":
                return comm.all_reduce_many({"a": x, "b": x[:1]}, name)
            case "list":
                return comm.all_gather([x, x[:1]], name)
            case "persistent":
                if name not in kept:
                    kept[name] = x, comm.all_reduce_init(x, name)
                kept[name][0][:] = x
                return kept[name][1].start()
            case "own":
                return comm.all_reduce(x, name, strategy="ring")
            case "barrier":
                return comm.barrier(name)
        return comm.all_reduce(x, name, priority=seq % 3)

    async def run(self, comm: Any, mine: random.Random) -> dict[tuple[str, int], Any]:
        left = dict(self.names)
        done: dict[tuple[str, int], Any] = {}
        kept: dict[str, Any] = {}

        async def uses(name: str, count: int) -> None:
            for seq in range(count):
                await turns(mine.randrange(8))
                handle = self.call(comm, name, seq, kept)
                if (name, seq) in self.cancels and comm.rank == seq % self.size:
                    await turns(mine.randrange(3))
                    handle.cancel()
                try:
                    done[name, seq] = await handle
                except (CollectiveAborted, asyncio.CancelledError):
                    done[name, seq] = "cancelled"
                    await turns()  # the parts of a call of several end in the turn after it

        order = list(left.items())
        mine.shuffle(order)
        await asyncio.gather(*(uses(*one) for one in order))
        return done

    def check(self, results: list[dict[tuple[str, int], Any]]) -> None:
        """Each use has the same bits on all ranks, near what they should be, or was cancelled everywhere."""
        for key in results[0]:
            name, seq = key
            of_ranks = [one[key] for one in results]
            if any(isinstance(one, str) for one in of_ranks):
                assert key in self.cancels, key
                continue
            assert len({_flat(one) for one in of_ranks}) == 1, key
            if name.endswith(("sum", "own", "persistent", "anonymous")):
                want = sum(self.x(rank, name, seq).astype(np.float64) for rank in range(self.size))
                assert np.allclose(of_ranks[0], want, rtol=1e-4, atol=1e-4), key


def _flat(value: Any) -> bytes:
    match value:
        case dict():
            return b"".join(_flat(one) for _, one in sorted(value.items()))
        case list() | tuple():
            return b"".join(map(_flat, value))
        case None:
            return b""
    return bytes(np.asarray(value).tobytes())
