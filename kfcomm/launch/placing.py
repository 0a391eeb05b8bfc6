"""Processors of each rank of a host: ``kfcomm run --bind-to``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

KINDS = ("none", "core", "numa")
NODES = Path("/sys/devices/system/node")


def processors(place: int, size: int, kind: str, available: Sequence[int], nodes: Sequence[Sequence[int]]) -> list[int]:
    """Return the processors of a rank; none where it is not bound.

    Args:
        place: local rank.
        size: ranks of this host.
        kind: one of `KINDS`. ``core``: an equal share of the processors, those that are left over to the first ranks;
            with more ranks than processors one each, in turns. ``numa``: all processors of one node, the same number of
            ranks on each.
        available: processors that the launcher may use.
        nodes: processors of each node of memory.
    """
    if kind == "none" or not available:
        return []
    if kind == "numa":
        usable = [found for node in nodes if (found := sorted(set(node) & set(available)))] or [sorted(available)]
        return usable[place * len(usable) // size if place < size else place % len(usable)]
    ordered = _by_node(available, nodes)
    if size >= len(ordered) or place >= size:
        return [ordered[place % len(ordered)]]
    share, more = divmod(len(ordered), size)
    first = place * share + min(place, more)
    return sorted(ordered[first : first + share + (place < more)])


def _by_node(available: Sequence[int], nodes: Sequence[Sequence[int]]) -> list[int]:
    """The processors in the order of their nodes, so that few shares have processors of two."""
    first = [processor for node in nodes for processor in sorted(set(node) & set(available))]
    return [*first, *sorted(set(available) - set(first))]


def nodes_of(folder: Path = NODES) -> list[list[int]]:
    """Return the processors of each node of memory; empty where the system does not tell."""
    found: dict[int, list[int]] = {}
    for path in folder.glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            found[int(path.name.removeprefix("node"))] = listed((path / "cpulist").read_text())
    return [found[number] for number in sorted(found) if found[number]]


def listed(text: str) -> list[int]:
    """Return the numbers of a list such as ``0-3,8,10-11``; see cpuset(7).

    Raises:
        ValueError: it is not one.
    """
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


@contextlib.contextmanager
def bound(chosen: Sequence[int]) -> Iterator[None]:
    """Start processes on these processors in the block; on all of them if the list is empty."""
    if not chosen:
        yield
        return
    # A new process has the affinity of the thread that forks it: so it has no thread that started before.
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, chosen)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
