"""The blocking interface in one page: the same verbs, for programs without an event loop.

::

    kfcomm run -n 4 python examples/hello_sync.py
"""

from __future__ import annotations

import numpy as np

import kfcomm


def main() -> None:
    """Join the world that this process was started in, and meet the others in it."""
    with kfcomm.sync.init() as comm:
        x = np.full(3, comm.rank + 1, dtype=np.float32)

        # One collective: every rank gets the sum.
        total = comm.all_reduce(x, name="total")
        print(f"rank {comm.rank} of {comm.size}: total {total}")

        # Two at once. Each is under way when the call returns; `wait` is for the moment the result is needed.
        names = ["low", "high"] if comm.rank % 2 == 0 else ["high", "low"]
        ops = {"low": "min", "high": "max"}
        under_way = {name: comm.all_reduce_async(x, name=name, op=ops[name]) for name in names}
        low, high = under_way["low"].wait(), under_way["high"].wait()
        print(f"rank {comm.rank} of {comm.size}: low {low[0]:g}, high {high[0]:g}")

        # From rank to rank, in a circle.
        if comm.size > 1:
            sent = comm.send_async(x, to=(comm.rank + 1) % comm.size)
            got = comm.recv(source=(comm.rank - 1) % comm.size)
            sent.wait()
            print(f"rank {comm.rank} of {comm.size}: my neighbour sent {got}")


if __name__ == "__main__":
    main()
