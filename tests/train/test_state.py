"""State of algorithms: a run that is saved and loaded in the middle is the run that was not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest

from kfcomm.errors import ConfigError
from kfcomm.train import Agreement, Algorithm, leaves, mapped
from tests.train.scripted import Alone, raw, together

KINDS: dict[str, Algorithm] = {
    "ssgd": Algorithm("ssgd"),
    "sma": Algorithm("sma", alpha=0.2),
    "ea-sgd": Algorithm("ea-sgd", alpha=0.1, every=3),
    "local-sgd": Algorithm("local-sgd", every=4),
    "diloco": Algorithm("diloco", every=3),
    "local-adaalter": Algorithm("local-adaalter", every=4),
    "adasgd": Algorithm("adasgd", after=5),
}
SIZE = 3


def first_model() -> Any:
    return {"layer": (np.linspace(-1, 1, 6).reshape(2, 3), [np.zeros(())]), "bias": np.ones(2)}


def step(ways: list[Agreement], models: list[Any], number: int) -> list[Any]:
    random = np.random.default_rng(number)
    given = [mapped(lambda x: 0.3 * (x - random.standard_normal(np.shape(x))), one) for one in models]
    found = together([raw(way.gradients)(one) for way, one in zip(ways, given, strict=True)])
    moved = together([raw(way.parameters)(one) for way, one in zip(ways, models, strict=True)])
    return [mapped(lambda x, g: x - g, one, gradient) for one, gradient in zip(moved, found, strict=True)]


def made(algorithm: Algorithm) -> list[Agreement]:
    return [algorithm.made(Alone(rank, SIZE), first_model()) for rank in range(SIZE)]


def sent(tree: Any) -> Any:
    """A copy by way of bytes, as ranks get it."""
    if isinstance(tree, dict):
        return {key: sent(one) for key, one in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(sent, tree))
    return (
        tree.copy()
        if isinstance(tree, np.ndarray)
        else msgpack.unpackb(msgpack.packb(tree))
        if not isinstance(tree, np.generic)
        else np.array(tree)
    )


@pytest.mark.parametrize("at", [1, 2, 4, 6, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_algorithm_continues_as_the_original(kind: str, at: int) -> None:
    ways, models = made(KINDS[kind]), [first_model() for _ in range(SIZE)]
    for number in range(at):
        models = step(ways, models, number)
    later = made(KINDS[kind])
    for way, former in zip(later, ways, strict=True):
        way.load_state_dict(sent(former.state_dict()))
    copies = models
    for number in range(at, 12):
        models, copies = step(ways, models, number), step(later, copies, number)
        for one, other in zip(models, copies, strict=True):
            for name, x in leaves(one).items():
                assert np.array_equal(x, leaves(other)[name]), (name, number)


@pytest.mark.parametrize("kind", KINDS)
def test_state_of_another_algorithm_is_refused(kind: str) -> None:
    way = made(KINDS[kind])[0]
    state = way.state_dict() | {"other": 1}
    with pytest.raises(ConfigError, match=r"the state of \w+\(.*\) has .*num_steps.* the given one .*other"):
        way.load_state_dict(state)


def test_state_of_another_model_is_refused_and_nothing_is_loaded() -> None:
    way = Algorithm("diloco", every=2).made(Alone(0, 2), {"w": np.zeros(3)})
    other = Algorithm("diloco", every=2).made(Alone(0, 2), {"w": np.zeros((3, 1))})
    renamed = Algorithm("diloco", every=2).made(Alone(0, 2), {"v": np.zeros(3)})
    with pytest.raises(ConfigError, match=r"array 'w': expected float64 \(3,\), got float64 \(3, 1\)"):
        way.load_state_dict(other.state_dict() | {"num_steps": 7})
    with pytest.raises(ConfigError, match="arrays of one side only: v, w"):
        way.load_state_dict(renamed.state_dict() | {"num_steps": 7})
    assert way.num_steps == 0


def test_loaded_state_is_a_copy() -> None:
    one, other = (Algorithm("ea-sgd", alpha=0.1).made(Alone(0, 2), {"w": np.zeros(3)}) for _ in range(2))
    state = one.state_dict()
    other.load_state_dict(state)
    state["center"]["w"] += 1
    assert not np.any(other.state_dict()["center"]["w"])


MAKERS: dict[str, Callable[[], Algorithm]] = {
    "sma": lambda: Algorithm("sma", alpah=0.1),
    "local-sgd": lambda: Algorithm("local-sgd"),
    "smaa": lambda: Algorithm("smaa"),
    "adasum": lambda: Algorithm("adasum", op="avg"),
    "3": lambda: Algorithm(3),  # type: ignore[arg-type]
}
SAYS = {
    "sma": "'sma': got an unexpected keyword argument 'alpah'",
    "local-sgd": "'local-sgd': missing a required argument: 'every'",
    "smaa": "known are ssgd, adasum, .*did you mean 'sma'",
    "adasum": "'adasum' is one with a fixed op",
    "3": "expected the name of an algorithm, a class or a function, got 3",
}


@pytest.mark.parametrize("given", MAKERS)
def test_algorithm_that_cannot_be_made_is_refused_at_once(given: str) -> None:
    with pytest.raises(ConfigError, match=SAYS[given]):
        MAKERS[given]()
