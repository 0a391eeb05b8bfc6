"""A pipeline of two stages with two replicas each, on the schedule 1F1B; the losses are those of one process.

::

    kfcomm run -n 4 python examples/pipeline.py
    python examples/pipeline.py --ray                  # four workers of Ray on this host

Ranks 0 and 1 hold the first layer, ranks 2 and 3 the second. Activations and gradients of each micro-batch travel by
messages with its number as their tag, between the stages of one replica; at the end of a step, each stage averages its
gradients over its group of replicas. 1F1B (DAPPLE, arXiv:2007.01045; PipeDream, arXiv:1806.03377): after a stage has
sent as many micro-batches as there are stages behind it, it alternates one forward and one backward, so that no stage
keeps more activations than there are stages from it on.
"""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import numpy as np

import kfcomm

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

NUM_STAGES = NUM_REPLICAS = 2
NUM_BATCHES = 4  # micro-batches of a replica in each step
SAMPLES = 16  # of a micro-batch
WIDTHS = (8, 32, 4)  # inputs, hidden, outputs
STEPS = 50
LEARNING_RATE = 0.2


class Stage:
    """One layer: it keeps the input and output of each micro-batch until its backward."""

    def __init__(self, number: int) -> None:
        shape = WIDTHS[number : number + 2]
        self.weight = np.random.default_rng(number).normal(size=shape) / np.sqrt(shape[0])
        self.is_last = number == NUM_STAGES - 1
        self.gradient = np.zeros(shape)
        self.kept: dict[int, tuple[Array, Array]] = {}

    def forward(self, batch: int, x: Array) -> Array:
        """Output for a micro-batch."""
        y = x @ self.weight if self.is_last else np.tanh(x @ self.weight)
        self.kept[batch] = x, y
        return y

    def backward(self, batch: int, of_output: Array) -> Array:
        """Gradient of the input; that of the weight is added up."""
        x, y = self.kept.pop(batch)
        inner = of_output if self.is_last else of_output * (1 - y * y)
        self.gradient += x.T @ inner
        return inner @ self.weight.T

    def step(self, gradient: Array) -> None:
        """Apply the gradient of all replicas."""
        self.weight -= LEARNING_RATE / NUM_REPLICAS / NUM_BATCHES * gradient
        self.gradient = np.zeros_like(self.gradient)


def data_of(step: int, replica: int, batch: int) -> tuple[Array, Array]:
    """Inputs and targets of a micro-batch."""
    x = np.random.default_rng((step % 5, replica, batch)).normal(size=(SAMPLES, WIDTHS[0]))
    return x, np.sin(x[:, : WIDTHS[2]])


def loss_of(y: Array, target: Array) -> tuple[float, Array]:
    """Squared error, and its gradient."""
    off = y - target
    return float((off * off).mean()), 2 * off / off.size


class Rank:
    """One replica of one stage, and its messages to the same replica of the other stages."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.number, self.replica = divmod(comm.rank, NUM_REPLICAS)
        self.stage = Stage(self.number)
        self.before, self.behind = comm.rank - NUM_REPLICAS, comm.rank + NUM_REPLICAS
        members = range(self.number * NUM_REPLICAS, (self.number + 1) * NUM_REPLICAS)
        self.replicas = comm.group(members, name=f"stage {self.number}")
        self.loss = 0.0
        self.sent: list[Any] = []
        self.of_loss: dict[int, Array] = {}

    def forward(self, step: int, batch: int) -> None:
        """Receive or load a micro-batch, and pass it on; the last stage computes its loss."""
        x, target = data_of(step, self.replica, batch)
        y = self.stage.forward(batch, self.comm.recv(self.before, tag=f"forward {batch}") if self.number else x)
        if self.stage.is_last:
            loss, self.of_loss[batch] = loss_of(y, target)
            self.loss += loss
        else:
            self.sent.append(self.comm.send_async(y, self.behind, tag=f"forward {batch}"))

    def backward(self, batch: int) -> None:
        """Pass the gradient of a micro-batch back."""
        is_last = self.stage.is_last
        gradient = self.of_loss.pop(batch) if is_last else self.comm.recv(self.behind, tag=f"backward {batch}")
        of_input = self.stage.backward(batch, gradient)
        if self.number:
            self.sent.append(self.comm.send_async(of_input, self.before, tag=f"backward {batch}"))

    def step(self, step: int) -> float:
        """One step on the schedule 1F1B; returns the loss, which only the last stage knows."""
        ahead = NUM_STAGES - 1 - self.number
        for batch in range(ahead):
            self.forward(step, batch)
        for batch in range(NUM_BATCHES):
            if batch + ahead < NUM_BATCHES:
                self.forward(step, batch + ahead)
            self.backward(batch)
        for handle in self.sent:
            handle.result()
        self.sent.clear()
        self.stage.step(self.replicas.all_reduce(self.stage.gradient, name="gradient"))
        mine, self.loss = self.loss, 0.0
        return float(self.replicas.all_reduce(np.array([mine]), name="loss")[0])


def train(comm: Any) -> list[float]:
    """Life of one rank; returns the losses, summed over the micro-batches of each step."""
    rank = Rank(comm)
    losses = np.array([rank.step(number) for number in range(STEPS)])
    return [float(one) for one in comm.broadcast(losses, comm.size - 1, name="losses")]


def in_one_process() -> list[float]:
    """Losses of the same steps without a pipeline."""
    stages, losses = [Stage(number) for number in range(NUM_STAGES)], []
    for step in range(STEPS):
        gradients, of_replicas = [], []
        for replica in range(NUM_REPLICAS):
            loss = 0.0
            for batch in range(NUM_BATCHES):
                y, target = data_of(step, replica, batch)
                for stage in stages:
                    y = stage.forward(batch, y)
                mine, gradient = loss_of(y, target)
                loss += mine
                for stage in reversed(stages):
                    gradient = stage.backward(batch, gradient)
            of_replicas.append(loss)
            gradients.append([stage.gradient for stage in stages])
            for stage in stages:
                stage.gradient = np.zeros_like(stage.gradient)
        for stage, *each in zip(stages, *gradients, strict=True):
            stage.step(sum(each[1:], each[0]))
        losses.append(sum(of_replicas))
    return losses


def told(losses: list[float]) -> bool:
    """Print the losses beside those of one process; return whether they are equal."""
    is_same = losses == in_one_process()
    first, last = (one / NUM_REPLICAS / NUM_BATCHES for one in (losses[0], losses[-1]))
    print(f"loss {first:.3f} at first, {last:.3f} in the end; of one process: {'equal' if is_same else 'DIFFERENT'}")
    return is_same


def on_ray() -> bool:
    """Four workers of Ray."""
    import ray

    import kfcomm.ray

    ray.init(num_cpus=4, include_dashboard=False)
    return told(kfcomm.ray.run(train, num_workers=NUM_STAGES * NUM_REPLICAS)[0])


def main() -> bool:
    """One rank of ``kfcomm run``."""
    with kfcomm.sync.init() as comm:
        if comm.size != NUM_STAGES * NUM_REPLICAS:
            raise SystemExit(f"this example is for {NUM_STAGES * NUM_REPLICAS} ranks: kfcomm run -n 4")
        losses = train(comm)
        return told(losses) if comm.rank == 0 else True


if __name__ == "__main__":
    sys.exit(0 if (on_ray() if "--ray" in sys.argv else main()) else 1)
