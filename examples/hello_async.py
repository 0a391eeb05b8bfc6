"""The asynchronous interface in one page.

::

    kfcomm run -n 4 python examples/hello_async.py
"""

from __future__ import annotations

import asyncio

import numpy as np

import kfcomm


async def main() -> None:
    """Join the world that this process was started in, and meet the others in it."""
    async with kfcomm.init() as comm:
        x = np.full(3, comm.rank + 1, dtype=np.float32)

        # One collective: every rank gets the sum.
        total = await comm.all_reduce(x, name="total")
        print(f"rank {comm.rank} of {comm.size}: total {total}")

        # Two at once. Names bring together what belongs together: the odd ranks post them the other way round.
        names = ["low", "high"] if comm.rank % 2 == 0 else ["high", "low"]
        ops = {"low": "min", "high": "max"}
        under_way = {name: comm.all_reduce(x, name=name, op=ops[name]) for name in names}
        low, high = await under_way["low"], await under_way["high"]
        print(f"rank {comm.rank} of {comm.size}: low {low[0]:g}, high {high[0]:g}")

        # Python objects travel too, as msgpack.
        everybody = await comm.all_gather_object({"rank": comm.rank, "is_even": comm.rank % 2 == 0})

        # From here on data travels along a ring. All ranks say so; nothing under way is lost.
        before = comm.strategy.name
        await comm.set_strategy("ring")
        again = await comm.all_reduce(x, name="total")
        if comm.rank == 0:
            print(f"even ranks: {[one['rank'] for one in everybody if one['is_even']]}")
            print(f"strategy {before} -> {comm.strategy.name}: the same total? {np.array_equal(total, again)}")


if __name__ == "__main__":
    asyncio.run(main())
