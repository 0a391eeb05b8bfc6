"""Results of simulations, as text, JSON and page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from kfcomm.bench.table import Column, Table, show_number
from kfcomm.common.sizes import show_size
from kfcomm.simulate import Result, SimulatedNetwork

_FORMAT = 1

COLUMNS: Final[tuple[Column[Result], ...]] = (
    Column("strategy", "", lambda result: _strategy(result), is_word=True),
    Column("hosts", "", lambda result: str(result.num_hosts)),
    Column("ranks", "", lambda result: str(result.size)),
    Column("size", "", lambda result: show_size(result.nbytes), always=True),
    Column("time", "ms", lambda result: show_number(result.seconds * 1e3), is_setting=False),
    Column("algbw", "GB/s", lambda result: show_number(result.algbw), is_setting=False),
    Column("busbw", "GB/s", lambda result: show_number(result.busbw), is_setting=False),
    Column("bound", "ms", lambda result: show_number(result.bound_s * 1e3), is_setting=False),
    Column("bound/time", "%", lambda result: f"{100 * result.bound_s / result.seconds:.1f}", is_setting=False),
    Column("busiest port", "", lambda result: result.busiest.port, is_setting=False, is_word=True),
    Column("messages", "", lambda result: str(result.messages), is_setting=False),
    Column("events", "", lambda result: str(result.events), is_setting=False),
)


@dataclass(slots=True)
class Simulations:
    """Report of simulations; implements ``report.Shown``.

    Attributes:
        network: the simulated one; hosts that it does not list are like its default.
        source: where it is described.
        dtype: of the elements.
        results: so far.
    """

    network: SimulatedNetwork
    source: str
    dtype: str = "float32"
    results: list[Result] = field(default_factory=list)

    def title(self) -> str:
        """One line on what was simulated."""
        return f"simulated all_reduce of {self.dtype}; network: {self.source}"

    def as_text(self) -> str:
        """Title and table; nothing without results."""
        return f"{self.title()}\n{self.table().as_text()}\n" if self.results else ""

    def table(self) -> Table:
        """The table of at least one result."""
        return Table.of(self.results, COLUMNS)

    def as_json(self) -> dict[str, Any]:
        """Everything that the results depend on, and the results."""
        return {
            "format": _FORMAT,
            "network": asdict(self.network),
            "source": self.source,
            "dtype": self.dtype,
            "results": [result.as_json() for result in self.results],
        }

    def as_html(self) -> str:
        """A page with plots over size and over ranks, and the table."""
        from kfcomm.bench import pages  # imports matplotlib

        return pages.simulated(self)


def _strategy(result: Result) -> str:
    """The strategy, and which graphs it took if it has several."""
    return result.strategy if result.graphs == result.strategy else f"{result.strategy}: {result.graphs}"


def worlds_of(results: Sequence[Result]) -> tuple[tuple[int, int], ...]:
    """``(hosts, ranks)`` of each world that was simulated, in order."""
    return tuple(dict.fromkeys((result.num_hosts, result.size) for result in results))
