"""Fractional packing of trees of hosts by a linear program, with trees of bounded fan-in found one after the other.

Maximize the sum of the trees' weights, such that no port and no link has more than a second of work for each second:
the reciprocal of the sum is the time of a byte. There are too many trees to list them. The program begins with a few;
its dual prices say what a second of each port and link is worth, and the tree that is cheapest at these prices, if it
costs less than it brings, is the next (column generation). The optimum has at most as many trees as there are ports and
links.

Everything is sums, products and quotients of floats in a fixed order, so that all ranks get the same trees to the last
bit, whatever libraries they have.

Sources: P. Gilmore and R. Gomory, "A linear programming approach to the cutting-stock problem" (1961), for column
generation; G. Dantzig and W. Orchard-Hays, "The product form for the inverse in the simplex method" (1954).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from kfcomm.strategies.paths import uplink_ports
from kfcomm.types import Rates

Place: TypeAlias = tuple[int, ...]
"""A port, ``(0, host)`` out and ``(1, host)`` in, a link, ``(2, from, to)``, or a rack's uplink, ``(4, rack)`` out and
``(5, rack)`` in."""

MAX_HOSTS: Final = 16
"""Above it the program takes seconds."""
_MOST_ROUNDS: Final = 60
_MOST_EXCHANGES: Final = 400
"""Of columns of the basis, in all: then the best so far is taken."""
_ENOUGH: Final = 1e-3
"""What the next tree has to save of a second, so that it is worth another round."""
_GAIN: Final = 1e-9
_ZERO: Final = 1e-12


class Tree(NamedTuple):
    """A tree of hosts: who is above whom on the way up, and on the way down."""

    root: int
    up: tuple[int, ...]
    down: tuple[int, ...]

    def sends(self) -> Iterator[tuple[int, int]]:
        """``(from, to)`` of every message."""
        for host in range(len(self.up)):
            if host != self.root:
                yield host, self.up[host]
                yield self.down[host], host


def loads_of(tree: Tree, rates: Rates) -> dict[Place, float]:
    """Seconds per byte on every port and link, if the tree carries everything."""
    loads: dict[Place, float] = {}
    racks = rates.rack_of
    for a, b in tree.sends():
        ends = ((0, a), 1 / rates.send[a]), ((1, b), 1 / rates.receive[b]), ((2, a, b), 1 / rates.links[a][b])
        for place, load in (*ends, *uplink_ports(rates, racks[a], racks[b])):
            loads[place] = loads.get(place, 0.0) + load
    return loads


def packed_with_fans(rates: Rates, fan: int, enough_s: float = 0.0) -> list[tuple[Tree, float]]:
    """Trees in which no host has more than ``fan`` hosts below it, and their weights, which add up to 1.

    The search ends when a byte takes no more than ``enough_s`` seconds. Cost: up to 0.1 s for 8 hosts.
    """
    hosts = range(len(rates.send))
    places: list[Place] = [(way, host) for way in (0, 1) for host in hosts]
    # A link that is no slower than the ports at its ends is never the narrowest place.
    racks = rates.rack_of
    places += [(2, a, b) for a in hosts for b in hosts if a != b and _is_slow(rates, racks, a, b)]
    places += [(way, rack) for rack in range(len(rates.uplinks)) for way in (4, 5)]
    unit = min(*rates.send, *rates.receive)  # bytes: so that loads are about 1, whatever the rates
    program = _Program(len(places))
    trees: list[Tree] = []
    known: set[Tree] = set()

    def add(tree: Tree) -> None:
        known.add(tree)
        trees.append(tree)
        loads = loads_of(tree, rates)
        program.add([unit * loads.get(place, 0.0) for place in places])

    firsts = dict.fromkeys(_cheapest(root, rates, fan, dict.fromkeys(places, 1.0)) for root in hosts)
    for tree in sorted(firsts, key=lambda tree: max(loads_of(tree, rates).values())):
        add(tree)
    for _ in range(_MOST_ROUNDS):
        prices = dict(zip(places, program.solve(), strict=True))
        priced = [_cheapest(root, rates, fan, prices) for root in hosts]
        costs = [
            unit * sum(prices.get(place, 0.0) * load for place, load in loads_of(tree, rates).items())
            for tree in priced
        ]
        cheapest = costs.index(min(costs))
        is_enough = sum(program.weights().values()) * enough_s >= unit
        if is_enough or costs[cheapest] > 1 - _ENOUGH or priced[cheapest] in known:
            break
        add(priced[cheapest])
    weights = program.weights()
    total = sum(weights.values())
    return [(trees[column], weight / total) for column, weight in sorted(weights.items())]


def _is_slow(rates: Rates, racks: Sequence[int | None], a: int, b: int) -> bool:
    narrowest_s = max(s for _, s in uplink_ports(rates, racks[a], racks[b])) if racks[a] != racks[b] else 0.0
    return 1 / rates.links[a][b] > max(1 / rates.send[a], 1 / rates.receive[b], narrowest_s)


def _cheapest(root: int, rates: Rates, fan: int, prices: Mapping[Place, float]) -> Tree:
    """A tree that costs little at these prices of a second on each place; places without a price are free.

    Hosts whose place below is cheap for others come first, so that they are above others. Each is put below the host
    where it costs least, of equals the one nearest to the root. Without links that cost something that is the best.
    """

    def price(place: Place) -> float:
        return prices.get(place, 0.0)

    racks = rates.rack_of

    def cost(a: int, b: int) -> float:
        ends = price((0, a)) / rates.send[a] + price((1, b)) / rates.receive[b]
        between = sum(price(place) * load for place, load in uplink_ports(rates, racks[a], racks[b]))
        return ends + price((2, a, b)) / rates.links[a][b] + between

    def grown(cost_above: Callable[[int], float], edge: Callable[[int, int], float]) -> tuple[int, ...]:
        parents, depth, below = [root] * len(rates.send), {root: 0}, {root: 0}
        order = sorted((host for host in range(len(rates.send)) if host != root), key=lambda host: cost_above(host))
        for host in order:
            free = [above for above in depth if below[above] < fan]
            above = min(free, key=lambda above: (round(edge(host, above), 18), depth[above], below[above], above))
            parents[host] = above
            below[above] += 1
            depth[host], below[host] = depth[above] + 1, 0
        return tuple(parents)

    up = grown(lambda host: (price((1, host)) + _ZERO) / rates.receive[host], cost)
    down = grown(lambda host: (price((0, host)) + _ZERO) / rates.send[host], lambda host, above: cost(above, host))
    return Tree(root, up, down)


class _Program:
    """Maximize the sum of weights, with each row's sum of weight times load at most 1: revised simplex method.

    Loads are at least 0, and each column has one above. The basis begins with the slack of each row.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._columns: list[list[float]] = []
        self._basis = [-1] * rows  # the column of each row; -1 for a slack
        self._values = [1.0] * rows
        self._exchanges = 0
        self._inverse = [[float(a == b) for b in range(rows)] for a in range(rows)]

    def add(self, loads: Sequence[float]) -> None:
        """One more column."""
        self._columns.append(list(loads))

    def solve(self) -> list[float]:
        """Find the best weights; return the price of each row."""
        while (prices := self._prices()) and self._exchanges < _MOST_EXCHANGES:
            # The first of those that bring most: so the choice is the same everywhere.
            gains = [1 - _dot(prices, column) for column in self._columns]
            best, way_in = max(((gain, -at) for at, gain in enumerate(gains)), default=(0.0, 0))
            low = min(prices)
            if best > _GAIN:
                has_entered = self._enter(self._columns[-way_in], -way_in)
            elif low < -_ZERO:
                # A price below 0 means that a slack has to come back.
                row = prices.index(low)
                has_entered = self._enter([float(at == row) for at in range(self._rows)], -1)
            else:
                break
            if not has_entered:
                break
        return prices

    def weights(self) -> Mapping[int, float]:
        """Weight of each column that has one."""
        return {at: value for at, value in zip(self._basis, self._values, strict=True) if at >= 0 and value > _ZERO}

    def _prices(self) -> list[float]:
        used = [row for at, row in zip(self._basis, self._inverse, strict=True) if at >= 0]
        return [sum(column) for column in zip(*used, strict=True)] if used else [0.0] * self._rows

    def _enter(self, loads: Sequence[float], column: int) -> bool:
        """Exchange a column of the basis for this one; False if none bounds it."""
        step = [_dot(row, loads) for row in self._inverse]
        ratios = [(value / s, at) for at, (value, s) in enumerate(zip(self._values, step, strict=True)) if s > _ZERO]
        if not ratios:
            return False
        least, out = min(ratios)
        pivot = [entry / step[out] for entry in self._inverse[out]]
        self._values = [value - least * s for value, s in zip(self._values, step, strict=True)]
        self._values[out] = least
        for at, s in enumerate(step):
            if at != out and s:
                self._inverse[at] = [a - s * b for a, b in zip(self._inverse[at], pivot, strict=True)]
        self._inverse[out] = pivot
        self._basis[out] = column
        self._exchanges += 1
        return True


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True) if y)
