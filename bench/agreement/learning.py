"""Task: handwritten digits, and a harder set made from them, for a perceptron with one hidden layer.

Pure: everything follows from a seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from sklearn.datasets import load_digits

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Model: TypeAlias = dict[str, Array]

NUM_TRAINED = 1437
HIDDEN = 64
COPIES, NOISE = 4, 0.25
"""Of the harder set: each image so many times, moved by a pixel at most in both directions, with so much noise."""


@dataclass(frozen=True)
class Data:
    """Images of 64 numbers from about 0 to 1, and digits.

    Attributes:
        x, y: to learn from.
        test_x, test_y: to be tried on.
    """

    x: Array
    y: Array
    test_x: Array
    test_y: Array


def digits(seed: int, *, is_hard: bool) -> Data:
    """The digits in an order of the seed's; of the harder set no image that is tried is a copy of one learned from."""
    random = np.random.default_rng(seed)
    loaded = load_digits()
    order = random.permutation(len(loaded.target))
    images, labels = (loaded.images[order] / 16).astype(np.float32), loaded.target[order]
    parts = [(images[:NUM_TRAINED], labels[:NUM_TRAINED]), (images[NUM_TRAINED:], labels[NUM_TRAINED:])]
    if is_hard:
        parts = [_harder(x, y, random) for x, y in parts]
    (x, y), (test_x, test_y) = parts
    return Data(x.reshape(-1, 64), y, test_x.reshape(-1, 64), test_y)


def _harder(images: Array, labels: Array, random: np.random.Generator) -> tuple[Array, Array]:
    moved = [np.roll(one, tuple(random.integers(-1, 2, 2)), (0, 1)) for _ in range(COPIES) for one in images]
    noise = NOISE * random.standard_normal((len(moved), 8, 8))
    return (np.stack(moved) + noise).astype(np.float32), np.tile(labels, COPIES)


def beginning(seed: int, hidden: int = HIDDEN) -> Model:
    """The model before the first step."""
    random = np.random.default_rng(seed)
    return {
        "w1": random.normal(0, (2 / 64) ** 0.5, (64, hidden)).astype(np.float32),
        "b1": np.zeros(hidden, np.float32),
        "w2": random.normal(0, (2 / hidden) ** 0.5, (hidden, 10)).astype(np.float32),
        "b2": np.zeros(10, np.float32),
    }


def gradient(model: Model, x: Array, y: Array) -> Model:
    """Of the mean cross entropy."""
    hidden = np.maximum(x @ model["w1"] + model["b1"], 0)
    logits = hidden @ model["w2"] + model["b2"]
    error = np.exp(logits - logits.max(axis=1, keepdims=True))
    error /= error.sum(axis=1, keepdims=True)
    error[np.arange(len(y)), y] -= 1
    error /= len(y)
    back = (error @ model["w2"].T) * (hidden > 0)
    return {"w1": x.T @ back, "b1": back.sum(axis=0), "w2": hidden.T @ error, "b2": error.sum(axis=0)}


def accuracy(model: Model, data: Data) -> float:
    """The part of the images to be tried that is recognized."""
    hidden = np.maximum(data.test_x @ model["w1"] + model["b1"], 0)
    return float((np.argmax(hidden @ model["w2"] + model["b2"], axis=1) == data.test_y).mean())
