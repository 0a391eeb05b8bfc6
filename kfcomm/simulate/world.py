"""World of simulated ranks, from a strategy and a network to a `Result`.

The machines are those of ``core.machine``, with the programs that ``collectives.plans`` makes for real ranks. Only the
links, the processors and the time are simulated, see ``ports`` and ``ranks``.
"""

from __future__ import annotations

import gc
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kfcomm.collectives.plans import Plan
from kfcomm.core.graph import Graph, GraphPair
from kfcomm.errors import ConfigError, InternalError
from kfcomm.simulate.network import SimulatedNetwork
from kfcomm.simulate.ports import Agenda
from kfcomm.simulate.ranks import Carry, Processors, Rank, SimulatedSurroundings, SimulatedWork
from kfcomm.simulate.routes import Routes
from kfcomm.simulate.symmetry import Message, Simulated, simulated
from kfcomm.simulate.wiring import NotAlike, Wiring
from kfcomm.strategies import AnyStrategy
from kfcomm.strategies.plugins import build
from kfcomm.types import Layout

_GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Use:
    """Traffic through one port, in one direction."""

    port: str  # its name
    nbytes: int
    seconds: float  # least time for it, at the port's rate


@dataclass(frozen=True, slots=True)
class Result:
    """One collective on a simulated network.

    Attributes:
        strategy: its name.
        graphs: the name of the graphs that it took for this size: another one where it is a rule by size.
        size: number of ranks.
        num_hosts: on how many hosts.
        nbytes: of the message.
        seconds: until it was complete on all ranks; the first one posted it at 0.
        rank_seconds: until it was complete on each.
        busiest: the port that needs longest for what goes through it.
        messages: how many were sent.
        nbytes_sent: in them, all together.
        events: how many steps the simulation took.
        simulated_ranks: how many ranks were simulated: one of each class of those that are alike.
        is_exact: False where too many ranks to be simulated one by one were taken to be alike: parts of the message
            count as the largest, and all ranks take chunks that arrive at one moment in the same order.
    """

    strategy: str
    graphs: str
    size: int
    num_hosts: int
    nbytes: int
    seconds: float
    rank_seconds: tuple[float, ...]
    busiest: Use
    messages: int
    nbytes_sent: int
    events: int
    simulated_ranks: int
    is_exact: bool

    @property
    def bound_s(self) -> float:
        """Lower bound with these graphs: the time that the busiest port needs."""
        return self.busiest.seconds

    @property
    def algbw(self) -> float:
        """Algorithm bandwidth, in 10⁹ bytes per second."""
        return self.nbytes / self.seconds / _GIGA

    @property
    def busbw(self) -> float:
        """Bus bandwidth, in 10⁹ bytes per second: algbw · 2(n−1)/n."""
        return self.algbw * 2 * (self.size - 1) / self.size

    def as_json(self) -> dict[str, Any]:
        """Everything but the times of single ranks."""
        return {
            "strategy": self.strategy,
            "graphs": self.graphs,
            "ranks": self.size,
            "hosts": self.num_hosts,
            "nbytes": self.nbytes,
            "seconds": self.seconds,
            "algbw_gb_per_s": self.algbw,
            "busbw_gb_per_s": self.busbw,
            "bound_s": self.bound_s,
            "busiest_port": self.busiest.port,
            "busiest_port_nbytes": self.busiest.nbytes,
            "messages": self.messages,
            "nbytes_sent": self.nbytes_sent,
            "events": self.events,
            "simulated_ranks": self.simulated_ranks,
            "is_exact": self.is_exact,
        }


def simulate(
    strategy: str | AnyStrategy | Graph | GraphPair,
    layout: Layout,
    nbytes: int,
    network: SimulatedNetwork | None = None,
    *,
    dtype: str = "float32",
    key: str = "",
    verb: str = "all_reduce",
    root: int = 0,
    starts_s: Sequence[float] = (),
    carry: Carry | None = None,
    one_by_one: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Result:
    """How long a collective takes; by default, an all_reduce that all ranks post at once.

    The same input gives the same result. Costs about 20 µs for each message that a simulated rank sends. Of ranks that
    are alike, and so do the same at the same time, one is simulated (see ``symmetry``): then 100,000 ranks take
    seconds. Where most differ, all are, with 400 bytes for each rank and pair.

    Args:
        strategy: as for ``strategies.build``.
        layout: where the ranks are.
        nbytes: of the message.
        network: hosts in the order of the layout's; those that it does not list are like its default.
        dtype: of the elements, which are summed.
        key: the name of the collective, which picks the way of a message that is not shared out.
        verb: all_reduce, reduce, broadcast, reduce_scatter, all_gather, gather or all_to_all; ``nbytes`` are those of
            one rank's input.
        root: of verbs that have one.
        starts_s: when each rank posts it, by rank: stragglers are late; see `late`. All at 0 by default.
        carry: see ``ranks.Carry``; then every rank is simulated.
        one_by_one: simulate every rank, whether or not others are like it.
        progress: called now and then with the share of the work that is done, 0 to 1.

    Raises:
        ConfigError: an unknown strategy or dtype, a message without an element, one rank only, a network with other
            hosts than the layout.
    """
    if layout.size == 1:
        build(strategy, layout)
        raise ConfigError("one rank alone communicates nothing: simulate at least 2")
    network = _matched(network or SimulatedNetwork(), layout)
    message = Message.of(nbytes, dtype, key, verb, _checked_root(root, layout))
    one_by_one = one_by_one or carry is not None or len(set(_checked_starts(starts_s, layout))) > 1
    with _without_collections():
        world = simulated(strategy, layout, network, message, one_by_one=one_by_one)
        try:
            return _run(world, nbytes, starts_s, carry, progress)
        except NotAlike:
            world = simulated(strategy, layout, network, message, one_by_one=True)
            return _run(world, nbytes, starts_s, carry, progress)


def late(size: int, mean_s: float, seed: int = 0) -> tuple[float, ...]:
    """Random ``starts_s`` of `simulate`: exponential, with this mean; the first rank to post does so at 0.

    Raises:
        ConfigError: the mean is negative or infinite.
    """
    if not 0 <= mean_s < math.inf:
        raise ConfigError(f"stragglers are late by {mean_s!r} s in the mean: expected at least 0")
    chance = random.Random(seed)
    starts_s = [chance.expovariate(1 / mean_s) if mean_s else 0.0 for _ in range(size)]
    first_s = min(starts_s)
    return tuple(start_s - first_s for start_s in starts_s)


def _checked_root(root: int, layout: Layout) -> int:
    if not 0 <= root < layout.size:
        raise ConfigError(f"root {root} is outside 0..{layout.size - 1}")
    return root


def _checked_starts(starts_s: Sequence[float], layout: Layout) -> Sequence[float]:
    if starts_s and (len(starts_s) != layout.size or not all(0 <= start_s < math.inf for start_s in starts_s)):
        raise ConfigError(f"starts_s: expected {layout.size} finite numbers of seconds from 0 on, got {starts_s!r}")
    return starts_s


def num_messages(
    strategy: str | AnyStrategy,
    nbytes: int,
    dtype: str = "float32",
    layout: Layout | None = None,
    network: SimulatedNetwork | None = None,
) -> int:
    """Number of messages that all ranks send in `simulate`.

    Args:
        strategy: see `simulate`, as for the rest.
        nbytes: see there.
        dtype: see there.
        layout: see there; one rank on each host by default, where ``strategy`` is built.
        network: see there.

    Raises:
        ConfigError: an unknown dtype, or a message without an element; a name without a layout.
    """
    if layout is None:
        if isinstance(strategy, str):
            raise ConfigError(f"strategy {strategy!r}: a name needs a layout")
        layout = Layout.even(strategy.size, strategy.size)
    matched = _matched(network or SimulatedNetwork(), layout)
    return simulated(strategy, layout, matched, Message.of(nbytes, dtype, "")).num_messages


def _run(
    world: Simulated, nbytes: int, starts_s: Sequence[float], carry: Carry | None,
    progress: Callable[[float], None] | None,
) -> Result:  # fmt: skip
    routes = Routes(Agenda(), world.network, world.layout)
    wiring = world.wiring(routes)
    plans = world.plans(wiring.numbers)
    routes.relays = world.relays(plans)
    ranks = _ranks(routes, wiring, plans, carry)
    wiring.join(ranks)
    for rank in ranks:
        # In order, so that a simulation repeats exactly.
        if starts_s and starts_s[rank.number]:
            routes.agenda.at(starts_s[rank.number], rank.arrived, None)
        else:
            rank.arrived(None)
    total = sum(rank.num_to_send for rank in ranks)
    routes.agenda.run(None if progress is None else partial(_look, ranks, total, progress))
    return _result(world, nbytes, routes, wiring, ranks)


def _look(ranks: list[Rank], total: int, progress: Callable[[float], None]) -> None:
    progress(sum(rank.num_messages for rank in ranks) / total)


def _matched(network: SimulatedNetwork, layout: Layout) -> SimulatedNetwork:
    if len(network.hosts) > layout.num_hosts:
        raise ConfigError(f"the network has {len(network.hosts)} hosts, and the ranks are on {layout.num_hosts}")
    network = network.of_hosts(layout.num_hosts)
    if not layout.num_cpus:
        return network
    hosts = (replace(host, cpus=host.cpus or layout.num_cpus) for host in network.hosts)
    return replace(network, hosts=tuple(hosts))


def _ranks(routes: Routes, wiring: Wiring, plans: list[Plan], carry: Carry | None) -> list[Rank]:
    local, hosts = routes.network.local, routes.layout.hosts
    copy_s_per_byte = 1 / local.copy if local.copy else 0.0
    work = SimulatedWork(local.overhead_s, copy_s_per_byte, 1 / local.fold, plans[0].sizes, hosts)
    surroundings = SimulatedSurroundings(routes.agenda, wiring.ways, work, carry)
    processors = _processors(routes)
    return [
        Rank(surroundings, rank, plan.program, processors.get(hosts[rank]))
        for rank, plan in zip(wiring.numbers, plans, strict=True)
    ]


def _processors(routes: Routes) -> dict[int, Processors]:
    """Shared processors by host, where they are fewer than the ranks; on a test bed, the same for all."""
    network, layout = routes.network, routes.layout
    if network.cpus:
        return dict.fromkeys(range(layout.num_hosts), Processors(routes.agenda, network.cpus))
    on_hosts = Counter(layout.hosts)
    return {
        # With a processor for each rank there is nothing to wait for.
        number: Processors(routes.agenda, host.cpus)
        for number, host in enumerate(network.hosts)
        if 0 < host.cpus < on_hosts[number]
    }


def _result(world: Simulated, nbytes: int, routes: Routes, wiring: Wiring, ranks: list[Rank]) -> Result:
    times_s = [rank.done_s for rank in ranks if rank.done_s is not None]
    if len(times_s) < len(ranks):
        stuck = [rank.number for rank in ranks if rank.done_s is None]
        raise InternalError(f"nothing is left to happen, and ranks {stuck} are not done")
    busiest = max(routes.ports(), key=lambda port: port.busy_s)
    return Result(
        strategy=world.name,
        graphs=world.graphs.name,
        size=world.layout.size,
        num_hosts=world.layout.num_hosts,
        nbytes=nbytes,
        seconds=max(times_s),
        rank_seconds=wiring.of_all(times_s),
        busiest=Use(busiest.name, busiest.nbytes, busiest.busy_s),
        messages=sum(rank.num_messages * wiring.times(rank.number) for rank in ranks),
        nbytes_sent=sum(rank.nbytes_sent * wiring.times(rank.number) for rank in ranks),
        events=routes.agenda.num_events,
        simulated_ranks=len(ranks),
        is_exact=world.is_exact,
    )


@contextmanager
def _without_collections() -> Iterator[None]:
    """No garbage collection inside."""
    # Millions of lanes and events stay alive: searching them for garbage doubles the time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
