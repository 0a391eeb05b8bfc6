"""Simulated run: steps in which hosts are lost, leave or join, with the time of each step.

Every step is simulated with the ranks that it has, and strategies given by name are chosen anew for them. What a change
costs beside that are constants, measured with kfcomm's own jobs on one machine of two cores; see `Pauses`. Not
modelled: that they grow with the number of ranks, samples that are given again, checkpoints, replicas of state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, assert_never

from kfcomm.core.graph import Graph, GraphPair
from kfcomm.errors import ConfigError
from kfcomm.simulate.network import Host, SimulatedNetwork, Switch
from kfcomm.simulate.results import StepResult
from kfcomm.simulate.workload import Await, Call, Compute, Item, Workload, checked
from kfcomm.simulate.world import simulate_step
from kfcomm.strategies import AnyStrategy


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds for which training stands still, beside the repeated calls and the transfer of state.

    Attributes:
        silence_s: until a silent rank counts as lost: the setting ``lost_after``.
        silence_share: of it, after which silence is noticed in fact: heartbeats are older than the loss.
            ``bench/results/vanishing-2026-11-26.json``: 0.81 to 0.99 s of 1 s.
        loss_s: for the agreement, the next epoch and its links, after a process was killed; its end is seen at once.
            ``bench/results/elastic-2026-11-26.json``, "killed", 4 ranks, TCP: 0.036 s in the median, with the repeated
            call.
        leave_s: where ranks leave at a boundary. The same record, "shrink": 0.046 s.
        join_s: where ranks join at a boundary; their epoch was prepared beside training (decision 067). The same
            record, "grow": 0.150 s, less 0.065 s for the transfer.
    """

    silence_s: float = 30.0
    silence_share: float = 0.9
    loss_s: float = 0.036
    leave_s: float = 0.046
    join_s: float = 0.085


MEASURED: Final = Pauses()


@dataclass(frozen=True, slots=True)
class HostsLost:
    """Loss of hosts, with all their ranks, during a step.

    Attributes:
        step: number of the step, from 0 on.
        hosts: names.
        at_s: seconds after the step has begun; a step that is over before then loses them at its end.
        is_silent: they vanish, as with their power: peers notice by silence. Else processes end, which peers see.
    """

    step: int
    hosts: tuple[str, ...]
    at_s: float = 0.0
    is_silent: bool = False


@dataclass(frozen=True, slots=True)
class HostsLeft:
    """Departure of hosts at the boundary before a step."""

    step: int
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HostsJoined:
    """Arrival of hosts at the boundary before a step; they receive the state."""

    step: int
    hosts: tuple[Host, ...]


HostsChange: TypeAlias = HostsLost | HostsLeft | HostsJoined
_Given: TypeAlias = str | AnyStrategy | Graph | GraphPair


@dataclass(frozen=True, slots=True)
class RunStep:
    """One step of a run.

    Attributes:
        number: from 0 on.
        size: number of ranks at its end.
        num_hosts: on how many hosts.
        graphs: those of its calls, at its end.
        begin_s: when it began; the run begins at 0.
        seconds: of all.
        pause_s: of these, for the change: until a loss was noticed, and for `Pauses`.
        transfer_s: of these, for sending state to hosts that join.
        repeated: calls that were given up at a loss, and repeated by the others.
        change: the changes, in words; empty without.
    """

    number: int
    size: int
    num_hosts: int
    graphs: tuple[str, ...]
    begin_s: float
    seconds: float
    pause_s: float = 0.0
    transfer_s: float = 0.0
    repeated: int = 0
    change: str = ""

    def as_json(self) -> dict[str, Any]:
        """Every field."""
        return {name: getattr(self, name) for name in self.__slots__}


def simulate_run(
    workload: Workload,
    network: SimulatedNetwork,
    num_steps: int,
    changes: Sequence[HostsChange] = (),
    *,
    strategy: _Given = "auto",
    state_nbytes: int = 0,
    pauses: Pauses = MEASURED,
) -> tuple[RunStep, ...]:
    """The steps of a run whose hosts change.

    Costs a simulation for each set of hosts, and one for each loss.

    Args:
        workload: of every step, as of `simulate_step`.
        network: the first hosts, and what joins them; ranks lie in blocks, in the order of the hosts.
        num_steps: how many.
        changes: losses, and hosts that leave or join.
        strategy: of calls without their own; one for any number of ranks, so most often a name.
        state_nbytes: sent to each rank that joins, in stripes, by all ranks that have it.
        pauses: what changes cost.

    Raises:
        ConfigError: as of `simulate_step`; a change of a step or a host that the run does not have, one that leaves
            less than two ranks, hosts that join twice, less than one step, or a state of less than 0 bytes.
    """
    if state_nbytes < 0:
        raise ConfigError(f"a state of {state_nbytes} bytes: expected at least 0")
    run = _Run(checked(workload), strategy, state_nbytes, pauses)
    _check(changes, num_steps)
    network = _with_listed_switches(network)
    found: list[RunStep] = []
    now_s = 0.0
    for number in range(num_steps):
        network, step = run.step(network, [change for change in changes if change.step == number])
        found.append(replace(step, number=number, begin_s=now_s))
        now_s += step.seconds
    return tuple(found)


class _Run:
    """Options of all steps, and the steps that are known."""

    def __init__(self, items: tuple[Item, ...], strategy: _Given, state_nbytes: int, pauses: Pauses) -> None:
        self._items = items
        self._strategy = strategy
        self._state_nbytes = state_nbytes
        self._pauses = pauses
        self._known: dict[tuple[Host, ...], StepResult] = {}

    def step(self, network: SimulatedNetwork, changes: Sequence[HostsChange]) -> tuple[SimulatedNetwork, RunStep]:
        """One step, and the network after it."""
        pause_s = transfer_s = 0.0
        for change in changes:
            if isinstance(change, HostsJoined):
                transfer_s += self._transfer_s(network, change.hosts)
                network, pause_s = _joined(network, change.hosts), pause_s + self._pauses.join_s
            elif isinstance(change, HostsLeft):
                network, pause_s = _without(network, change.hosts), pause_s + self._pauses.leave_s
        result = self._whole(network)
        before_s, repeated = pause_s + transfer_s, 0
        for loss in changes:
            if isinstance(loss, HostsLost):
                network = _without(network, loss.hosts)
                at_s = min(loss.at_s, result.seconds)
                lost_s = self._pauses.loss_s
                lost_s += self._pauses.silence_s * self._pauses.silence_share if loss.is_silent else 0.0
                before_s, pause_s = before_s + at_s + lost_s, pause_s + lost_s
                result, repeated = self._rest(network, result, at_s, at_s + lost_s)
        graphs = tuple(dict.fromkeys(call.graphs for call in self._whole(network).calls))
        return network, RunStep(
            0, network.layout.size, len(network.hosts), graphs, 0.0, before_s + result.seconds, pause_s, transfer_s,
            repeated, ", ".join(map(_in_words, changes)),
        )  # fmt: skip

    def _whole(self, network: SimulatedNetwork) -> StepResult:
        if network.hosts not in self._known:
            self._known[network.hosts] = simulate_step(self._items, network.layout, network, strategy=self._strategy)
        return self._known[network.hosts]

    def _rest(
        self, network: SimulatedNetwork, result: StepResult, lost_s: float, again_s: float
    ) -> tuple[StepResult, int]:
        """Simulate the rest of a step after a loss at ``lost_s``; return it, and how many calls are repeated.

        Calls that were complete then, on any rank, are so on all. Compute goes on until a rank waits for a call.
        """
        numbers = iter(range(len(result.calls)))
        left: list[Item] = []
        open_, names, goes_on_s, repeated = False, set[str](), again_s, 0
        for item in self._items:
            match item:
                case Compute(seconds):
                    done_s = min(seconds, goes_on_s)
                    goes_on_s -= done_s
                    left.append(Compute(seconds - done_s))
                case Call():
                    call = result.calls[next(numbers)]
                    if min(call.rank_seconds) > lost_s:
                        repeated += call.posted_s < lost_s
                        open_ = True
                        names.add(item.name)
                        left.append(replace(item, after=tuple(name for name in item.after if name in names)))
                case Await(awaited):
                    waits = tuple(name for name in awaited if name in names)
                    if waits or (open_ and not awaited):
                        goes_on_s = 0.0
                        left.append(Await(waits))
                case _:
                    assert_never(item)
        if not open_:
            compute_s = sum(item.seconds for item in left if isinstance(item, Compute))
            return replace(result, seconds=compute_s), 0
        return simulate_step(left, network.layout, network, strategy=self._strategy), repeated

    def _transfer_s(self, network: SimulatedNetwork, hosts: Sequence[Host]) -> float:
        """Seconds in which each present host sends a stripe of the state to all joining ranks, through both ports."""
        rates = [host.bandwidth * network.efficiency for host in network.hosts]
        into = min(host.bandwidth / host.ranks for host in hosts) * network.efficiency
        num_ranks = sum(host.ranks for host in hosts)
        return max(self._state_nbytes / into, self._state_nbytes / len(rates) * num_ranks / min(rates))


def _with_listed_switches(network: SimulatedNetwork) -> SimulatedNetwork:
    """Hosts stay behind their switch when others leave; those that join are at the core."""
    each, names = network.hosts_per_switch, [host.name for host in network.hosts]
    if not each:
        return network
    switches = tuple(Switch(tuple(names[at : at + each]), network.uplink) for at in range(0, len(names), each))
    return replace(network, switches=switches, hosts_per_switch=0, uplink=0.0)


def _joined(network: SimulatedNetwork, hosts: Sequence[Host]) -> SimulatedNetwork:
    present = {host.name for host in network.hosts}
    for host in hosts:
        if host.name in present or not host.name:
            raise ConfigError(f"host {host.name!r} cannot join: expected a name that no host of the run has")
        present.add(host.name)
    return replace(network, hosts=(*network.hosts, *hosts))


def _without(network: SimulatedNetwork, names: Sequence[str]) -> SimulatedNetwork:
    present = {host.name for host in network.hosts}
    for name in names:
        if name not in present:
            raise ConfigError(f"host {name!r} is not in the run; these are: {', '.join(sorted(present))}")
    hosts = tuple(host for host in network.hosts if host.name not in names)
    if sum(host.ranks for host in hosts) < 2:
        raise ConfigError(f"without {', '.join(names)} less than two ranks are left, which communicate nothing")
    links = tuple(link for link in network.links if not set(link.between) & set(names))
    return replace(network, hosts=hosts, links=links)


def _check(changes: Sequence[HostsChange], num_steps: int) -> None:
    if num_steps < 1:
        raise ConfigError(f"a run of {num_steps} steps: expected at least 1")
    lost: set[int] = set()
    for change in changes:
        if not 0 <= change.step < num_steps:
            raise ConfigError(f"a change in step {change.step}: the run has steps 0..{num_steps - 1}")
        if isinstance(change, HostsLost):
            if not 0 <= change.at_s < math.inf:
                raise ConfigError(f"a loss {change.at_s!r} s into a step: expected a finite number of at least 0")
            if change.step in lost:
                raise ConfigError(f"two losses in step {change.step}: name all its hosts in one")
            lost.add(change.step)


def _in_words(change: HostsChange) -> str:
    what = {HostsLost: "lost", HostsLeft: "left", HostsJoined: "joined"}[type(change)]
    return f"{', '.join(host if isinstance(host, str) else host.name for host in change.hosts)} {what}"
