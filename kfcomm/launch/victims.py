"""The tracebacks of ranks that failed because of another: held back until it is known which.

A rank tells its traceback to the letter before it prints it; what comes from it is looked through for just that, so
that what is printed otherwise, or elsewhere, is shown as it is. Sans-IO: bytes in, bytes out.

Memory: for each rank that failed so, twice what it tells (at most `kfcomm.rendezvous.exit_report.MAX_TEXT_NBYTES`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kfcomm.rendezvous.exit_report import ExitReport


@dataclass(slots=True)
class Victims:
    """What is held back of the error stream of each rank."""

    _expected: dict[int, ExitReport] = field(default_factory=dict)
    _partly: dict[int, bytes] = field(default_factory=dict)
    _held: dict[int, ExitReport] = field(default_factory=dict)

    def expect(self, farewell: ExitReport) -> None:
        """A rank will print this traceback next."""
        if farewell.rank not in self._held:
            self._expected[farewell.rank] = farewell

    def shown(self, rank: int, data: bytes) -> bytes:
        """What is to be shown of what a rank has written; at its end, of nothing."""
        expected = self._expected.get(rank)
        if expected is None:
            return data
        seen = self._partly.pop(rank, b"") + data
        before, found, after = seen.partition(expected.text)
        if found:
            self._held[rank] = self._expected.pop(rank)
            return before + after
        kept = _overlap(seen, expected.text) if data else 0
        if kept:
            self._partly[rank] = seen[-kept:]
        return seen[: len(seen) - kept]

    def release(self, first: int | None) -> dict[int, bytes]:
        """What was held back, by rank: whole for the one that failed first, a line for each other one."""
        held, self._held = self._held, {}
        return {
            rank: farewell.text if first in (rank, None) else f"{farewell.summary}\n".encode()
            for rank, farewell in sorted(held.items(), key=lambda item: item[0] != first)
        }


def _overlap(seen: bytes, text: bytes) -> int:
    """With how many of its first bytes ``text`` may have begun at the end of what was seen."""
    return next((size for size in range(min(len(seen), len(text) - 1), 0, -1) if seen.endswith(text[:size])), 0)
