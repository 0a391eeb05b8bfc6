"""Agreements of ranks joined by a list: news, time, and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kfcomm.core.membership import MAX_PART_NBYTES, Message
from kfcomm.engine import agreements
from kfcomm.engine.agreements import AgreementCall, Agreements
from kfcomm.errors import CollectiveMismatch, CollectiveTimeout, ConfigError, Partitioned, PeerLost

LONG_S = 60.0


class Ranks:
    """Network in which all living ranks hear a message in a later turn."""

    def __init__(self, size: int) -> None:
        self.dead: set[int] = set()
        self.all = [Agreements(rank, size, lambda n, m, rank=rank: self._tell(rank, n, m)) for rank in range(size)]

    def _tell(self, rank: int, number: int, message: Message) -> None:
        loop = asyncio.get_running_loop()
        for other, one in enumerate(self.all):
            if other != rank and not {rank, other} & self.dead:
                loop.call_soon(one.on_message, rank, number, message)

    def lose(self, rank: int, *, has_ended: bool) -> None:
        self.dead.add(rank)
        for one in self.all:
            one.lost(rank, has_ended=has_ended)


@pytest.mark.asyncio
async def test_one_after_the_other_and_who_dies_is_left_out() -> None:
    ranks = Ranks(4)
    for number in range(5):
        said = await asyncio.gather(*(one.decide(AgreementCall.AGREE, b"%d" % number, LONG_S) for one in ranks.all))
        assert said == [dict.fromkeys(range(4), b"%d" % number)] * 4
    waiting = [asyncio.ensure_future(one.decide(AgreementCall.AGREE, b"x", LONG_S)) for one in ranks.all[:3]]
    await asyncio.sleep(0)
    ranks.lose(3, has_ended=True)
    assert await asyncio.gather(*waiting) == [dict.fromkeys(range(3), b"x")] * 3
    ranks.lose(0, has_ended=True)
    ranks.lose(1, has_ended=True)
    assert await ranks.all[2].decide(AgreementCall.AGREE, b"alone", LONG_S) == {2: b"alone"}


@pytest.mark.asyncio
async def test_unawaited_agreement_resumes_with_its_first_value() -> None:
    ranks = Ranks(3)
    with pytest.raises(CollectiveTimeout, match=r"agree\(\) is not done after 0 s: ranks \[1, 2\] have not") as failure:
        await ranks.all[0].decide(AgreementCall.AGREE, b"first", 0.0)
    assert failure.value.missing == (1, 2)
    assert failure.value.arrived == (0,)
    with pytest.raises(ConfigError, match=r"agree\(\) is still under way"):
        await ranks.all[0].decide(AgreementCall.SHRINK, b"", LONG_S)
    said = await asyncio.gather(*(one.decide(AgreementCall.AGREE, b"second", LONG_S) for one in ranks.all))
    assert said == [{0: b"first", 1: b"second", 2: b"second"}] * 3


@pytest.mark.asyncio
async def test_calls_of_two_tasks_take_turns() -> None:
    ranks = Ranks(2)
    calls = [one.decide(AgreementCall.AGREE, b"%d" % number, LONG_S) for number in range(3) for one in ranks.all]
    assert await asyncio.gather(*calls) == [{0: b"%d" % number, 1: b"%d" % number} for number in (0, 0, 1, 1, 2, 2)]


@pytest.mark.asyncio
async def test_mismatched_agreement_names_the_rank() -> None:
    ranks = Ranks(2)
    calls = (one.decide(call, b"", LONG_S) for one, call in zip(ranks.all, AgreementCall, strict=True))
    for error in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(error, CollectiveMismatch)
        assert "rank 0 called agree(), rank 1 called shrink()" in str(error)


@pytest.mark.asyncio
async def test_too_much_to_agree_on_is_refused() -> None:
    for size, nbytes in ((2, MAX_PART_NBYTES), (1000, 100)):
        with pytest.raises(ConfigError, match=f"{size} ranks cannot agree on {nbytes} bytes"):
            await Agreements(0, size, lambda *_: None).decide(AgreementCall.AGREE, bytes(nbytes), LONG_S)


@pytest.mark.asyncio
async def test_half_of_the_ranks_go_on_with_a_word_and_not_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreements, "CUT_OFF_AFTER_S", 0.0)
    asked: list[list[int]] = []

    async def word(living: Sequence[int], rivals: Sequence[int]) -> bool:
        assert not rivals
        asked.append(list(living))
        return len(asked) > 1

    ranks = Ranks(2)
    ranks.lose(1, has_ended=False)
    for wanted in (None, word):
        with pytest.raises(Partitioned, match=r"ranks \[0\] cannot go on: they are 1 of 2") as failure:
            await ranks.all[0].decide(AgreementCall.SHRINK, b"x", LONG_S, wanted)
        assert failure.value.members == (0,)
    assert await ranks.all[0].decide(AgreementCall.SHRINK, b"", LONG_S, word) == {0: b"x"}
    assert asked == [[0], [0]]


@pytest.mark.asyncio
@pytest.mark.parametrize(("size", "rivals"), [(3, [1]), (4, [1, 2]), (5, [1, 2])])
async def test_store_decides_after_silent_ranks_have_ended(
    monkeypatch: pytest.MonkeyPatch, size: int, rivals: list[int]
) -> None:
    monkeypatch.setattr(agreements, "CUT_OFF_AFTER_S", 0.0)
    ranks, left = Ranks(size), [rank for rank in range(1, size) if rank not in rivals]
    ranks.lose(0, has_ended=True)
    for rank in rivals:
        ranks.lose(rank, has_ended=False)
    asked: list[tuple[list[int], list[int]]] = []

    async def word(living: Sequence[int], rivals: Sequence[int]) -> bool:
        asked.append((list(living), list(rivals)))
        for rank in rivals:  # a moment later
            asyncio.get_running_loop().call_soon(lambda rank=rank: ranks.lose(rank, has_ended=True))
        return True

    said = await asyncio.gather(*(ranks.all[rank].decide(AgreementCall.SHRINK, b"x", LONG_S, word) for rank in left))
    assert said == [dict.fromkeys(left, b"x")] * len(left)
    assert asked[0] == (left, rivals)


@pytest.mark.asyncio
async def test_wait_for_the_end_of_silent_ranks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreements, "CUT_OFF_AFTER_S", 0.0)
    monkeypatch.setattr(agreements, "FENCED_WITHIN_S", 0.0)
    asked: list[Sequence[int]] = []

    async def word(_: Sequence[int], rivals: Sequence[int]) -> bool:
        asked.append(rivals)
        return True

    ranks = Ranks(3)
    ranks.lose(0, has_ended=True)
    ranks.lose(1, has_ended=False)
    with pytest.raises(Partitioned):
        await ranks.all[2].decide(AgreementCall.SHRINK, b"", LONG_S, word)
    assert asked == [[1]]


@pytest.mark.asyncio
async def test_less_than_half_do_not_even_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreements, "CUT_OFF_AFTER_S", 0.0)

    async def word(*_: Sequence[int]) -> bool:
        raise AssertionError

    ranks = Ranks(3)
    for rank in (1, 2):
        ranks.lose(rank, has_ended=False)
    with pytest.raises(Partitioned):
        await ranks.all[0].decide(AgreementCall.SHRINK, b"", LONG_S, word)


@pytest.mark.asyncio
async def test_partitioned_rank_waits_briefly_for_exit_reports() -> None:
    ranks = Ranks(2)
    ranks.lose(1, has_ended=False)
    waiting = asyncio.ensure_future(ranks.all[0].decide(AgreementCall.SHRINK, b"", LONG_S))
    await asyncio.sleep(0)
    ranks.lose(1, has_ended=True)
    assert await waiting == {0: b""}


@pytest.mark.asyncio
async def test_lost_rank_is_notified() -> None:
    ranks = Ranks(2)
    waiting = asyncio.ensure_future(ranks.all[0].decide(AgreementCall.SHRINK, b"", LONG_S))
    await asyncio.sleep(0)
    ranks.all[0].fail(PeerLost("the others have given this rank up", rank=0))
    ranks.all[0].fail(PeerLost("later", rank=0))
    with pytest.raises(PeerLost, match="given this rank up"):
        await waiting


@pytest.mark.asyncio
async def test_misplaced_messages_are_ignored() -> None:
    said: list[Message] = []
    one = Agreements(0, 2, lambda _, message: said.append(message))
    one.on_message(1, 7, (0, b"far ahead"))
    for number in range(4):
        one.on_message(1, number, (0, b""))
        one.on_message(1, number, (5, ((0, b"\0"), (1, b"\0"))))
        await one.decide(AgreementCall.AGREE, b"", LONG_S)
    before = len(said)
    one.on_message(1, 0, (1, 9, []))  # nobody can be so far behind
    assert len(said) == before
    one.on_message(1, 3, (1, 9, []))
    assert len(said) == before + 1
