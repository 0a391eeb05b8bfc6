"""Timed steps: a strategy and a size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from kfcomm.common.sizes import parse_sizes, show_size
from kfcomm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Step:
    """One all_reduce of float32.

    Attributes:
        strategy: a name, or ``module:function`` (see ``worker``).
        nbytes: of the array.
    """

    strategy: str
    nbytes: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """The step in ``ring:32MiB``.

        Raises:
            ConfigError: it is not a step.
        """
        strategy, colon, size = text.rpartition(":")
        nbytes = parse_sizes(size) if colon and strategy else ()
        if len(nbytes) != 1 or nbytes[0] % 4:
            raise ConfigError(f"step {text!r}: a step is like ring:32MiB, of whole numbers of four bytes")
        return cls(strategy, nbytes[0])

    def __str__(self) -> str:
        return f"{self.strategy}:{show_size(self.nbytes).replace(' ', '')}"


def rounds(strategies: Sequence[str], sizes: Sequence[int], count: int) -> list[Step]:
    """Every case once in each of ``count`` rounds; the strategies take turns at beginning, the sizes stand together."""
    order: list[Step] = []
    for number in range(count):
        first = number % len(strategies)
        turns = [*strategies[first:], *strategies[:first]]
        order += [Step(strategy, nbytes) for nbytes in sizes for strategy in turns]
    return order


def bound_s(size: int, nbytes: int, rate: float) -> float:
    """Seconds that any all_reduce takes at least where each rank has a link of ``rate`` bits per second.

    2(n−1)/n · S/B (Patarasuk and Yuan, 2009): what a rank must send, and receive, over its own link.
    """
    return 2 * (size - 1) / size * nbytes * 8 / rate
