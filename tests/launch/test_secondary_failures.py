"""Exactly the reported traceback is held back, however it is split."""

from hypothesis import given
from hypothesis import strategies as st

from kfcomm.launch.tracebacks import SecondaryFailures
from kfcomm.rendezvous.exit_report import ExitReport

TEXT = b"Traceback (most recent call last):\n  Tra\nPeerLost: rank 1\n"
REPORT = ExitReport(0, 1.0, 1, is_elsewhere=True, summary="PeerLost: rank 1", text=TEXT, is_printed=True)


def shown(failures: SecondaryFailures, data: bytes, cuts: list[int]) -> bytes:
    """Shown part of data that arrives in pieces."""
    at = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[start:end] for start, end in zip(at, at[1:], strict=False) if start < end]
    return b"".join(failures.shown(0, piece) for piece in [*pieces, b""])


@given(st.lists(st.integers(0, 200), max_size=8), st.binary(max_size=40), st.binary(max_size=40))
def test_the_traceback_alone_is_held_back(cuts: list[int], before: bytes, after: bytes) -> None:
    failures = SecondaryFailures()
    failures.expect(REPORT)
    assert shown(failures, before + TEXT + after, cuts) == before + after
    assert failures.release(1) == {0: b"PeerLost: rank 1\n"}


@given(st.lists(st.integers(0, 200), max_size=8), st.integers(1, len(TEXT) - 1))
def test_other_output_is_shown(cuts: list[int], size: int) -> None:
    failures = SecondaryFailures()
    failures.expect(REPORT)
    data = TEXT[:size] + b"!" + TEXT[size:]
    assert shown(failures, data, cuts) == data
    assert failures.release(1) == {}


def test_the_first_to_fail_is_shown_whole_and_before_the_others() -> None:
    failures = SecondaryFailures()
    for rank in (0, 2):
        failures.expect(REPORT._replace(rank=rank))
        assert failures.shown(rank, TEXT) == b""
    assert list(failures.release(2).items()) == [(2, TEXT), (0, b"PeerLost: rank 1\n")]
    assert failures.release(2) == {}


def test_all_are_shown_whole_without_a_first_failure() -> None:
    failures = SecondaryFailures()
    failures.expect(REPORT)
    failures.shown(0, TEXT)
    assert failures.release(None) == {0: TEXT}
