"""World of simulated ranks, from collectives and a network to a `Result`.

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

from kfcomm.collectives.plans import Plan, Plans
from kfcomm.core.graph import Graph, GraphPair
from kfcomm.errors import ConfigError, InternalError
from kfcomm.simulate.levels import extrapolated, is_too_large
from kfcomm.simulate.network import SimulatedNetwork
from kfcomm.simulate.ports import Agenda
from kfcomm.simulate.ranks import Carry, Processors, Rank, RankCall, SimulatedSurroundings, SimulatedWork
from kfcomm.simulate.results import CallResult, Result, StepResult, Use
from kfcomm.simulate.routes import Routes
from kfcomm.simulate.scripts import Script
from kfcomm.simulate.staging import DeviceCopies, Segments
from kfcomm.simulate.symmetry import ONE_WAY, Message, Simulated, simulated, simulated_together, wiring_of
from kfcomm.simulate.wiring import NotAlike, Wiring
from kfcomm.simulate.workload import Call, Compute, Workload, calls_of, checked
from kfcomm.strategies import AnyStrategy, Strategy
from kfcomm.strategies.plugins import build
from kfcomm.types import Layout


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
    call = Call(nbytes, key, strategy, verb, root, dtype)
    how = _How(starts_s, carry, one_by_one, progress)
    return Result.of(_simulated((call,), layout, network, strategy, how))


def simulate_step(
    workload: Workload,
    layout: Layout,
    network: SimulatedNetwork | None = None,
    *,
    strategy: str | AnyStrategy | Graph | GraphPair = "auto",
    starts_s: Sequence[float] = (),
    one_by_one: bool = False,
    progress: Callable[[float], None] | None = None,
) -> StepResult:
    """How long a step takes in which all ranks compute, post collectives, and wait for them.

    Calls share links, ports and the processor of their rank; chunks of one link leave by priority, then in order.
    Compute takes its time whatever is under way. Costs as `simulate`; ranks that are alike in all calls are simulated
    once: where calls have strategies of several kinds, most often all are.

    Args:
        workload: see `parse_workload`; `Compute`, `Call` and `Await` in the order of a rank's program.
        layout: where the ranks are.
        network: as for `simulate`.
        strategy: of calls without their own.
        starts_s: when each rank begins, by rank; see `late`. All at 0 by default.
        one_by_one: simulate every rank.
        progress: as for `simulate`.

    Raises:
        ConfigError: as of `simulate`; a workload without calls, or whose names are used twice or are unknown.
    """
    return _simulated(checked(workload), layout, network, strategy, _How(starts_s, None, one_by_one, progress))


@dataclass(frozen=True, slots=True)
class _How:
    """Options of a simulation, as of `simulate`."""

    starts_s: Sequence[float]
    carry: Carry | None
    one_by_one: bool
    progress: Callable[[float], None] | None


def _simulated(
    items: Workload, layout: Layout, network: SimulatedNetwork | None,
    strategy: str | AnyStrategy | Graph | GraphPair, how: _How,
) -> StepResult:  # fmt: skip
    if layout.size == 1:
        build(strategy, layout)
        raise ConfigError("one rank alone communicates nothing: simulate at least 2")
    network = _matched(network or SimulatedNetwork(), layout)
    segments, calls = Segments.of(tuple(_checked_calls(items)), network.local.device), []
    for call in segments.posted:
        message = Message.of(call.nbytes, call.dtype, call.name, call.verb, _checked_root(call.root, layout))
        calls.append((strategy if call.strategy is None else call.strategy, message))
    is_late = len(set(_checked_starts(how.starts_s, layout))) > 1
    one_by_one = how.one_by_one or how.carry is not None or is_late
    with _without_collections():
        try:
            found = simulated_together(calls, layout, network, one_by_one=one_by_one)
            if len(items) == len(segments.posted) == 1 and not one_by_one and is_too_large(found):
                return extrapolated(found[0], partial(_simulated_small, next(calls_of(items)), how))
            return _run(found, items, segments, how)
        except NotAlike:
            return _run(simulated_together(calls, layout, network, one_by_one=True), items, segments, how)


def _simulated_small(
    call: Call, how: _How, strategy: Strategy, layout: Layout, network: SimulatedNetwork
) -> StepResult:
    return _simulated((replace(call, strategy=strategy),), layout, network, strategy, replace(how, starts_s=()))


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


def _checked_calls(items: Workload) -> Iterator[Call]:
    """The calls, each known to be one that is simulated, before it is cut."""
    for call in calls_of(items):
        Message.of(call.nbytes, call.dtype, call.name, call.verb)
        yield call


def _run(calls: list[Simulated], items: Workload, segments: Segments, how: _How) -> StepResult:
    both_ways = any(call.message.verb not in ONE_WAY for call in calls)
    routes = Routes(Agenda(), calls[0].network, calls[0].layout, goes_both_ways=both_ways)
    wiring = wiring_of(calls, routes)
    made: dict[tuple[int, int], Plans] = {}
    plans = [call.plans(wiring.numbers, made) for call in calls]
    routes.relays = frozenset().union(*(call.relays(of_call) for call, of_call in zip(calls, plans, strict=True)))
    ranks = _ranks(routes, wiring, plans, segments, how.carry)
    wiring.join(ranks)
    device = routes.network.local.device
    scripts = [
        Script(routes.agenda, rank, items, segments, DeviceCopies(routes.agenda, device) if device else None)
        for rank in ranks
    ]
    for rank, script in zip(ranks, scripts, strict=True):
        # In order, so that a simulation repeats exactly.
        if how.starts_s and how.starts_s[rank.number]:
            routes.agenda.at(how.starts_s[rank.number], script.go_on, None)
        else:
            script.go_on()
    total = sum(call.num_to_send for rank in ranks for call in rank.calls)
    routes.agenda.run(None if how.progress is None else partial(_look, ranks, total, how.progress))
    return _result(calls, items, segments, routes, wiring, scripts, ranks)


def _look(ranks: list[Rank], total: int, progress: Callable[[float], None]) -> None:
    progress(sum(call.num_messages for rank in ranks for call in rank.calls) / total)


def _matched(network: SimulatedNetwork, layout: Layout) -> SimulatedNetwork:
    if len(network.hosts) > layout.num_hosts:
        raise ConfigError(f"the network has {len(network.hosts)} hosts, and the ranks are on {layout.num_hosts}")
    network = network.of_hosts(layout.num_hosts)
    if not layout.num_cpus:
        return network
    hosts = (replace(host, cpus=host.cpus or layout.num_cpus) for host in network.hosts)
    return replace(network, hosts=tuple(hosts))


def _ranks(
    routes: Routes, wiring: Wiring, plans: list[list[Plan]], segments: Segments, carry: Carry | None
) -> list[Rank]:
    local, hosts = routes.network.local, routes.layout.hosts
    copy_s_per_byte = 1 / local.copy if local.copy else 0.0
    work = SimulatedWork(local.overhead_s, copy_s_per_byte, 1 / local.fold, hosts)
    surroundings = SimulatedSurroundings(routes.agenda, wiring.ways, work, carry)
    processors = _processors(routes)
    priorities = [call.priority for call in segments.posted]
    return [
        Rank(
            surroundings,
            rank,
            tuple(
                RankCall(number, plan.program, plan.sizes, priorities[number]) for number, plan in enumerate(of_rank)
            ),
            processors.get(hosts[rank]),
        )
        for rank, of_rank in zip(wiring.numbers, zip(*plans, strict=True), strict=True)
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


def _result(
    calls: list[Simulated], items: Workload, segments: Segments, routes: Routes, wiring: Wiring,
    scripts: list[Script], ranks: list[Rank],
) -> StepResult:  # fmt: skip
    ends = [[script.done_s(number) for number in range(len(segments.of_call))] for script in scripts]
    if any(script.ended_s is None for script in scripts) or any(None in of_rank for of_rank in ends):
        stuck = [rank.number for rank, of_rank in zip(ranks, ends, strict=True) if None in of_rank]
        raise InternalError(f"nothing is left to happen, and ranks {stuck} are not done")
    done_s = [[end_s or 0.0 for end_s in of_rank] for of_rank in ends]
    ends_s = [max(script.ended_s or 0.0, *of_rank) for script, of_rank in zip(scripts, done_s, strict=True)]
    busiest = max(routes.ports(), key=lambda port: port.busy_s)
    results = []
    for number, given in enumerate(calls_of(items)):
        world, parts = calls[segments.of_call[number][0]], segments.of_call[number]
        sent = [(rank.calls[part], wiring.times(rank.number)) for rank in ranks for part in parts]
        times_s = [of_rank[number] for of_rank in done_s]
        results.append(
            CallResult(
                given.name, given.verb, world.name, world.graphs.name, given.nbytes,
                posted_s=min(script.posted_s[number] for script in scripts),
                done_s=max(times_s),
                rank_seconds=wiring.of_all(times_s),
                messages=sum(call.num_messages * times for call, times in sent),
                nbytes_sent=sum(call.nbytes_sent * times for call, times in sent),
            )
        )  # fmt: skip
    return StepResult(
        size=routes.layout.size,
        num_hosts=routes.layout.num_hosts,
        calls=tuple(results),
        compute_s=sum(item.seconds for item in items if isinstance(item, Compute)),
        seconds=max(ends_s),
        rank_seconds=wiring.of_all(ends_s),
        busiest=Use(busiest.name, busiest.nbytes, busiest.busy_s),
        events=routes.agenda.num_events,
        simulated_ranks=len(ranks),
        is_exact=all(call.is_exact for call in calls),
        compute_spans_s=tuple(
            (min(begin for begin, _ in of_ranks), max(end for _, end in of_ranks))
            for of_ranks in zip(*(script.computed_s for script in scripts), strict=True)
        ),
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
