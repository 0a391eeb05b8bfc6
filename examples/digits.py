"""Train a multi-layer perceptron on handwritten digits with synchronous SGD over any number of processes.

::

    kfcomm run -n 4 python examples/digits.py     # four processes
    python examples/digits.py --memory 4          # four ranks in one process, the same bits
    python examples/digits.py                     # alone

Each rank computes gradients on its own shard of the data. A layer's gradients are all_reduced by name as soon as
they are known, while the backward pass of the layer before is still being computed. The computing is done in
threads (``asyncio.to_thread``), so that the event loop, on which kfcomm moves the bytes, is never kept waiting.

Two runs with the same seed, epochs and number of ranks print the same digest, over any kind of link.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, TypeAlias

import numpy as np

try:
    import threadpoolctl
    from sklearn.datasets import load_digits
    from tqdm import tqdm
except ModuleNotFoundError as error:
    raise SystemExit(f'this example needs {error.name}: pip install "kfcomm[demo]"') from None

import kfcomm
import kfcomm.testing

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

LAYER_SIZES = (64, 128, 64, 10)
NUM_TEST_IMAGES = 360
BATCH_SIZE = 64  # over all ranks
LEARNING_RATE = 0.1
MOMENTUM = 0.9
ACCURACY_WANTED = 0.95


@dataclass
class Parameter:
    """An array that is learned, under the name by which its gradients meet those of the other ranks."""

    name: str
    value: Array
    velocity: Array = field(init=False)

    def __post_init__(self) -> None:
        self.velocity = np.zeros_like(self.value)

    def descend(self, gradient: Array) -> None:
        """One step of SGD with momentum."""
        self.velocity = MOMENTUM * self.velocity - LEARNING_RATE * gradient
        self.value += self.velocity


class Layer:
    """A dense layer; all but the last one end in a ReLU."""

    def __init__(self, index: int, sizes: tuple[int, ...], random: np.random.Generator) -> None:
        inputs, outputs = sizes[index : index + 2]
        weight = random.normal(0, np.sqrt(2 / inputs), (inputs, outputs)).astype(np.float32)
        self.weight = Parameter(f"layer{index}/weight", weight)
        self.bias = Parameter(f"layer{index}/bias", np.zeros(outputs, np.float32))
        self.is_last = index == len(sizes) - 2

    def forward(self, x: Array) -> Array:
        """Output of the layer for a batch."""
        self.input = x
        self.output = x @ self.weight.value + self.bias.value
        return self.output if self.is_last else np.maximum(self.output, 0)

    def backward(self, gradient: Array) -> tuple[Array, list[tuple[Parameter, Array]]]:
        """From the gradient of the output, those of the input and of the parameters."""
        if not self.is_last:
            gradient = gradient * (self.output > 0)
        gradients = [(self.weight, self.input.T @ gradient), (self.bias, gradient.sum(axis=0))]
        return gradient @ self.weight.value.T, gradients


class Model:
    """Dense layers, and a softmax with cross-entropy loss on top."""

    def __init__(self, seed: int, sizes: tuple[int, ...] = LAYER_SIZES) -> None:
        random = np.random.default_rng(seed)
        self.layers = [Layer(index, sizes, random) for index in range(len(sizes) - 1)]

    def parameters(self) -> list[Parameter]:
        """Everything that is learned, in a fixed order."""
        return [parameter for layer in self.layers for parameter in (layer.weight, layer.bias)]

    def logits(self, images: Array) -> Array:
        """Scores of the ten digits for each image."""
        for layer in self.layers:
            images = layer.forward(images)
        return images

    def loss(self, images: Array, labels: Array) -> tuple[float, Array]:
        """Mean loss of a batch, and its gradient by the logits."""
        logits = self.logits(images)
        exp = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities = exp / exp.sum(axis=1, keepdims=True)
        rows = np.arange(len(labels))
        loss = -np.log(probabilities[rows, labels] + 1e-12).mean()
        probabilities[rows, labels] -= 1
        return float(loss), probabilities / np.float32(len(labels))


async def train_step(comm: kfcomm.Communicator, model: Model, images: Array, labels: Array) -> float:
    """One step of SGD over all ranks; returns this rank's loss."""
    loss, gradient = await asyncio.to_thread(model.loss, images, labels)
    travelling = []
    for layer in reversed(model.layers):
        gradient, gradients = await asyncio.to_thread(layer.backward, gradient)
        for parameter, mine in gradients:  # under way from here on: nobody waits for the result yet
            travelling.append((parameter, comm.all_reduce(mine, name=f"grad/{parameter.name}", op="avg", out=mine)))
    for parameter, averaged in travelling:
        parameter.descend(await averaged)
    return loss


async def train(comm: kfcomm.Communicator, options: argparse.Namespace) -> bool:
    """The whole life of one rank; returns whether the training was a success."""
    (images, labels), test_set = load_data(options.seed)
    shard = slice(comm.rank, len(images) // comm.size * comm.size, comm.size)
    images, labels = images[shard], labels[shard]

    model = Model(seed=options.seed + comm.rank)  # a different one on every rank, until the broadcast
    for parameter in model.parameters():
        await comm.broadcast(parameter.value, root=0, name=f"initial/{parameter.name}", out=parameter.value)

    batch = max(1, BATCH_SIZE // comm.size)
    steps = len(images) // batch
    losses = []
    random = np.random.default_rng([options.seed, comm.rank])
    bar = tqdm(total=options.epochs * steps, desc="training", unit="step", ncols=76, disable=comm.rank != 0)
    for epoch in range(options.epochs):
        if epoch == options.epochs // 2:
            before = comm.strategy.name
            await comm.set_strategy("ring")
            say(bar, f"strategy: {before} -> {comm.strategy.name}")
        loss = 0.0
        for chosen in random.permutation(len(images))[: steps * batch].reshape(steps, batch):
            loss += await train_step(comm, model, images[chosen], labels[chosen]) / steps
            bar.update()
        losses.append(float(await comm.all_reduce(loss, name="loss", op="avg")))
        say(bar, f"epoch {epoch + 1:2}: loss {losses[-1]:.4f}")
    bar.close()
    return await judge(comm, model, losses, *test_set)


async def judge(comm: kfcomm.Communicator, model: Model, losses: list[float], images: Array, labels: Array) -> bool:
    """Whether all replicas are the same, bit for bit, and good."""
    weights = np.concatenate([parameter.value.ravel() for parameter in model.parameters()])
    identical = bool(await comm.consensus(weights, name="replicas"))
    accuracy = float((model.logits(images).argmax(axis=1) == labels).mean())
    if comm.rank == 0:
        print(f"replicas: {'bit-identical' if identical else 'DIFFERENT'} on {comm.size} ranks")
        print(f"test accuracy: {accuracy:.4f} (wanted: at least {ACCURACY_WANTED})")
        digest = sha256(np.array(losses).tobytes() + weights.tobytes()).hexdigest()
        print(f"digest of losses and weights: {digest[:16]}")
    return identical and accuracy >= ACCURACY_WANTED


def load_data(seed: int) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Training and test set, each as images of 64 floats from 0 to 1, and labels."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(labels))
    test, rest = order[:NUM_TEST_IMAGES], order[NUM_TEST_IMAGES:]
    return (images[rest], labels[rest]), (images[test], labels[test])


def say(bar: Any, text: str) -> None:
    """Print a line above the progress bar, on the rank that has one."""
    if not bar.disable:
        bar.write(text)


async def main(options: argparse.Namespace) -> bool:
    """Join the world that this process was started in, or make one in memory."""
    if options.memory is not None:
        async with kfcomm.testing.world(options.memory) as comms:
            return all(await kfcomm.testing.run_ranks(comms, lambda comm: train(comm, options)))
    async with kfcomm.init() as comm:
        return await train(comm, options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", type=int, metavar="N", help="run N ranks in this one process")
    # Every rank has one core at best. More threads would fight for it, and BLAS may add in another order with them.
    with threadpoolctl.threadpool_limits(1):
        sys.exit(0 if asyncio.run(main(parser.parse_args())) else 1)
