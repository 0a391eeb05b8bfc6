"""Outcome, on all ranks, of calls that are over on some of them: a pure function of what the ranks report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kfcomm.elastic.call_log import CallOutcome, Key, Row, Standing


def decide(said: Sequence[tuple[int, Sequence[Row]]], uids: Sequence[int]) -> Mapping[tuple[Key, int], CallOutcome]:
    """Decide, from each rank's step and rows, the outcome of calls that are over on some ranks and not on all.

    Done on one rank is done on all, failed on one and done on none is failed on all; any other call is repeated.
    """
    done: dict[tuple[Key, int], list[CallOutcome]] = {}
    failed: dict[tuple[Key, int], list[str]] = {}
    over: dict[tuple[Key, int], set[int]] = {}
    for uid, (_, rows) in zip(uids, said, strict=True):
        for name, number, standing, contributors, step, why in rows:
            place = ((name, number), step)
            if standing == Standing.DONE:
                done.setdefault(place, []).append(CallOutcome(step, uid, tuple(contributors)))
            elif standing == Standing.FAILED:
                failed.setdefault(place, []).append(why)
            else:
                continue
            over.setdefault(place, set()).add(uid)
    # A rank has ended the calls of the steps before its own, and may have dropped them. It lacks what it has not ended
    # of its own step and of later ones; a boundary belongs to the step that it begins.
    steps = {uid: step for uid, (step, _) in zip(uids, said, strict=True)}
    lacked = [
        place for place, having in over.items() if any(place[1] >= steps[uid] for uid in uids if uid not in having)
    ]
    # The lowest rank that has the result sends it: the first, since ``uids`` is in the order of ranks. Done wins over
    # failed: a caller somewhere has the result already, and cannot take it back.
    return {
        place: done[place][0] if place in done else CallOutcome(place[1], -1, (), failed[place][0]) for place in lacked
    }
