"""The tensors of models, as numbers of elements, from their architectures."""

from __future__ import annotations

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""Width and number of the bottleneck blocks in each stage of ResNet-50."""
EXPANSION = 4
CLASSES = 1000


def resnet50() -> list[int]:
    """The 214 gradients of ResNet-50 with biases (25,583,592 parameters), in the order of a backward pass.

    Every convolution has a bias and is followed by a batch normalisation with scale and shift, as in Keras' model;
    the running statistics are no parameters. Source: He et al., "Deep Residual Learning for Image Recognition", 2015,
    table 1.
    """
    sizes = convolution(7, 3, 64)
    width = 64
    for inner, blocks in STAGES:
        outer = inner * EXPANSION
        for block in range(blocks):
            sizes += convolution(1, width, inner) + convolution(3, inner, inner) + convolution(1, inner, outer)
            if block == 0:
                sizes += convolution(1, width, outer)
            width = outer
    sizes += [width * CLASSES, CLASSES]
    return sizes[::-1]


def convolution(kernel: int, inputs: int, outputs: int) -> list[int]:
    """Weights and bias of a square convolution, then scale and shift of its batch normalisation."""
    return [kernel * kernel * inputs * outputs, outputs, outputs, outputs]
