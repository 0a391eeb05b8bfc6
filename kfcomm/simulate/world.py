"""World of simulated ranks, from a strategy and a network to a `Result`.

The machines are those of ``core.machine``, with the programs that ``collectives.plans`` makes for real ranks. Only the
links, the processors and the time are simulated, see ``ports`` and ``ranks``.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from kfcomm.arrays.dtypes import dtype_of
from kfcomm.collectives.plans import Plan, PlanKey, Planner, Plans
from kfcomm.core.graph import Graph, GraphPair
from kfcomm.errors import ConfigError, InternalError
from kfcomm.simulate.network import SimulatedNetwork
from kfcomm.simulate.ports import Agenda, Flow, Routes
from kfcomm.simulate.ranks import Carry, Processors, Rank, SimulatedSurroundings, SimulatedWork
from kfcomm.strategies import AnyStrategy
from kfcomm.strategies.chunks import ChunkSizes
from kfcomm.strategies.plugins import build
from kfcomm.types import Layout, Op, Verb

_GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Use:
    """Traffic through one port, in one direction."""

    port: str  # its name
    nbytes: int
    seconds: float  # least time for it, at the port's rate


@dataclass(frozen=True, slots=True)
class Result:
    """One all_reduce on a simulated network.

    Attributes:
        strategy: its name.
        graphs: the name of the graphs that it took for this size: another one where it is a rule by size.
        size: number of ranks.
        num_hosts: on how many hosts.
        nbytes: of the message.
        seconds: until it was complete on all ranks, which posted it at 0.
        rank_seconds: until it was complete on each.
        busiest: the port that needs longest for what goes through it.
        messages: how many were sent.
        nbytes_sent: in them, all together.
        events: how many steps the simulation took.
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
        }


def simulate(
    strategy: str | AnyStrategy | Graph | GraphPair,
    layout: Layout,
    nbytes: int,
    network: SimulatedNetwork | None = None,
    *,
    dtype: str = "float32",
    key: str = "",
    carry: Carry | None = None,
) -> Result:
    """How long an all_reduce takes that all ranks post at once.

    The same input gives the same result. Costs about 20 µs for each message and, for strategies with many pairs, 400
    bytes for each rank and pair.

    Args:
        strategy: as for ``strategies.build``.
        layout: where the ranks are.
        nbytes: of the message.
        network: hosts in the order of the layout's; those that it does not list are like its default.
        dtype: of the elements, which are summed.
        key: the name of the collective, which picks the way of a message that is not shared out.
        carry: see ``ranks.Carry``.

    Raises:
        ConfigError: an unknown strategy or dtype, a message without an element, one rank only, a network with other
            hosts than the layout.
    """
    built = build(strategy, layout)
    if layout.size == 1:
        raise ConfigError("one rank alone communicates nothing: simulate at least 2")
    network = _matched(network or SimulatedNetwork(), layout)
    with _without_collections():
        plans = _plans(built, layout, nbytes, dtype, key)
        routes = Routes(Agenda(), network, layout)
        routes.relays = _relays(plans, layout)
        ranks = _ranks(routes, plans, carry)
        for rank in ranks:
            # In order, so that a simulation repeats exactly.
            rank.arrived(None)
        routes.agenda.run()
    return _result(built, nbytes, routes, ranks)


def num_messages(strategy: AnyStrategy, nbytes: int, dtype: str = "float32", layout: Layout | None = None) -> int:
    """Number of messages that `simulate` moves; its time grows with it. ``layout``: by default, one rank on each host.

    Raises:
        ConfigError: an unknown dtype, or a message without an element.
    """
    layout = layout or Layout.even(strategy.size, strategy.size)
    (plan,) = _plans(strategy, layout, nbytes, dtype, "", num_ranks=1)
    return 2 * (strategy.size - 1) * plan.program.num_slots


def _matched(network: SimulatedNetwork, layout: Layout) -> SimulatedNetwork:
    if len(network.hosts) > layout.num_hosts:
        raise ConfigError(f"the network has {len(network.hosts)} hosts, and the ranks are on {layout.num_hosts}")
    network = network.of_hosts(layout.num_hosts)
    if not layout.num_cpus:
        return network
    hosts = (replace(host, cpus=host.cpus or layout.num_cpus) for host in network.hosts)
    return replace(network, hosts=tuple(hosts))


def _plans(
    strategy: AnyStrategy, layout: Layout, nbytes: int, dtype: str, key: str, num_ranks: int | None = None
) -> list[Plan]:
    """Plans of all ranks, or of the first ones, made as by real ranks."""
    element = dtype_of(dtype)
    if nbytes < element.itemsize:
        raise ConfigError(f"a message of {nbytes} bytes has less than one {element}")
    shape = (nbytes // element.itemsize,)
    chunks = ChunkSizes(layout)
    plans = (Plans(Planner(rank, strategy.size, strategy, chunks)) for rank in range(num_ranks or strategy.size))
    return [each.of(PlanKey(Verb.ALL_REDUCE, element, shape, Op.SUM), key) for each in plans]


def _relays(plans: list[Plan], layout: Layout) -> frozenset[int]:
    """Hosts to which ranks of other hosts send what is folded there."""
    hosts = layout.hosts
    return frozenset(
        hosts[rank]
        for rank, plan in enumerate(plans)
        if any(hosts[child] != hosts[rank] for lane in plan.program.lanes.values() for child in lane.children)
    )


def _ranks(routes: Routes, plans: list[Plan], carry: Carry | None) -> list[Rank]:
    local, hosts = routes.network.local, routes.layout.hosts
    copy_s_per_byte = 1 / local.copy if local.copy else 0.0
    ranks: list[Rank] = []

    def flow_to(source: Rank, target: int) -> Flow:
        ports, latency_s = routes.between(source.number, target)
        return Flow(routes.agenda, ports, latency_s, ranks[target].arrived, source.was_read)

    work = SimulatedWork(local.overhead_s, copy_s_per_byte, 1 / local.fold, plans[0].sizes, hosts)
    surroundings = SimulatedSurroundings(routes.agenda, flow_to, work, carry)
    processors = _processors(routes)
    for rank, plan in enumerate(plans):
        ranks.append(Rank(surroundings, rank, plan.program, processors[hosts[rank]]))
    return ranks


def _processors(routes: Routes) -> list[Processors | None]:
    """Shared processors of each host; on a test bed, the same for all."""
    network, layout = routes.network, routes.layout
    if network.cpus:
        return [Processors(routes.agenda, network.cpus)] * layout.num_hosts
    return [
        # With a processor for each rank there is nothing to wait for.
        Processors(routes.agenda, host.cpus) if 0 < host.cpus < layout.hosts.count(number) else None
        for number, host in enumerate(network.hosts)
    ]


def _result(strategy: AnyStrategy, nbytes: int, routes: Routes, ranks: list[Rank]) -> Result:
    times_s = tuple(rank.done_s for rank in ranks if rank.done_s is not None)
    if len(times_s) < len(ranks):
        stuck = [rank.number for rank in ranks if rank.done_s is None]
        raise InternalError(f"nothing is left to happen, and ranks {stuck} are not done")
    busiest = max(routes.ports(), key=lambda port: port.busy_s)
    return Result(
        strategy=strategy.name,
        graphs=strategy.select(nbytes).name,
        size=routes.layout.size,
        num_hosts=routes.layout.num_hosts,
        nbytes=nbytes,
        seconds=max(times_s),
        rank_seconds=times_s,
        busiest=Use(busiest.name, busiest.nbytes, busiest.busy_s),
        messages=sum(rank.num_messages for rank in ranks),
        nbytes_sent=sum(rank.nbytes_sent for rank in ranks),
        events=routes.agenda.num_events,
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
