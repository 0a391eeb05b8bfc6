"""Answers of a rank to those who watch it; imported when the first one asks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from kfcomm.common.version import versions
from kfcomm.errors import ConfigError
from kfcomm.monitor.dumps import snapshot
from kfcomm.monitor.live import Question
from kfcomm.monitor.statistics import statistics_of
from kfcomm.monitor.usage import usage_of
from kfcomm.strategies import Strategy

if TYPE_CHECKING:
    from kfcomm.core.graph import GraphPair
    from kfcomm.strategies import AnyStrategy

World: TypeAlias = Any
"""Communicator of a world; its package imports this one."""

NEW_S = 10.0
"""Figures have the events of so many seconds; statistics have all."""
MAX_EDGES = 5000
"""Of one rule; of a strategy with more, such as a clique of many ranks, no graph is shown."""


def answer_to(question: bytes, comm: World) -> Any:
    """JSON-able answer for a world; its statistics for a question that is unknown.

    Raises:
        ConfigError: monitoring is off.
    """
    comm = comm._latest
    match question:
        case Question.DUMP.value:
            return snapshot(comm._session)
        case Question.VERSIONS.value:
            return {"versions": versions()}
        case Question.GRAPHS.value:
            return graphs(comm)
        case Question.FIGURES.value:
            found = statistics_of(comm._session, comm._group, comm._mailbox.group_ids, with_keys=False)
            news = tuple(one for one in found.events if one.time_s > found.time_s - NEW_S)
            return replace(found, events=news).as_json()
        case Question.USAGE.value:
            return usage_of(os.getpid())._asdict()
    return comm.statistics().as_json()


def encoded_answer_to(question: bytes, comm: World) -> bytes:
    """The same in JSON; ``null`` if monitoring is off."""
    try:
        return json.dumps(answer_to(question, comm)).encode()
    except ConfigError:
        return b"null"


def graphs(comm: World) -> dict[str, Any]:
    """Hosts of the ranks, and the graphs of the strategy in force, one for each rule by size."""
    strategy = comm._group.strategy
    rules = [_rule(bound, one) for bound, one in _rules(strategy)]
    return {"strategy": strategy.name, "hosts": list(comm._group.layout.hosts), "rules": rules}


def _rules(strategy: AnyStrategy) -> Iterable[tuple[int | None, Strategy]]:
    """Largest message in bytes (None: any), and its strategy."""
    return [(None, strategy)] if isinstance(strategy, Strategy) else strategy.rules


def _rule(bound: int | None, strategy: Strategy) -> dict[str, Any]:
    pairs = strategy.select(1 << 40 if bound is None else bound).pairs
    up = sorted({(child, parent) for pair in pairs for parent, child in _edges(pair, up=True)})
    down = sorted({edge for pair in pairs for edge in _edges(pair, up=False)})
    is_drawn = len(up) + len(down) <= MAX_EDGES
    return {"up_to": bound, "name": strategy.name, "up": up if is_drawn else [], "down": down if is_drawn else []}


def _edges(pair: GraphPair, *, up: bool) -> tuple[tuple[int, int], ...]:
    return (pair.reduce if up else pair.broadcast).edges
