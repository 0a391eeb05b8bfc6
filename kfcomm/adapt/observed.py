"""What a program observes in its steps, and the columns by which the ranks tell each other.

A name gets a column on all ranks when one of them has observed it for the first time, by one more exchange.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kfcomm.adapt.metrics import Table
from kfcomm.adapt.place import Place
from kfcomm.common.arguments import plain_text
from kfcomm.errors import ConfigError

MAX_OBSERVED = 64
"""Names, on one rank: each is a number in every meeting."""
MAX_NAME = 100
"""Characters."""


class Observed:
    """Those of one rank since the ranks last met.

    Attributes:
        columns: the names that all ranks know, the same on all of them.
    """

    def __init__(self) -> None:
        self.columns: tuple[str, ...] = ()
        self._values: dict[str, float] = {}
        self._names: set[str] = set()

    def observe(self, values: Mapping[str, float]) -> None:
        """Of one name the last value counts.

        Raises:
            ConfigError: something is no number, or there are too many names.
        """
        for name, value in values.items():
            number = _number(name, value)
            if len(name) > MAX_NAME or len(self._names | {name}) > MAX_OBSERVED:
                raise ConfigError(f"a rank observes up to {MAX_OBSERVED} names of {MAX_NAME} characters: {name!r:.120}")
            self._names.add(plain_text(name))
            self._values[plain_text(name)] = number

    def take(self) -> dict[str, float]:
        """What was observed; from now on nothing is."""
        taken, self._values = self._values, {}
        return taken

    def row(self, values: Mapping[str, float]) -> list[float]:
        """A rank's numbers, by column."""
        return [values.get(name, math.nan) for name in self.columns]

    def has_new(self, values: Mapping[str, float]) -> bool:
        """Whether some have no column."""
        return not values.keys() <= set(self.columns)

    async def shared(self, table: Table, mine: Mapping[str, float], place: Place) -> dict[str, tuple[float, ...]]:
        """What all ranks have observed, by name and by rank. If some of it is new, they tell each other the names."""
        found = {name: tuple(table.observed[:, at].tolist()) for at, name in enumerate(self.columns)}
        if table.has_news:
            new = {name: value for name, value in mine.items() if name not in self.columns}
            said: Sequence[Mapping[str, float]] = await place.tell(new, "observed")
            names = sorted({name for one in said for name in one})
            if len(said) == place.size:  # else a rank is lost, and this step comes to nothing
                found |= {name: tuple(one.get(name, math.nan) for one in said) for name in names}
            self.columns = (*self.columns, *names)
        return found


def _number(name: str, value: Any) -> float:
    """A number, or an array of one."""
    try:
        return float(value.item() if hasattr(value, "item") else value + 0.0)
    except (TypeError, ValueError):
        raise ConfigError(f"what is observed is a number: {name} is {value!r:.60}") from None
