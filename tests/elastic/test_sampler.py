"""One order for each pass, and each sample once, whichever samples were not used."""

from __future__ import annotations

from random import Random
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.elastic import ElasticSampler
from kfcomm.elastic.sampler import share
from kfcomm.errors import ConfigError


@given(st.integers(1, 200), st.integers(1, 50), st.integers(0, 1 << 40), st.integers(0, 1 << 31))
def test_each_sample_is_used_once_in_each_pass(length: int, batch: int, seed: int, chance: int) -> None:
    random, sampler = Random(chance), ElasticSampler(length, batch, seed)
    for number in range(3):
        used: list[int] = []
        while len(taken := sampler.take()):
            assert len(taken) == batch or (len(taken) < batch and not sampler.left)
            size = random.randrange(1, 6)
            shares = [share(taken, rank, size) for rank in range(size)]
            assert np.concatenate(shares).tolist() == taken.tolist()
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
            lost = random.randrange(size) if random.random() < 0.3 else -1
            for rank, one in enumerate(shares):
                if rank == lost:
                    sampler.give_back(one)
                else:
                    used += one.tolist()
            if random.random() < 0.2:  # another takes over
                copy = ElasticSampler(length, batch, seed)
                copy.load_state_dict(msgpack.unpackb(msgpack.packb(sampler.state_dict())))
                assert copy.state_dict() == sampler.state_dict()
                sampler = copy
        assert sorted(used) == list(range(length))
        assert sampler.passes == number
        sampler.end_pass()


def test_passes_have_orders_of_their_own_and_seeds_too() -> None:
    def order(seed: int | None, passes: int) -> list[int]:
        sampler = ElasticSampler(20, 20, seed)
        for _ in range(passes):
            sampler.end_pass()
        return list(map(int, sampler.take()))

    assert order(None, 0) == order(None, 3) == list(range(20))
    orders = [order(seed, passes) for seed in (0, 1, 1 << 32) for passes in (0, 1)]
    assert len({tuple(one) for one in orders}) == 6
    assert order(0, 0) == [12, 2, 19, 16, 8, 18, 10, 4, 6, 3, 9, 17, 0, 14, 1, 5, 11, 13, 7, 15]


@pytest.mark.parametrize(
    "given", [(0, 1, 0), (1, 0, 0), (1, 1, -1), (1.5, 1, 0), (True, 1, 0), (3, "2", 0), (3, 2, "x")]
)
def test_invalid_arguments_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="of a sampler is a whole number"):
        ElasticSampler(*given)


def test_another_samplers_state_is_refused() -> None:
    sampler = ElasticSampler(10, 2)
    assert repr(sampler) == "<ElasticSampler: pass 0, 0 of 10 given>"
    sampler.give_back(sampler.take())
    assert repr(sampler) == "<ElasticSampler: pass 0, 2 of 10 given, 2 to be given again>"
    for other in (ElasticSampler(11, 2), ElasticSampler(10, 3), ElasticSampler(10, 2, 7)):
        with pytest.raises(ConfigError, match="of this sampler is"):
            sampler.load_state_dict(other.state_dict())


def test_the_batch_may_be_set_and_goes_to_who_joins() -> None:
    sampler = ElasticSampler(10, 2, None)
    assert sampler.take().tolist() == [0, 1]
    sampler.batch = 3
    assert sampler.take().tolist() == [2, 3, 4]
    joined = ElasticSampler(10, 2, None)
    joined.load_state_dict(sampler.state_dict())
    assert joined.batch == 3
    assert joined.take().tolist() == [5, 6, 7]
    with pytest.raises(ConfigError, match="batch of a sampler is a whole number from 1 on, not 0"):
        sampler.batch = 0
    before = sampler.state_dict()
    del before["next_batch"]
    joined.load_state_dict(before)
    assert joined.batch == 2
