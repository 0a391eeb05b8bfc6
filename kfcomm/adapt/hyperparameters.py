"""Hyperparameters of a training that policies may change, and their valid values. Pure.

A program declares with ``Hyperparameters`` which of them it follows, and reads their values at each step. Requests for
others are refused: they would be decided and logged, and never take effect.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Self

from kfcomm.common.arguments import plain_text
from kfcomm.errors import ConfigError

SIGNIFICANT_DIGITS = 9
"""Digits of a learning rate: ranks whose mathematical libraries differ in the last bit ask for the same."""


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

    Raises:
        ConfigError: a value is not valid.
    """

    batch_size: int | None = None
    learning_rate: float | None = None
    agreement: str | None = None
    agreements: tuple[str, ...] = ()
    wire_dtype: str | None = None
    wire_dtypes: tuple[str, ...] = ()

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

    def checked(self, name: str, value: Any, size: int) -> Any:
        """Check a value that a policy asks for; returns it in the form in which it takes effect.

        Args:
            name: name of the attribute.
            value: its new value.
            size: number of ranks, among which a batch is divided.

        Raises:
            ConfigError: the value is not valid, or the program does not follow the attribute.
        """
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
        return replace(self, **{name: value})

    def as_json(self) -> dict[str, Any]:
        """Encode them for JSON and msgpack."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Decode the result of ``as_json``.

        Raises:
            ConfigError: the names differ.
        """
        names = {field.name for field in fields(cls)}
        if set(record) != names:
            raise ConfigError(f"hyperparameters have {', '.join(sorted(names))}, not {', '.join(sorted(record))}")
        values: dict[str, Any] = dict(record)
        for several in ("agreements", "wire_dtypes"):
            values[several] = tuple(values[several])
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
