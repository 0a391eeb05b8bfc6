"""First failure, from exits and earlier reports in any order."""

from hypothesis import given
from hypothesis import strategies as st

from kfcomm.launch.exit_reports import CAUSE_WITHIN_S, LEAVING_WITHIN_S, Blame, Failure
from kfcomm.rendezvous.exit_report import ExitReport
from kfcomm.rendezvous.keyvalue import Exit, Why


def victim(rank: int, at_s: float = 1.0) -> ExitReport:
    return ExitReport(rank, at_s, 1, is_elsewhere=True, summary="PeerLost")


def culprit(rank: int, at_s: float = 0.5, code: int = 3) -> ExitReport:
    return ExitReport(rank, at_s, code, summary="ValueError: why")


def test_no_failure_without_a_failed_rank() -> None:
    blame = Blame(2)
    blame.heard(culprit(0))
    blame.ended(Exit(0, 0), 1.0)
    assert blame.outcome(2.0) is None


def test_failure_without_report_is_first_at_once() -> None:
    blame = Blame(3)
    blame.ended(Exit(1, -9), 1.0)
    assert blame.outcome(1.0) == Failure(1, -9, 1.0)


def test_secondary_failure_is_passed_over_for_a_later_first_failure() -> None:
    blame = Blame(3)
    blame.heard(victim(0))
    blame.ended(Exit(0, 1, Why.ELSEWHERE), 1.0)
    assert blame.outcome(1.0) == 1.0 + CAUSE_WITHIN_S
    blame.ended(Exit(1, -9), 1.1)
    assert blame.outcome(1.1) == Failure(1, -9, 1.1)


def test_the_first_secondary_failure_counts_if_no_other_rank_fails() -> None:
    blame = Blame(3)
    for rank in (2, 0):
        blame.heard(victim(rank, 1.0 - rank / 10))
        blame.ended(Exit(rank, 1, Why.ELSEWHERE), 1.0)
    assert blame.outcome(1.0 + CAUSE_WITHIN_S) == Failure(2, 1, 0.8, Why.ELSEWHERE, "PeerLost")


def test_no_wait_after_all_ranks_have_ended() -> None:
    blame = Blame(2)
    blame.heard(victim(0))
    blame.ended(Exit(0, 1, Why.ELSEWHERE), 1.0)
    blame.ended(Exit(1, 0), 1.0)
    outcome = blame.outcome(1.0)
    assert isinstance(outcome, Failure)
    assert outcome.rank == 0


def test_earlier_leaver_is_awaited_and_gives_its_error_code() -> None:
    blame = Blame(3)
    blame.heard(culprit(1))
    blame.ended(Exit(0, 5), 1.0)
    assert blame.outcome(1.0) == 1.0 + LEAVING_WITHIN_S
    assert blame.outcome(1.0 + LEAVING_WITHIN_S) == Failure(1, 3, 0.5, summary="ValueError: why")
    blame.ended(Exit(1, 3), 2.0)
    assert blame.outcome(2.0) == Failure(1, 3, 0.5, summary="ValueError: why")


def test_earlier_leaver_that_ends_well_is_not_blamed() -> None:
    blame = Blame(3)
    blame.heard(culprit(1))
    blame.ended(Exit(0, 5), 1.0)
    blame.ended(Exit(1, 0), 2.0)
    assert blame.outcome(2.0) == Failure(0, 5, 1.0)


def test_rejoining_clears_the_report() -> None:
    blame = Blame(3)
    blame.heard(culprit(1))
    blame.heard(ExitReport(1))
    blame.ended(Exit(0, 5), 1.0)
    assert blame.outcome(1.0) == Failure(0, 5, 1.0)


def test_later_leaver_is_not_awaited() -> None:
    blame = Blame(3)
    blame.heard(culprit(1, at_s=2.0))
    blame.ended(Exit(0, 5), 1.0)
    assert blame.outcome(2.0) == Failure(0, 5, 1.0)


@given(st.data())
def test_in_whatever_order_news_comes_the_one_with_its_own_error_is_named(data: st.DataObject) -> None:
    """A report comes before the exit of its rank; all else in any order."""
    size = data.draw(st.integers(2, 6))
    guilty = data.draw(st.integers(0, size - 1))
    says = data.draw(st.booleans())
    news = [(rank, step) for rank in range(size) for step in ("said", "ended")]
    order = data.draw(st.permutations(news))
    blame = Blame(size)
    outcomes = []
    waiting = dict.fromkeys(range(size), ("said", "ended"))
    for now, (rank, _) in enumerate(order):
        step, waiting[rank] = waiting[rank][0], waiting[rank][1:]
        if step == "said" and rank != guilty:
            blame.heard(victim(rank, at_s=10.0 + now))
        elif step == "said" and says:
            blame.heard(culprit(rank))
        elif step == "ended":
            end = Exit(rank, 3) if rank == guilty else Exit(rank, 1, Why.ELSEWHERE)
            blame.ended(end, 10.0 + now / 100)
        outcomes.append(blame.outcome(10.0 + now / 100))
    found = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    assert found
    assert {(failure.rank, failure.code) for failure in found} == {(guilty, 3)}
