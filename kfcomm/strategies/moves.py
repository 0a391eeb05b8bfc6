"""Messages of an all_reduce that goes in steps of an exchange, not along graphs; and the time that they take.

The time model: steps follow each other, and each takes the latency of its messages, the work of those of the busiest
rank, the time of the busiest port, and that of folding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from kfcomm.core.exchange import num_blocks
from kfcomm.strategies.base import Direct, Strategy
from kfcomm.strategies.network import NetworkModel
from kfcomm.types import Layout, Rates


class Move(NamedTuple):
    """Messages from one rank to another in one step."""

    step: int  # from 0 on
    source: int
    target: int
    parts: int
    num_messages: int = 1
    is_folded: bool = False  # its receiver folds it


def goes_in_steps(strategy: Strategy, nbytes: int = 0) -> bool:
    """Whether messages of ``nbytes`` bytes go in steps of an exchange: in `dissemination` short ones do."""
    if strategy.is_whole:
        return False
    return strategy.exchange is not None or (strategy.direct is Direct.DISSEMINATION and strategy.sends_at_once(nbytes))


def num_parts(strategy: Strategy) -> int:
    """Parts of a message: one for each rank where it is halved, else it is one."""
    return strategy.size if strategy.exchange is not None else 1


def num_steps(strategy: Strategy) -> int:
    """Number of steps of an exchange."""
    if strategy.exchange is not None:
        return 2 * strategy.exchange.num_rounds
    return (strategy.size - 1).bit_length()


def moves_of(strategy: Strategy) -> Iterator[Move]:
    """Every message of an exchange. O(ranks · steps)."""
    exchange, size = strategy.exchange, strategy.size
    if exchange is None:
        for step in range((size - 1).bit_length()):
            have = 1 << step
            for rank in range(size):
                yield Move(step, rank, (rank - have) % size, min(have, size - have))
        return
    order, last = exchange.order, 2 * exchange.num_rounds - 1
    for place, rank in enumerate(order):
        for step, one in enumerate(exchange.rounds(place)):
            yield Move(step, rank, order[one.to], num_blocks(one.sent), len(one.sent), is_folded=True)
            yield Move(last - step, rank, order[one.source], num_blocks(one.received), len(one.received))


class StepCost(NamedTuple):
    """Cost of one step on a layout and network, of the ranks and ports that take longest."""

    latency_s: float
    num_messages: float  # that a rank sends and receives; of all on a host, if more by processor
    part_s: float  # seconds for each byte of a part, on its way and to be folded


class StepCosts:
    """Costs of the steps of a strategy that `goes_in_steps`. O(ranks · steps) to make."""

    def __init__(self, strategy: Strategy, layout: Layout, network: NetworkModel) -> None:
        self._network = network
        self._num_parts = num_parts(strategy)
        if network.rates is None and layout.num_hosts == layout.size > 1:
            self._steps = list(_alike_steps(strategy, network))
            return
        by_step: list[list[Move]] = [[] for _ in range(num_steps(strategy))]
        for move in moves_of(strategy):
            by_step[move.step].append(move)
        self._steps = [_step_cost(moves, layout, network) for moves in by_step]

    def seconds(self, nbytes: int) -> float:
        """How long an all_reduce of ``nbytes`` bytes takes."""
        part, overhead_s = nbytes / self._num_parts, self._network.overhead_s
        return sum(step.latency_s + step.num_messages * overhead_s + part * step.part_s for step in self._steps)


def _alike_steps(strategy: Strategy, network: NetworkModel) -> Iterator[StepCost]:
    """The same for hosts of one rank each that are alike: then all ranks send and fold as much as each other.

    They differ in the number of their messages, as their place among an odd number has it.
    """
    alpha_s, byte_s = network.cross_alpha_s, network.cross_beta_s_per_byte
    size, exchange = strategy.size, strategy.exchange
    if exchange is None:
        for step in range((size - 1).bit_length()):
            yield StepCost(alpha_s, 2.0, min(1 << step, size - (1 << step)) * byte_s)
        return
    rounds = [list(exchange.rounds(place)) for place in range(size // (size & -size))]
    halving = [
        (max(len(one.sent) + len(one.received) for one in ones), num_blocks(ones[0].sent))
        for ones in zip(*rounds, strict=True)
    ]
    for messages, parts in halving:
        yield StepCost(alpha_s, float(messages), parts * (byte_s + network.gamma_s_per_byte))
    for messages, parts in reversed(halving):
        yield StepCost(alpha_s, float(messages), parts * byte_s)


def _step_cost(moves: list[Move], layout: Layout, network: NetworkModel) -> StepCost:
    hosts, rates = layout.hosts, network.rates
    messages: Counter[int] = Counter()
    folds: Counter[int] = Counter()
    near: Counter[tuple[str, int]] = Counter()
    far: Counter[tuple[int, int]] = Counter()
    latency_s = 0.0
    for move in moves:
        here, there = hosts[move.source], hosts[move.target]
        messages[move.source] += move.num_messages
        messages[move.target] += move.num_messages
        folds[move.target] += move.parts * move.is_folded
        if here == there:
            near["out", move.source] += move.parts
            near["in", move.target] += move.parts
            latency_s = max(latency_s, network.local_alpha_s)
        else:
            far[here, there] += move.parts
            known = rates is not None and rates.latency_s
            latency_s = max(latency_s, rates.latency_s[here][there] if rates and known else network.cross_alpha_s)
    local_s, gamma_s = network.local_beta_s_per_byte, network.gamma_s_per_byte
    sent_s = max(max(near.values(), default=0) * local_s, _port_s(far, network))
    most, part_s = float(max(messages.values())), sent_s + max(folds.values()) * gamma_s
    if layout.num_cpus:
        copies = Counter({rank: near["out", rank] for rank in range(layout.size)})
        crowd, folded, copied = (
            max(_by_host(counts, layout)) / layout.num_cpus for counts in (messages, folds, copies)
        )
        most, part_s = max(most, crowd), max(part_s, folded * gamma_s + copied * local_s)
    return StepCost(latency_s, most, part_s)


def _by_host(counts: Counter[int], layout: Layout) -> list[int]:
    sums = [0] * layout.num_hosts
    for rank, count in counts.items():
        sums[layout.hosts[rank]] += count
    return sums


def _port_s(far: Counter[tuple[int, int]], network: NetworkModel) -> float:
    """Seconds of the busiest port or link between hosts for a byte of each part."""
    rates, out, into = network.rates, Counter[int](), Counter[int]()
    for (here, there), parts in far.items():
        out[here] += parts
        into[there] += parts
    if rates is None:
        return max([*out.values(), *into.values()], default=0) * network.cross_beta_s_per_byte
    links = [parts / rates.links[here][there] for (here, there), parts in far.items()]
    sends = [parts / rates.send[host] for host, parts in out.items()]
    takes = [parts / rates.receive[host] for host, parts in into.items()]
    return max([*links, *sends, *takes, *_uplinks_s(far, rates)], default=0.0)


def _uplinks_s(far: Counter[tuple[int, int]], rates: Rates) -> Iterator[float]:
    """Seconds of each uplink and direction."""
    racks = rates.rack_of if rates.uplinks else ()
    for number, uplink in enumerate(rates.uplinks):
        between = [(racks[a] == number, racks[b] == number, parts) for (a, b), parts in far.items()]
        yield sum(parts for out, into, parts in between if out and not into) / uplink.send
        yield sum(parts for out, into, parts in between if into and not out) / uplink.receive
