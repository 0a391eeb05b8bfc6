"""Valid hyperparameters, and valid requests for them."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from kfcomm.adapt import Hyperparameters
from kfcomm.errors import ConfigError

ALL = Hyperparameters(
    batch_size=256, learning_rate=0.1, agreements=("sma", "ssgd"), wire_dtypes=("bfloat16", "float16")
)


def test_initial_values() -> None:
    assert (ALL.batch_size, ALL.learning_rate, ALL.agreement, ALL.wire_dtype) == (256, 0.1, "sma", None)
    assert Hyperparameters(agreement="ssgd", agreements=("sma", "ssgd")).agreement == "ssgd"
    assert Hyperparameters().agreement is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"batch_size": 0}, "a batch size is a whole number of samples, at least 1, not 0"),
        ({"batch_size": True}, "a batch size is a whole number"),
        ({"batch_size": 2.5}, "a batch size is a whole number"),
        ({"learning_rate": math.nan}, "a learning rate is a finite number, not negative, and not nan"),
        ({"learning_rate": -1}, "a learning rate is a finite number"),
        ({"learning_rate": "1"}, "a learning rate is a finite number"),
        ({"learning_rate": [1]}, "a learning rate is a finite number"),
        ({"agreements": "sma"}, "agreements are names, not 'sma'"),
        ({"wire_dtypes": ("bfloat16", 3)}, "wire_dtypes are names"),
        ({"agreement": "sma"}, "the program knows no agreement 'sma'; it knows none"),
        ({"wire_dtype": "float16", "wire_dtypes": ("bfloat16",)}, "did you mean bfloat16"),
    ],
)
def test_invalid_values_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Hyperparameters(**given)


@pytest.mark.parametrize(
    ("name", "value", "held"),
    [
        ("batch_size", 12, 12),
        ("batch_size", np.int64(8), 8),
        ("learning_rate", 0, 0.0),
        ("learning_rate", 0.1 * math.sqrt(2), 0.141421356),
        ("learning_rate", np.float32(0.5), 0.5),
        ("agreement", "ssgd", "ssgd"),
        ("wire_dtype", "float16", "float16"),
        ("wire_dtype", None, None),
    ],
)
def test_valid_requests(name: str, value: Any, held: Any) -> None:
    checked = ALL.checked(name, value, 4)
    assert checked == held
    assert type(checked) is type(held)
    changed = ALL.having(name, checked)
    assert getattr(changed, name) == held
    assert changed.having(name, getattr(ALL, name)) == ALL


def test_ranks_whose_libraries_differ_in_the_last_bit_ask_for_the_same() -> None:
    rate = 0.1 * math.sqrt(3)
    assert ALL.checked("learning_rate", rate, 4) == ALL.checked("learning_rate", math.nextafter(rate, 1), 4)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("batch_size", 250, "a batch of 250 does not divide among 4 ranks; 248 or 252 would"),
        ("batch_size", 3, "a batch of 3 does not divide among 4 ranks; 4 would"),
        ("batch_size", -4, "a batch size is a whole number of samples, at least 1, not -4"),
        ("batch_size", "4", "a batch size is a whole number of samples"),
        ("learning_rate", math.inf, "a learning rate is a finite number, not negative, and not inf"),
        ("agreement", "smaa", "the program knows no agreement 'smaa'; did you mean sma"),
        ("agreement", None, "the program knows no agreement None; it knows sma, ssgd"),
        ("wire_dtype", "int8", "the program knows no wire dtype 'int8'; it knows bfloat16, float16"),
    ],
)
def test_invalid_requests_are_refused(name: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ALL.checked(name, value, 4)


@pytest.mark.parametrize(
    ("name", "value", "given"),
    [
        ("batch_size", 8, "batch_size"),
        ("learning_rate", 0.1, "learning_rate"),
        ("agreement", "sma", "agreements"),
        ("wire_dtype", None, "wire_dtypes"),
    ],
)
def test_requests_for_unfollowed_hyperparameters_are_refused(name: str, value: Any, given: str) -> None:
    says = rf"the program follows no {name.replace('_', ' ')}: .*hyperparameters=Hyperparameters\({given}=\.\.\.\)"
    with pytest.raises(ConfigError, match=says):
        Hyperparameters().checked(name, value, 4)


def test_as_json_and_back() -> None:
    assert Hyperparameters.from_json(json.loads(json.dumps(ALL.as_json()))) == ALL
    with pytest.raises(ConfigError, match=r"hyperparameters have agreement, .* not batch_size"):
        Hyperparameters.from_json({"batch_size": 3})
