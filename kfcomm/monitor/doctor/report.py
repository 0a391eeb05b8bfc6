"""A diagnosis in words, and for machines."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from kfcomm.common.sizes import ranks_in_words
from kfcomm.monitor.doctor.diagnosis import Diagnosis, Last, Wait
from kfcomm.monitor.doctor.findings import findings

MAX_WAITS = 50
MAX_RANKS = 16


def as_text(diagnosis: Diagnosis) -> str:
    """The whole diagnosis, for people."""
    lines = [_head(diagnosis)]
    if not diagnosis.waits:
        lines.append("Nothing waits.")
    for wait in diagnosis.waits[:MAX_WAITS]:
        lines += ["", *_wait(diagnosis, wait)]
    if len(diagnosis.waits) > MAX_WAITS:
        lines += ["", f"... and {len(diagnosis.waits) - MAX_WAITS} more, which have waited for less long"]
    found = findings(diagnosis)
    if found:
        lines += ["", "What stands out:", *(f"- {one.text}" for one in found)]
    return "\n".join(lines)


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The whole diagnosis as JSON-able values: the fields of ``Diagnosis`` but for its records, and ``findings``."""
    return {
        "size": diagnosis.size,
        "dumps": sorted(diagnosis.records),
        "absent": list(diagnosis.absent),
        "waits": [asdict(wait) for wait in diagnosis.waits],
        "last": {rank: asdict(last) for rank, last in diagnosis.last.items()},
        "lost": diagnosis.lost,
        "findings": [asdict(one) for one in findings(diagnosis)],
    }


def _head(diagnosis: Diagnosis) -> str:
    dumps = f"dumps of {ranks_in_words(list(diagnosis.records))}"
    absent = f", none of {ranks_in_words(diagnosis.absent)}" if diagnosis.absent else ""
    return f"A world of {diagnosis.size}: {dumps}{absent}."


def _wait(diagnosis: Diagnosis, wait: Wait) -> list[str]:
    waited_s = max(wait.waiting.values())
    lines = [wait.title, f"  waiting: {ranks_in_words(list(wait.waiting))}, for {waited_s:.1f} s"]
    for how in sorted(set(wait.finished.values())):
        ranks = [rank for rank, end in wait.finished.items() if end == how]
        lines.append(f"  {how}: {ranks_in_words(ranks)}")
    if wait.heard:
        lines.append(f"  posted, by what the others have heard: {ranks_in_words(wait.heard)}")
    verb = {"recv": "not sent", "send": "not received"}.get(wait.verb, "not posted")
    lines.extend(
        f"  {verb}: rank {rank}, {_used(diagnosis, wait, rank)}{_last(diagnosis.last[rank])}"
        for rank in wait.missing[:MAX_RANKS]
    )
    if len(wait.missing) > MAX_RANKS:
        lines.append(f"  {verb}: {len(wait.missing) - MAX_RANKS} more, {ranks_in_words(wait.missing[MAX_RANKS:])}")
    if wait.unknown:
        lines.append(f"  no dump: {ranks_in_words(wait.unknown)}")
    return lines


def _used(diagnosis: Diagnosis, wait: Wait, rank: int) -> str:
    """How far a missing rank has come with the name."""
    if not wait.key.name or wait.verb in ("recv", "send"):
        return ""
    uses = diagnosis.records[rank].uses.get((wait.key.group, wait.key.name), 0)
    return f"whose last use of the name was #{uses - 1}; " if uses else "which has not used the name; "


def _last(last: Last) -> str:
    places = f"; at {'; '.join(last.places[:3])}" if last.places else ""
    if last.time_s is None:
        return f"it {last.did}{places}"
    clock = time.strftime("%H:%M:%S", time.localtime(last.time_s))
    return f"it last {last.did} at {clock}, {last.before_dump_s:.1f} s before its dump{places}"
