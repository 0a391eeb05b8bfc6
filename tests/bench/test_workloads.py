"""The gradients of the published models: how many tensors, how many parameters, and some shapes known by heart."""

from __future__ import annotations

from collections import Counter

import pytest

from kfcomm.bench.workloads import WORKLOADS, num_parameters


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [("resnet50", 214, 25_583_592), ("vgg16", 32, 138_357_544), ("bert-base", 199, 109_482_240)],
)
def test_tensors_and_parameters_are_as_published(name: str, tensors: int, parameters: int) -> None:
    shapes = WORKLOADS[name]()
    assert (len(shapes), num_parameters(shapes)) == (tensors, parameters)


def test_resnet50_has_the_convolutions_of_its_table() -> None:
    kernels = Counter(shape[0] for shape in WORKLOADS["resnet50"]() if len(shape) == 4)
    assert kernels == {7: 1, 3: 16, 1: 36}


def test_vgg16_has_most_of_its_parameters_in_one_layer() -> None:
    assert max(WORKLOADS["vgg16"](), key=lambda shape: num_parameters((shape,))) == (25088, 4096)


def test_bert_base_has_twelve_layers_alike() -> None:
    shapes = WORKLOADS["bert-base"]()
    assert shapes[:3] == ((30522, 768), (512, 768), (2, 768))
    assert {shapes[5 + 16 * layer : 21 + 16 * layer] for layer in range(12)} == {shapes[5:21]}
