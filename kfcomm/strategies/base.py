"""Strategies: graph pairs that share the bytes of a collective among them.

Owns the two kinds of strategy and the ways to make one by hand. A `Strategy` is a non-empty tuple of graph
pairs of one size; a `SizedStrategy` picks one of several by the size of the message. Both are immutable
values with a digest that depends on their graphs, shares and bounds, never on their names: ranks compare digests to
know that they speak of the same graphs. Knows neither layouts nor costs nor what travels along the graphs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Final

from kfcomm.core.exchange import Exchange
from kfcomm.core.graph import Graph, GraphPair
from kfcomm.core.signature import SHOWN_WHOLE_NBYTES
from kfcomm.errors import ConfigError

DIRECT_NBYTES: Final = 1 << 20
"""The longest message for which a direct strategy has no part for each rank where no memory is shared."""
MAX_CHUNK_NBYTES: Final = 1 << 24
"""The largest chunk that a strategy may ask for: partial results may be wider, and links refuse 64 MiB and more."""
MAX_SHARES: Final = 1 << 24
"""The shares of a strategy add up to no more: keys are spread over the pairs by 32 bits."""


class Direct(IntEnum):
    """How messages go if no memory is shared; their bits are the same."""

    NOT = 0
    """As all others: the strategy is not direct."""
    ONE_STEP = 1
    """Each to every rank."""
    STAR = 2
    """Up and down the first pair."""
    CHAINS = 3
    """Shared out among the pairs, which are those of `chain_star`."""
    DISSEMINATION = 4
    """Passed on in ⌈log₂n⌉ steps; longer messages up and down the first pair."""


@dataclass(frozen=True)
class Strategy:
    """Graph pairs over the same ranks; each carries its share of a message, by default an equal part.

    Attributes:
        name: for people; not part of the digest.
        pairs: at least one, all of one size.
        is_whole: no message is shared out: an all_reduce goes whole along one of the pairs, which its key picks. Else
            only those of few elements do (``core.chunk.WHOLE_BELOW``).
        shares: how much of a message each pair carries, relative to the others; of the messages that go whole, how
            many. In lowest terms; empty for equal parts.
        direct: how ranks make the result of an all_reduce from all contributions; see `builtin.direct`.
        for_long: replaces a direct strategy for messages of more than `DIRECT_NBYTES`, if given.
        exchange: if given, an all_reduce takes its steps unless it goes whole; other verbs go along the pairs.
        chunk_nbytes: how much of a part travels at once, in bytes; 0: by `kfcomm.strategies.chunks`.

    Raises:
        ConfigError: no pair, pairs or an exchange of different sizes, shares that are not one positive integer for each
            pair or add up to more than `MAX_SHARES`, or chunks that are not of 0 to `MAX_CHUNK_NBYTES` bytes.
    """

    name: str
    pairs: tuple[GraphPair, ...]
    is_whole: bool = False
    shares: tuple[int, ...] = ()
    direct: Direct = Direct.NOT
    for_long: Strategy | None = None
    chunk_nbytes: int = 0
    exchange: Exchange | None = None

    def __post_init__(self) -> None:
        if not self.pairs:
            raise ConfigError(f"strategy {self.name!r} has no graph pair")
        if type(self.chunk_nbytes) is not int or not 0 <= self.chunk_nbytes <= MAX_CHUNK_NBYTES:
            raise ConfigError(
                f"strategy {self.name!r} has chunks of {self.chunk_nbytes!r} bytes: expected 1 to {MAX_CHUNK_NBYTES}, "
                "or 0 for the size that its graphs and the network suggest"
            )
        exchanges = () if self.exchange is None else (self.exchange,)
        sizes = sorted({one.size for one in (*self.pairs, *exchanges)})
        if len(sizes) > 1:
            raise ConfigError(f"strategy {self.name!r} mixes graphs of sizes {sizes}")
        object.__setattr__(self, "shares", self._checked_shares())

    def _checked_shares(self) -> tuple[int, ...]:
        """The shares in lowest terms."""
        shares = tuple(self.shares)
        if not shares:
            return ()
        if len(shares) != len(self.pairs):
            raise ConfigError(
                f"strategy {self.name!r} needs one share for each of its {len(self.pairs)} graph pairs, "
                f"got {len(shares)}"
            )
        for pair, share in enumerate(shares):
            if type(share) is not int or share < 1:
                raise ConfigError(f"strategy {self.name!r} gives pair {pair} a share of {share!r}, not an integer > 0")
        common = math.gcd(*shares)
        if sum(shares) // common > MAX_SHARES:
            raise ConfigError(f"the shares of strategy {self.name!r} add up to more than {MAX_SHARES}")
        # One form for equal parts, so that strategies that do the same have the same digest.
        return () if min(shares) == max(shares) else tuple(share // common for share in shares)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.pairs[0].size

    def select(self, nbytes: int) -> Strategy:
        """The strategy for a message of ``nbytes`` bytes: this one, or that ``for_long`` messages."""
        return self.for_long if self.for_long is not None and nbytes > DIRECT_NBYTES else self

    @property
    def goes_whole(self) -> bool:
        """Whether every rank gets the whole contribution of every other."""
        return self.direct in (Direct.ONE_STEP, Direct.STAR, Direct.DISSEMINATION)

    def sends_at_once(self, nbytes: int) -> bool:
        """Whether ranks send contributions of ``nbytes`` bytes to all others, and each folds them by itself."""
        return self.direct in (Direct.ONE_STEP, Direct.DISSEMINATION) and nbytes <= SHOWN_WHOLE_NBYTES

    @property
    def pairs_of_direct(self) -> tuple[GraphPair, ...]:
        """Along which the messages of a direct strategy go, in more steps than one."""
        return self.pairs if self.direct is Direct.CHAINS else self.pairs[:1]

    def rooted(self, root: int) -> GraphPair:
        """The pair to use for a verb with a root: the first that has it, else the first pair rerooted.

        Raises:
            ConfigError: ``root`` is out of range.
        """
        pair = self._by_root.get(root)
        if pair is None:
            pair = self._by_root[root] = self._rerooted(root)
        return pair

    def _rerooted(self, root: int) -> GraphPair:
        if not 0 <= root < self.size:
            raise ConfigError(f"root {root} is outside 0..{self.size - 1}")
        first = self.pairs[0]
        if first.reduce is first.broadcast:
            return GraphPair.of(first.reduce.rerooted(root))
        return GraphPair(first.reduce.rerooted(root), first.broadcast.rerooted(root))

    @cached_property
    def _by_root(self) -> dict[int, GraphPair]:
        # Reversed, so that the first pair of a root is the one that stays.
        return {pair.root: pair for pair in reversed(self.pairs)}

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that differ if any graph, the order of the pairs, shares, chunks, or how messages go differs."""
        data = b"".join(pair.digest for pair in self.pairs)
        kind = (b"whole" if self.is_whole else b"") + (b" shares" if self.shares else b"")
        kind += b" direct%d" % self.direct if self.direct else b""
        data += b"" if self.for_long is None else self.for_long.digest
        data += b"" if self.exchange is None else self.exchange.digest
        shares = repr(self.shares).encode() if self.shares else b""
        shares += b" chunks of %d" % self.chunk_nbytes if self.chunk_nbytes else b""
        return hashlib.blake2b(data + shares, digest_size=16, person=kind).digest()


@dataclass(frozen=True)
class SizedStrategy:
    """Strategies by message size: the first rule whose bound is not exceeded holds.

    Attributes:
        name: for people; not part of the digest.
        rules: ``(largest nbytes, strategy)`` with ascending bounds; the last bound is None (no limit).

    Raises:
        ConfigError: no rule, bounds that do not ascend or do not end in None, or different sizes.
    """

    name: str
    rules: tuple[tuple[int | None, Strategy], ...]

    def __post_init__(self) -> None:
        bounds = [bound for bound, _ in self.rules if bound is not None]
        open_ended = [bound is None for bound, _ in self.rules]
        if open_ended != [False] * (len(self.rules) - 1) + [True]:
            raise ConfigError(f"strategy {self.name!r} needs exactly one rule without a bound, the last")
        if any(low >= high for low, high in zip(bounds, bounds[1:], strict=False)) or any(b < 0 for b in bounds):
            raise ConfigError(f"strategy {self.name!r} needs ascending bounds from 0, got {bounds}")
        sizes = sorted({strategy.size for _, strategy in self.rules})
        if len(sizes) > 1:
            raise ConfigError(f"strategy {self.name!r} mixes graphs of sizes {sizes}")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.rules[0][1].size

    def select(self, nbytes: int) -> Strategy:
        """The strategy for a message of ``nbytes`` bytes."""
        return next(strategy for bound, strategy in self.rules if bound is None or nbytes <= bound).select(nbytes)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that differ if any bound or graph differs."""
        text = repr([(bound, strategy.digest) for bound, strategy in self.rules]).encode()
        return hashlib.blake2b(text, digest_size=16).digest()


AnyStrategy = Strategy | SizedStrategy


def from_edges(size: int, edges: Iterable[tuple[int, int]], *, name: str = "custom") -> Strategy:
    """A strategy of one tree, used in both directions, from its ``(parent, child)`` edges.

    Contributions are folded in the order in which the edges name the children.

    Raises:
        ConfigError: the edges do not form a spanning tree of ``size`` ranks; the message says why.
    """
    try:
        tree = Graph.from_edges(size, edges)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"strategy {name!r}: {error}") from error
    return Strategy(name, (GraphPair.of(tree),))


def from_parents(parents: Sequence[int], *, name: str = "custom") -> Strategy:
    """A strategy of one tree, used in both directions; ``parents[r]`` is above ``r``, the root its own parent.

    Raises:
        ConfigError: the array does not describe a spanning tree; the message says why.
    """
    try:
        tree = Graph.from_parents(parents)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"strategy {name!r}: {error}") from error
    return Strategy(name, (GraphPair.of(tree),))
