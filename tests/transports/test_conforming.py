"""The suite of all backends, over the fake."""

from __future__ import annotations

import pytest

from kfcomm.testing import FakeDevice, FakeFabric
from kfcomm.types import Verb
from tests.transports import conforming

pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")


@pytest.mark.parametrize("verb", conforming.REDUCING + conforming.MOVING)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_verbs(size: int, verb: Verb) -> None:
    fabric = FakeFabric()
    devices = [FakeDevice(rank) for rank in range(size)]
    cases = conforming.supported(fabric, verb)
    with conforming.group(fabric, devices) as ranks:
        for name, op in cases:
            conforming.check(ranks, verb, name, op)
    assert len(cases) >= 15
    assert fabric.violations == []
    assert fabric.num_open == 0
    assert [device.violations for device in devices] == [[]] * size
    assert [device.num_waiting for device in devices] == [0] * size
