"""Report of simulated steps, with several calls and compute beside them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final

from kfcomm.bench.report import ReportColumn, ReportTable, show_number
from kfcomm.common.sizes import show_size
from kfcomm.errors import ConfigError
from kfcomm.simulate import CallResult, SimulatedNetwork, StepResult

_FORMAT: Final = 1


def _ms(seconds: float) -> str:
    return show_number(seconds * 1e3)


STEP_COLUMNS: Final[tuple[ReportColumn[tuple[str, StepResult]], ...]] = (
    ReportColumn("strategy", "", lambda row: row[0], is_word=True, always=True),
    ReportColumn("hosts", "", lambda row: str(row[1].num_hosts)),
    ReportColumn("ranks", "", lambda row: str(row[1].size)),
    ReportColumn("step", "ms", lambda row: _ms(row[1].seconds), is_setting=False),
    ReportColumn("compute", "ms", lambda row: _ms(row[1].compute_s), is_setting=False),
    ReportColumn("under way", "ms", lambda row: _ms(row[1].communication_s), is_setting=False),
    ReportColumn("overlapped", "ms", lambda row: _ms(row[1].overlapped_s), is_setting=False),
    ReportColumn("exposed", "ms", lambda row: _ms(row[1].exposed_s), is_setting=False),
    ReportColumn("bound", "ms", lambda row: _ms(row[1].bound_s), is_setting=False),
    ReportColumn("busiest port", "", lambda row: row[1].busiest.port, is_setting=False, is_word=True),
)
CALL_COLUMNS: Final[tuple[ReportColumn[tuple[int, CallResult]], ...]] = (
    ReportColumn("call", "", lambda row: row[1].name or f"{row[0]}", is_word=True, always=True),
    ReportColumn("verb", "", lambda row: row[1].verb, is_word=True, always=True),
    ReportColumn("graphs", "", lambda row: row[1].graphs, is_word=True, always=True),
    ReportColumn("size", "", lambda row: show_size(row[1].nbytes), always=True),
    ReportColumn("posted", "ms", lambda row: _ms(row[1].posted_s), is_setting=False),
    ReportColumn("done", "ms", lambda row: _ms(row[1].done_s), is_setting=False),
    ReportColumn("under way", "ms", lambda row: _ms(row[1].seconds), is_setting=False),
)


@dataclass(slots=True)
class SimulatedSteps:
    """Steps on a simulated network; implements ``report.Shown``."""

    network: SimulatedNetwork  # the simulated one
    source: str  # where it is described
    workload: str  # as it was given
    results: list[tuple[str, StepResult]] = field(default_factory=list)  # so far, by strategy of the step

    def as_text(self) -> str:
        """A table of the steps, and one of the calls of each."""
        if not self.results:
            return ""
        parts = [f"simulated step; network: {self.source}", ReportTable.of(self.results, STEP_COLUMNS).as_text()]
        for strategy, step in self.results:
            calls = ReportTable.of(list(enumerate(step.calls, 1)), CALL_COLUMNS).as_text()
            parts += ["", f"calls, {strategy}, {step.size} ranks on {step.num_hosts} hosts", calls]
        return "\n".join(parts) + "\n"

    def as_json(self) -> dict[str, Any]:
        """Everything that the results depend on, and the results."""
        return {
            "format": _FORMAT,
            "network": asdict(self.network),
            "source": self.source,
            "workload": self.workload,
            "results": [{"strategy": strategy, **step.as_json()} for strategy, step in self.results],
        }

    def as_html(self) -> str:
        """Refuse: a page plots times over sizes.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "--html plots times over sizes, and --workload gives a single step: leave --html out, or use --json"
        )
