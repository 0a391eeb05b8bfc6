"""Uplinks of racks: suspected where pairs that measured side by side held each other up, and then measured.

A link between two racks is quick alone and slow together with others. In a round of the probe each host meets one other
(see `live`), all of them at once: so links between racks look slow there, if enough of them cross an uplink. Hosts are
grouped such that slow links are between groups. For each group, as many of its hosts as can send to as many others at
once, and then the other way; what that shows may group the hosts anew. An uplink is what then lets through clearly less
than the ports could do, where one of these pairs alone is quick.

Cost: nothing where no links look slow; else, up to three times, four messages of 40 ms for each rack, twice.

Source: N. Bansal, A. Blum and S. Chawla, "Correlation clustering" (2004).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, zip_longest
from typing import Final, NamedTuple

from kfcomm.strategies.matrices import Matrix
from kfcomm.types import Layout, Rates, Uplink

Slot = tuple[tuple[int, int], ...]
"""Pairs of ranks that measure at the same time; the first of each sends first."""
Group = tuple[int, ...]
"""Hosts of a rack."""

Observed = tuple[tuple[int, int, float], ...]
"""Flows at the same time: from host to host, and the part of what their ports could do."""
Sent = Mapping[Slot, Sequence[Mapping[int, tuple[int, float]]]]
"""By slot, for each repetition the bytes and seconds of each rank that sent."""

MAX_HOSTS: Final = 64
"""Among more hosts no racks are looked for: grouping them takes O(hosts³)."""
MAX_RACKS: Final = 8
MAX_TESTS: Final = 4 * MAX_RACKS
"""Slots of one look: each rack out and in, together and a pair alone."""
MOST_LOOKS: Final = 3
_FULL: Final = 0.8
"""Of what the ports could do: with more, nothing else holds pairs up."""
_ALONE: Final = 1.25
"""A pair alone is quicker by this factor at least, if it shares an uplink with others."""
_FAIR: Final = 0.6
"""Of its part of an uplink: a pair that had less has a slow link of its own."""
_TOGETHER: Final = 0.12
"""What two hosts in one group are worth: about the noise of a quick link."""
_TRUST: Final = 0.5
_ABOUT: Final = 0.15
_MOST_PASSES: Final = 20
_NOTHING: Final = 1e-9


class Tests(NamedTuple):
    """Groups that may be racks, and the slots that measure them."""

    groups: tuple[Group, ...] = ()
    slots: tuple[Slot, ...] = ()


def side_by_side(layout: Layout, bandwidth: Matrix, slots: Sequence[Slot], rates: Rates) -> list[Observed]:
    """Flows between hosts in each slot of a probe, one way and then the other."""
    both = (tuple((pair[::way]) for pair in slot) for slot in slots for way in (1, -1))
    return [_observed([(a, b, bandwidth[a][b]) for a, b in pairs], layout, rates) for pairs in both]


def seen_in(sent: Sent, layout: Layout, rates: Rates) -> list[Observed]:
    """The same of slots that were measured together, of each pair the best repetition."""
    return [
        _observed([(a, b, max(_rate(*one[a]) for one in repeats)) for a, b in slot], layout, rates)
        for slot, repeats in sent.items()
    ]


def _observed(flows: Sequence[tuple[int, int, float]], layout: Layout, rates: Rates) -> Observed:
    ends = [(layout.hosts[a], layout.hosts[b], rate) for a, b, rate in flows]
    return tuple((a, b, rate / min(rates.send[a], rates.receive[b])) for a, b, rate in ends if a != b)


def tests_of(layout: Layout, observed: Sequence[Observed]) -> Tests:
    """Groups of hosts that may share an uplink, by flows that were measured at the same time, and how to find out.

    No groups where all links are about as quick as the ports at their ends.
    """
    if not 4 <= layout.num_hosts <= MAX_HOSTS:
        return Tests()
    partition = _suspected(observed, layout.num_hosts)
    groups = tuple(group for group in partition if len(group) > 1)
    if len(partition) < 2 or len(groups) > MAX_RACKS:
        return Tests()
    slots = [slot for group in groups for slot in _across(layout, groups, group)]
    alone = [slot[:1] for slot in slots]
    return Tests(groups, tuple(dict.fromkeys([*slots, *alone])))


def nbytes_of(pair: tuple[int, int], layout: Layout, rates: Rates, long_s: float) -> int:
    """Bytes that two ranks alone exchange in about ``long_s`` seconds, by the ports of their hosts."""
    here, there = (layout.hosts[rank] for rank in pair)
    return int(min(rates.send[here], rates.receive[there]) * long_s)


def uplinks_of(tests: Tests, layout: Layout, rates: Rates, sent: Sent) -> tuple[Uplink, ...]:
    """The groups of these tests that do share an uplink, by what was ``sent`` and the ``rates`` of the ports."""
    found = []
    for group in tests.groups:
        out, into = _across(layout, tests.groups, group)
        ways = [_Way.of(slot, layout, rates, sent) for slot in (out, into)]
        if any(way.is_shared for way in ways):
            found.append(Uplink(group, *(way.rate for way in ways)))
    return tuple(found)


def alone(bandwidth: Matrix, layout: Layout, slots: Sequence[Slot], rates: Rates) -> list[list[float]]:
    """Bandwidths with what each pair between racks has alone, where it had its part of an uplink in its slot.

    ``rates`` has the ports and the uplinks, ``slots`` the pairs that measured at the same time.
    """
    rows, racks, hosts = [list(row) for row in bandwidth], rates.rack_of, layout.hosts
    for slot in slots:
        for pairs in (slot, tuple((b, a) for a, b in slot)):
            crossing = [(a, b) for a, b in pairs if racks[hosts[a]] != racks[hosts[b]]]
            for a, b in crossing:
                narrow = [min(rates.send[hosts[a]], rates.receive[hosts[b]])]
                shares = list(narrow)
                for rack, rate, end in ((racks[hosts[a]], 0, 0), (racks[hosts[b]], 1, 1)):
                    if rack is not None:
                        uplink = (rates.uplinks[rack].send, rates.uplinks[rack].receive)[rate]
                        narrow.append(uplink)
                        shares.append(uplink / sum(racks[hosts[pair[end]]] == rack for pair in crossing))
                if rows[a][b] >= _FAIR * min(shares):
                    rows[a][b] = max(rows[a][b], min(narrow))
    return rows


class _Way(NamedTuple):
    """Traffic that left a group, or came to it."""

    rate: float  # bytes/s; what the ports can do if nothing else held it up
    is_shared: bool

    @classmethod
    def of(cls, slot: Slot, layout: Layout, rates: Rates, sent: Sent) -> _Way:
        hosts = layout.hosts
        full = sum(min(rates.send[hosts[a]], rates.receive[hosts[b]]) for a, b in slot)
        passed = max(_passed(list(one.values())) for one in sent[slot])
        first = slot[0][0]
        together, by_itself = (max(_rate(*one[first]) for one in sent[each]) for each in (slot, slot[:1]))
        is_shared = len(slot) > 1 and passed < _FULL * full and by_itself > _ALONE * together
        return cls(passed if is_shared else full, is_shared)


def _rate(nbytes: int, seconds: float) -> float:
    return nbytes / seconds


def _passed(flows: Sequence[tuple[int, float]]) -> float:
    """Bytes/s that went through at least: until each flow's end, what had ended by then."""
    ended, best = 0, 0.0
    for nbytes, seconds in sorted(flows, key=lambda flow: flow[1]):
        ended += nbytes
        best = max(best, ended / seconds)
    return best


def _across(layout: Layout, groups: Sequence[Group], group: Group) -> tuple[Slot, Slot]:
    """Pairs of ranks that send from a group to other hosts, and to it from them: as many as can at once."""
    masters = layout.masters
    named = {host for each in groups for host in each}
    others = [each for each in groups if each != group]
    loose = [host for host in range(layout.num_hosts) if host not in named]
    # In turns from each of the other groups, so that their uplinks have little each.
    outside = [host for row in zip_longest(*others, loose) for host in row if host is not None]
    pairs = [(masters[a], masters[b]) for a, b in zip(group, outside, strict=False)]
    return tuple(pairs), tuple((b, a) for a, b in pairs)


def _suspected(observed: Sequence[Observed], num_hosts: int) -> list[Group]:
    """Partition of the hosts by which pairs held each other up.

    Minimizes, over all pairs within a group, the sum of how slow each was, less a little for being together
    (correlation clustering), by moves of single hosts and by joins. Starts: all hosts apart, and all in one group.
    """
    weights = _weights(observed, num_hosts)
    found = [_improved(start, weights) for start in (list(range(num_hosts)), [0] * num_hosts)]
    labels = min(found, key=lambda labels: (round(_inside(labels, weights), 9), labels))
    groups: dict[int, list[int]] = {}
    for host, label in enumerate(labels):
        groups.setdefault(label, []).append(host)
    return sorted(map(tuple, groups.values()))


def _weights(observed: Sequence[Observed], num_hosts: int) -> list[list[float]]:
    """By pair of hosts: above 0 if they should be in two groups, below if in one."""
    slow = [[0.0] * num_hosts for _ in range(num_hosts)]
    alike = [[0.0] * num_hosts for _ in range(num_hosts)]

    def note(matrix: list[list[float]], a: int, b: int, value: float) -> None:
        matrix[a][b] = matrix[b][a] = max(matrix[a][b], value)

    for flows in observed:
        held = [(1 - part, a, b) for a, b, part in flows if part < _FULL]
        for by, a, b in held:
            note(slow, a, b, by)
        # Flows that are equally slow at the same time may share an uplink: then both come from one rack, or go to one.
        for (by, a, b), (much, c, d) in combinations(held, 2):
            if abs(by - much) < _ABOUT:
                note(alike, a, c, min(by, much))
                note(alike, b, d, min(by, much))
    return [
        [bad - _TOGETHER - (0.0 if bad else _TRUST * good) for bad, good in zip(row, goods, strict=True)]
        for row, goods in zip(slow, alike, strict=True)
    ]


def _improved(labels: list[int], weights: list[list[float]]) -> list[int]:
    """The partition after moves of hosts and joins of groups, as long as they bring something."""
    for _ in range(_MOST_PASSES):
        before = list(labels)
        for host in range(len(labels)):
            labels[host] = _best_group(host, labels, weights)
        labels = _joined(labels, weights)
        if labels == before:
            break
    return labels


def _best_group(host: int, labels: Sequence[int], weights: Sequence[Sequence[float]]) -> int:
    """The group of others in which a host costs least, or one of its own; its present one if none is better."""
    others = {other: label for other, label in enumerate(labels) if other != host}
    costs = {min(set(range(len(labels))).difference(others.values())): 0.0}
    for other, label in others.items():
        costs[label] = costs.get(label, 0.0) + weights[host][other]
    least = min(costs, key=lambda label: (round(costs[label], 9), label))
    return least if costs[least] < costs.get(labels[host], 0.0) - _NOTHING else labels[host]


def _joined(labels: list[int], weights: Sequence[Sequence[float]]) -> list[int]:
    """The partition with the two groups joined that gain most, if any do."""
    between: dict[tuple[int, int], float] = {}
    for a, b in combinations(range(len(labels)), 2):
        if labels[a] != labels[b]:
            ends = min(labels[a], labels[b]), max(labels[a], labels[b])
            between[ends] = between.get(ends, 0.0) + weights[a][b]
    least = min(between.items(), key=lambda item: (round(item[1], 9), item[0]), default=((0, 0), 0.0))
    (kept, gone), cost = least
    return [kept if label == gone else label for label in labels] if cost < -_NOTHING else labels


def _inside(labels: Sequence[int], weights: Sequence[Sequence[float]]) -> float:
    return sum(weights[a][b] for a, b in combinations(range(len(labels)), 2) if labels[a] == labels[b])
