"""Hyperparameters of a training that policies may change, and their valid values. Pure.

A program declares with ``Hyperparameters`` which of them it follows, and reads their values at each step. Requests for
others are refused: they would be decided and logged, and never take effect.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, Self

import numpy as np

from kfcomm.common.arguments import plain_text, whole_number
from kfcomm.errors import ConfigError

SIGNIFICANT_DIGITS = 9
"""Digits of a learning rate: ranks whose mathematical libraries differ in the last bit ask for the same."""


NAMES = ("batch_size", "learning_rate", "agreement", "wire_dtype")
RESERVED = (*NAMES, "strategy", "size", "stop")
"""Subjects of requests, which no free hyperparameter can have as its name."""


@dataclass(frozen=True, slots=True)
class Free:
    """Hyperparameter of the program's own: momentum, alpha, steps between exchanges, rank of a compression.

    Attributes:
        value: a number, bool or text.
        low: smallest number; None for any.
        high: largest number; None for any.
        choices: valid values; required for text.
        integer: whether it is a whole number; None: as ``value`` is one.

    Raises:
        ConfigError: on use in `Hyperparameters`: the value is not one of those.
    """

    value: Any
    low: float | None = None
    high: float | None = None
    choices: tuple[Any, ...] = ()
    integer: bool | None = None

    def checked(self, name: str, value: Any) -> Any:
        """Check another value; returns it in the form in which it takes effect.

        Raises:
            ConfigError: it has another type, or is out of bounds.
        """
        if self.choices:
            if value not in self.choices:
                raise ConfigError(f"{name} is one of {', '.join(map(str, self.choices))}, not {value!r}")
            return next(one for one in self.choices if one == value)
        if isinstance(self.value, (bool, np.bool_)):
            if not isinstance(value, (bool, np.bool_)):
                raise ConfigError(f"{name} is True or False, not {value!r}")
            return bool(value)
        number = whole_number(value) if self.is_integer else _finite(value)
        low, high = -math.inf if self.low is None else self.low, math.inf if self.high is None else self.high
        if number is None or not low <= number <= high:
            what = "a whole number" if self.is_integer else "a finite number"
            bounds = "" if self.low is self.high is None else f" from {low:g} to {high:g}"
            raise ConfigError(f"{name} is {what}{bounds}, not {value!r}")
        return number if self.is_integer else float(f"{number:.{SIGNIFICANT_DIGITS}g}")

    @property
    def is_integer(self) -> bool:
        """Whether it is a whole number."""
        return whole_number(self.value) is not None if self.integer is None else self.integer

    def as_json(self) -> list[Any]:
        """Encode it for JSON and msgpack: its fields."""
        return [self.value, self.low, self.high, list(self.choices), self.integer]


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Hyperparameters of a step, the same on every rank. The program does not follow those that are left out.

    Attributes:
        batch_size: number of samples of one step, of all ranks together.
        learning_rate: finite, not negative.
        agreement: name of the algorithm by which the replicas agree; the first of ``agreements``, if left out.
        agreements: names that the program knows.
        wire_dtype: dtype of gradients on the wire; None for their own.
        wire_dtypes: dtypes that the program knows.
        free: other hyperparameters by name, such as ``{"momentum": Free(0.9, low=0.0, high=0.999)}``; a plain value
            is a `Free` without bounds.

    Raises:
        ConfigError: a value is not valid.
    """

    batch_size: int | None = None
    learning_rate: float | None = None
    agreement: str | None = None
    agreements: tuple[str, ...] = ()
    wire_dtype: str | None = None
    wire_dtypes: tuple[str, ...] = ()
    free: Mapping[str, Free] = field(default_factory=dict, hash=False, repr=False)

    def __post_init__(self) -> None:
        for several in ("agreements", "wire_dtypes"):
            names = getattr(self, several)
            if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
                raise ConfigError(f"{several} are names, not {names!r}")
            object.__setattr__(self, several, tuple(map(plain_text, names)))
        if self.batch_size is not None:
            object.__setattr__(self, "batch_size", _batch_size(self.batch_size))
        if self.learning_rate is not None:
            object.__setattr__(self, "learning_rate", _learning_rate(self.learning_rate))
        if self.agreement is None and self.agreements:
            object.__setattr__(self, "agreement", self.agreements[0])
        if self.agreement is not None:
            object.__setattr__(self, "agreement", _one_of("agreement", self.agreement, self.agreements))
        if self.wire_dtype is not None:
            object.__setattr__(self, "wire_dtype", _one_of("wire dtype", self.wire_dtype, self.wire_dtypes))
        object.__setattr__(self, "free", {_free_name(name): _free(name, one) for name, one in self.free.items()})

    def value(self, name: str) -> Any:
        """Return the value of a hyperparameter, of one of the fields or a free one.

        Raises:
            ConfigError: the name is unknown.
        """
        if name in NAMES:
            return getattr(self, name)
        if name not in self.free:
            raise ConfigError(_unknown(name, [*NAMES, *self.free]))
        return self.free[name].value

    def checked(self, name: str, value: Any, size: int) -> Any:
        """Check a value that a policy asks for; returns it in the form in which it takes effect.

        Args:
            name: name of the attribute.
            value: its new value.
            size: number of ranks, among which a batch is divided.

        Raises:
            ConfigError: the value is not valid, or the program does not follow the attribute.
        """
        if name in self.free:
            return self.free[name].checked(name, value)
        if name not in NAMES:
            raise ConfigError(_unknown(name, [*NAMES, *self.free]))
        self._check_followed(name)
        match name:
            case "batch_size":
                return _dividing(_batch_size(value), size)
            case "learning_rate":
                return float(f"{_learning_rate(value):.{SIGNIFICANT_DIGITS}g}")
            case "agreement":
                return _one_of("agreement", value, self.agreements)
            case _:
                return value if value is None else _one_of("wire dtype", value, self.wire_dtypes)

    def having(self, name: str, value: Any) -> Self:
        """Return a copy with another value of one of them."""
        if name in self.free:
            return replace(self, free={**self.free, name: replace(self.free[name], value=value)})
        return replace(self, **{name: value})

    def as_json(self) -> dict[str, Any]:
        """Encode them for JSON and msgpack."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        values["free"] = {name: one.as_json() for name, one in self.free.items()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Decode the result of ``as_json``.

        Raises:
            ConfigError: the names differ.
        """
        names = {one.name for one in fields(cls)}
        if {*record, "free"} != names:  # a record from before there were free ones has none
            raise ConfigError(f"hyperparameters have {', '.join(sorted(names))}, not {', '.join(sorted(record))}")
        values: dict[str, Any] = dict(record)
        for several in ("agreements", "wire_dtypes"):
            values[several] = tuple(values[several])
        values["free"] = {name: Free(*one) for name, one in values.get("free", {}).items()}
        return cls(**values)

    def _check_followed(self, name: str) -> None:
        is_followed = {
            "batch_size": self.batch_size is not None,
            "learning_rate": self.learning_rate is not None,
            "agreement": bool(self.agreements),
            "wire_dtype": bool(self.wire_dtypes),
        }[name]
        if not is_followed:
            given = f"{name}s" if name in ("agreement", "wire_dtype") else name
            raise ConfigError(
                f"the program follows no {in_words(name)}: it says that it does by "
                f"Adaptation(..., hyperparameters=Hyperparameters({given}=...))"
            )


def in_words(name: str) -> str:
    """Name of a hyperparameter for messages."""
    return name.replace("_", " ")


def _free_name(name: Any) -> str:
    if not isinstance(name, str) or not name.isidentifier() or name in RESERVED:
        raise ConfigError(f"the name of a free hyperparameter is a Python name, and not {name!r}")
    return plain_text(name)


def _free(name: str, given: Any) -> Free:
    one = given if isinstance(given, Free) else Free(given)
    if isinstance(one.value, str) and not one.choices:
        raise ConfigError(f"{name} is text, so it needs its choices: Free({one.value!r}, choices=(...))")
    one = replace(one, choices=tuple(one.choices))
    return replace(one, value=one.checked(name, one.value))


def _finite(value: Any) -> float | None:
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _unknown(name: Any, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=1) if isinstance(name, str) else []
    hint = f" (did you mean {near[0]}?)" if near else ""
    return (
        f"the program follows no {name!r}{hint}: it gives such values by "
        f"Adaptation(..., hyperparameters=Hyperparameters(free={{{name!r}: Free(...)}}))"
    )


def _batch_size(value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if isinstance(value, bool) or number < 1:
        raise ConfigError(f"a batch size is a whole number of samples, at least 1, not {value!r}")
    return number


def _dividing(batch_size: int, size: int) -> int:
    if batch_size % size:
        below, above = batch_size // size * size, (batch_size // size + 1) * size
        either = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(f"a batch of {batch_size} does not divide among {size} ranks; {either} would")
    return batch_size


def _learning_rate(value: Any) -> float:
    try:
        rate = float(value)
    except (TypeError, ValueError):
        rate = math.nan
    if isinstance(value, (bool, str)) or not math.isfinite(rate) or rate < 0:
        raise ConfigError(f"a learning rate is a finite number, not negative, and not {value!r}")
    return rate


def _one_of(what: str, value: Any, candidates: tuple[str, ...]) -> str:
    if value in candidates:
        return plain_text(value)
    near = get_close_matches(value, candidates, n=1) if isinstance(value, str) else []
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"the program knows no {what} {value!r}; {hint}it knows {', '.join(candidates) or 'none'}")
