"""Outcomes of calls on a broken link, by the answer of its peer and whether it has left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kfcomm.core.cause import Cause, CauseKind
from kfcomm.engine.recovery import LinkRecovery

LEFT = Cause(CauseKind.LOST, 1, "rank 1 has left")


class Desk:
    """The link recovery of rank 0, whose link to rank 1 has broken under three collectives."""

    def __init__(self) -> None:
        key = SimpleNamespace(group_id=b"g", name="a")
        self.carried = [SimpleNamespace(key=key, seq=seq) for seq in range(3)]
        self.lost: dict[int, Cause] = {}
        self.failed: list[tuple[int, CauseKind]] = []
        self.answers: list[Any] = []
        self.timers: list[Any] = []
        router = SimpleNamespace(rank=0, lost=self.lost, broke=lambda _: list(self.carried), owes=lambda _: False)
        loop = SimpleNamespace(call_later=lambda _, call, *args: self.timers.append(lambda: call(*args)))
        links = SimpleNamespace(closing=False)
        control = SimpleNamespace(suspect=lambda *_: None, query=lambda ops, peer, answer: self.answers.append(answer))
        engine: Any = SimpleNamespace(router=router, links=links, reactor=loop, control=control)
        engine.abort = lambda one, cause: self.failed.append((one.seq, cause.kind))
        recovery: Any = LinkRecovery(engine)
        recovery.outgoing_broke(SimpleNamespace(peer=1), "gone")

    def told(self, *posted: bool) -> list[tuple[int, CauseKind]]:
        """Failed calls with their causes, once the peer has answered."""
        self.answers[0](1, posted, "")
        return self.failed


def test_with_a_peer_that_lives_all_fail_by_the_link() -> None:
    assert Desk().told(True, False, True) == [(seq, CauseKind.LINK) for seq in range(3)]


@pytest.mark.parametrize("posted", [(True, False), (True, False, True, False)])
def test_calls_not_posted_by_a_leaving_rank_fail(posted: tuple[bool, ...]) -> None:
    """However long its answer is: what it says nothing of fails by the link."""
    desk = Desk()
    desk.lost[1] = LEFT
    assert desk.told(*posted) == [(0, CauseKind.LINK), (1, CauseKind.LOST), (2, CauseKind.LINK)]


def test_without_an_answer_all_fail_by_the_link_in_the_end_and_once() -> None:
    desk = Desk()
    assert not desk.failed
    desk.timers[0]()
    desk.timers[0]()
    assert desk.failed == [(seq, CauseKind.LINK) for seq in range(3)]
    assert desk.told(True) == desk.failed
