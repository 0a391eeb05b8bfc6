"""Gradient shapes of three published models, as data-parallel training reduces them in one step.

The lists are generated from the architectures, in the order of the forward pass, one shape for each trainable
tensor. Each is one set of gradients. Imports nothing but the standard library.

========= ======= =========== ==================================================================================
name      tensors parameters  source
========= ======= =========== ==================================================================================
resnet50  214     25,583,592  He et al. 2015, arXiv:1512.03385, table 1: every convolution with a bias and a
                              batch normalisation (scale and shift), which is how the first published models and
                              Keras have it
vgg16     32      138,357,544 Simonyan and Zisserman 2014, arXiv:1409.1556, configuration D
bert-base 199     109,482,240 Devlin et al. 2018, arXiv:1810.04805: the encoder with its embeddings and pooler,
                              "110M"; no heads of the pre-training tasks
========= ======= =========== ==================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

Shape = tuple[int, ...]

_IMAGENET_CLASSES = 1000


def resnet50() -> tuple[Shape, ...]:
    """The 214 tensors of ResNet-50: 53 convolutions with bias and batch normalisation, and one dense layer."""
    return (*_resnet_layers((3, 4, 6, 3)), (2048, _IMAGENET_CLASSES), (_IMAGENET_CLASSES,))


def vgg16() -> tuple[Shape, ...]:
    """The 32 tensors of VGG-16: 13 convolutions and 3 dense layers, each with a bias."""
    return tuple(_vgg_layers())


def bert_base() -> tuple[Shape, ...]:
    """The 199 tensors of BERT-base, uncased: 5 of the embeddings, 16 of each of 12 layers, 2 of the pooler."""
    return tuple(_bert_layers())


WORKLOADS: Final[dict[str, Callable[[], tuple[Shape, ...]]]] = {
    "resnet50": resnet50,
    "vgg16": vgg16,
    "bert-base": bert_base,
}


def num_parameters(shapes: tuple[Shape, ...]) -> int:
    """Elements of all tensors together."""
    return sum(map(math.prod, shapes))


def _resnet_layers(blocks: tuple[int, ...]) -> Iterator[Shape]:
    yield from _normalised_convolution(7, 3, 64)
    inputs = 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for block in range(count):
            if block == 0:  # the shortcut is projected to the stage's width
                yield from _normalised_convolution(1, inputs, 4 * width)
            yield from _normalised_convolution(1, inputs, width)
            yield from _normalised_convolution(3, width, width)
            yield from _normalised_convolution(1, width, 4 * width)
            inputs = 4 * width


def _normalised_convolution(kernel: int, inputs: int, outputs: int) -> Iterator[Shape]:
    """Weights and bias, then scale and shift."""
    yield from ((kernel, kernel, inputs, outputs), (outputs,), (outputs,), (outputs,))


def _vgg_layers() -> Iterator[Shape]:
    inputs = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            yield from ((3, 3, inputs, width), (width,))
            inputs = width
    # five poolings by two leave 7 × 7 of 224 × 224
    yield from _dense(7 * 7 * inputs, 4096)
    yield from _dense(4096, 4096)
    yield from _dense(4096, _IMAGENET_CLASSES)


def _bert_layers() -> Iterator[Shape]:
    hidden, inner = 768, 3072
    norm = ((hidden,), (hidden,))
    yield from ((30522, hidden), (512, hidden), (2, hidden), *norm)  # vocabulary, positions, segments
    for _ in range(12):
        for _ in ("query", "key", "value", "output"):
            yield from _dense(hidden, hidden)
        yield from norm
        yield from _dense(hidden, inner)
        yield from _dense(inner, hidden)
        yield from norm
    yield from _dense(hidden, hidden)


def _dense(inputs: int, outputs: int) -> Iterator[Shape]:
    yield from ((inputs, outputs), (outputs,))
