"""Procedures of all ranks against each other, in plain synchronous code: verbs by NumPy, no network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kfcomm.train.procedure import Procedure, ProcedureCall


class Alone:
    """Communicator calls of an algorithm before its first exchange."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.saved: dict[str, Any] = {}

    def save(self, name: str, x: Any) -> None:
        self.saved[name] = x


def raw(method: Any) -> Procedure[Any]:
    """``raw(way.parameters)(tree)`` is the procedure behind the method."""
    return lambda *args: method.__func__.__wrapped__(method.__self__, *args)  # type: ignore[return-value]


def together(procedures: Sequence[Procedure[Any]]) -> list[Any]:
    """The results by rank; at each turn all ranks make the same call."""
    results: list[Any] = [None] * len(procedures)
    answers: list[Any] = [None] * len(procedures)
    open_ = list(range(len(procedures)))
    while open_:
        calls: dict[int, ProcedureCall] = {}
        for rank in list(open_):
            try:
                calls[rank] = procedures[rank].send(answers[rank])
            except StopIteration as end:
                results[rank] = end.value
                open_.remove(rank)
        if not calls:
            break
        assert len(calls) == len(procedures), "some ranks call, others have ended"
        answers = answered([calls[rank] for rank in range(len(procedures))])
    return results


def answered(calls: Sequence[ProcedureCall]) -> list[Any]:
    assert len({one.verb for one in calls}) == 1
    given = [one.args[0] for one in calls]
    match calls[0].verb:
        case "all_gather_object":
            return [list(given)] * len(calls)
        case "all_reduce_many":
            assert calls[0].options["op"] == "avg"
            return [{name: sum(one[name] for one in given) / len(calls) for name in given[0]}] * len(calls)
        case other:
            raise AssertionError(f"{other} is not scripted")


def model(*values: float) -> np.ndarray:
    return np.array(values, np.float64)
