"""Two kinds of groups over the same ranks: one shares a weight matrix, the other shares the data.

::

    kfcomm run -n 4 python examples/two_groups.py

The ranks form a grid. Those of a row hold parts of one weight matrix (tensor parallel): their partial products
add up to the prediction. Those of a column hold the same part and see different data (data parallel): their
gradients are averaged. Each group is a communicator with names of its own.
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

import kfcomm

NUM_INPUTS, NUM_OUTPUTS = 12, 3
SAMPLES_PER_ROW = 64
STEPS = 200
LEARNING_RATE = 0.1


async def main() -> bool:
    """Learn a known matrix; returns whether it was found."""
    async with kfcomm.init() as comm:
        width = 2 if comm.size % 2 == 0 else 1
        row, column = divmod(comm.rank, width)
        tensor = await comm.group(range(row * width, (row + 1) * width), name="tensor")
        data = await comm.group(range(column, comm.size, width), name="data")

        truth = np.random.default_rng(0).normal(size=(NUM_INPUTS, NUM_OUTPUTS))
        x = np.random.default_rng(1 + row).normal(size=(SAMPLES_PER_ROW, NUM_INPUTS))  # the same along a row
        y = x @ truth
        mine = np.array_split(x, width, axis=1)[column]
        weight = np.zeros((mine.shape[1], NUM_OUTPUTS))

        for _ in range(STEPS):
            prediction = await tensor.all_reduce(mine @ weight, name="prediction")
            gradient = mine.T @ (prediction - y) / len(y)
            weight -= LEARNING_RATE * await data.all_reduce(gradient, name="gradient", op="avg")

        whole = await tensor.all_gather(weight, name="weight", concat=True)
        error = float(np.abs(whole - truth).max())
        same = bool(await comm.consensus(whole, name="replicas"))
        if comm.rank == 0:
            print(f"a grid of {data.size} x {tensor.size} ranks; each holds {len(weight)} of {NUM_INPUTS} weight rows")
            print(f"largest error {error:.1e}; {'bit-identical' if same else 'DIFFERENT'} on {comm.size} ranks")
        return same and error < 1e-3


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main()) else 1)
