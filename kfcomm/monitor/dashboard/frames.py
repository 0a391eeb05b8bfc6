"""Messages of the dashboard: JSON-able values made from looks at a job. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from kfcomm.monitor.doctor import Diagnosis, Wait
from kfcomm.monitor.findings import findings
from kfcomm.monitor.statistics import RecentEvent
from kfcomm.monitor.top import JobChange, RankChange
from kfcomm.monitor.usage import Usage

MAX_LINKS = 600
"""The fastest; a clique of 64 ranks has 4,032."""
MAX_NAME = 300
MAX_WAITS = 20
MAX_EVENTS = 300
SAME_EVENT_S = 30.0
"""Ranks that report the same event within this time report one."""

Frame = dict[str, Any]


def figures(change: JobChange, usage: Mapping[int, Usage], time_s: float) -> Frame:
    """Everything that changes with each look, but for the names."""
    answers = change.answers
    passed_s = change.passed_s or math.inf
    strategies = list(dict.fromkeys(answer.strategy for answer in answers))
    return {
        "time": round(time_s, 3),
        "job": change.job,
        "program": change.program,
        "note": change.note,
        "size": change.size,
        "epoch": max((answer.epoch for answer in answers), default=0),
        "strategy": " / ".join(strategies),
        "ended": change.has_ended,
        "gone": list(change.gone),
        "ranks": [_rank(rank, one, usage.get(rank)) for rank, one in change.ranks.items()],
        "links": [[link.source, link.target, link.kind, round(link.rate)] for link in _shown_links(change)],
        "waited": {rank: round(waited_s / passed_s, 4) for rank, waited_s in change.waited_for.items()},
        "gauges": gauges(change),
    }


def gauges(change: JobChange) -> dict[str, float | None]:
    """Figures of training, of the first rank that has each; None for one that is not finite."""
    found: dict[str, float | None] = {}
    for answer in change.answers:
        for name, value in answer.gauges.items():
            found.setdefault(clipped(name), float(value) if math.isfinite(value) else None)
    return found


def names(change: JobChange) -> Frame:
    """The calls by name, as columns, and the calls of each rank."""
    keys = change.keys
    return {
        "is_first": change.passed_s == 0,
        "calls": {rank: round(one.calls_per_s, 2) for rank, one in change.ranks.items()},
        "name": [clipped(key.name) for key in keys],
        "rate": [round(key.calls_per_s, 2) for key in keys],
        "nbytes": [round(key.nbytes_per_s) for key in keys],
        "p50": [_seconds(key.p50_s) for key in keys],
        "p99": [_seconds(key.p99_s) for key in keys],
        "max": [_seconds(key.max_s) for key in keys],
        "failed": [key.failures for key in keys],
        "busy": [_seconds(key.busy_s) for key in keys],
    }


def waits(diagnosis: Diagnosis) -> Frame:
    """Calls that have not completed: ranks that wait, ranks that are missing, and the lines of their programs."""
    return {
        "waits": [_wait(diagnosis, wait) for wait in diagnosis.waits[:MAX_WAITS]],
        "more": max(0, len(diagnosis.waits) - MAX_WAITS),
        "findings": [
            {"kind": one.kind, "ranks": list(one.ranks), "text": clipped(one.text, 4 * MAX_NAME)}
            for one in findings(diagnosis)
        ],
        "absent": list(diagnosis.absent),
    }


NOTHING_WAITS: Frame = {"waits": [], "more": 0, "findings": [], "absent": []}


def clipped(text: str, most: int = MAX_NAME) -> str:
    """A text of bounded length, which says how long it was."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


class EventLog:
    """The rare events of a job, oldest first; what several ranks report is one event."""

    def __init__(self) -> None:
        self.events: list[Frame] = []
        self._seen: dict[tuple[str, RecentEvent], None] = {}

    def add(self, rank: int, source: str, told: Iterable[RecentEvent]) -> bool:
        """Add what a rank reports; ``source`` is its process. Whether anything is new."""
        fresh = [one for one in told if (source, one) not in self._seen]
        for one in fresh:
            self._seen[source, one] = None
            self._add(rank, one)
        return bool(fresh)

    def note(self, event: RecentEvent) -> None:
        """Add what no rank reports."""
        self._add(None, event)

    def _add(self, rank: int | None, one: RecentEvent) -> None:
        what, why = clipped(one.what), clipped(one.why)
        for event in reversed(self.events):
            is_same = (event["kind"], event["what"], event["why"]) == (one.kind, what, why)
            if is_same and abs(event["time"] - one.time_s) < SAME_EVENT_S:
                if rank is not None and rank not in event["ranks"]:
                    event["ranks"] = sorted([*event["ranks"], rank])
                return
        ranks = [] if rank is None else [rank]
        event = {
            "time": one.time_s,
            "kind": one.kind,
            "what": what,
            "why": why,
            "ranks": ranks,
        }
        self.events = sorted([*self.events, event], key=lambda event: event["time"])[-MAX_EVENTS:]


def _rank(rank: int, one: RankChange, usage: Usage | None) -> Frame:
    pid, resident, descriptors = usage or Usage(0, None, None)
    found: Frame = {"rank": rank, "pid": pid, "rss": resident, "fds": descriptors, "answers": one.now is not None}
    if one.now is not None:
        peer, waited = one.waits_for, one.waited_s or {}
        found |= {
            "sent": round(one.sent_rate),
            "received": round(one.received_rate),
            "waits_for": peer,
            "share": 0.0 if peer is None else round(waited[peer] / sum(waited.values()), 3),
            "lag": _seconds(one.now.loop_lag_s),
            "peak": one.now.peak_memory_nbytes,
            "shared": one.now.slots_nbytes + one.now.symmetric_nbytes,
            "in_flight": one.now.in_flight,
            "longest": _seconds(one.now.longest_wait_s),
        }
    return found


def _shown_links(change: JobChange) -> Iterable[Any]:
    return [link for link in change.links[:MAX_LINKS] if link.rate >= 1]


def _wait(diagnosis: Diagnosis, wait: Wait) -> Frame:
    return {
        "title": clipped(wait.title),
        "waited": round(max(wait.waiting.values()), 1),
        "waiting": [{"rank": rank, "at": _places(diagnosis, rank)} for rank in wait.waiting],
        "missing": [
            {"rank": rank, "at": _places(diagnosis, rank), "did": clipped(diagnosis.last[rank].did)}
            for rank in wait.missing
        ],
        "posted": list(wait.heard),
        "finished": {rank: clipped(how) for rank, how in wait.finished.items()},
        "unknown": list(wait.unknown),
    }


def _places(diagnosis: Diagnosis, rank: int) -> list[str]:
    return [clipped(place) for place in diagnosis.last[rank].places[:3]]


def _seconds(value: float) -> float:
    """Rounded to a tenth of a microsecond."""
    return round(value, 7)
