"""Report of simulated steps, with several calls and compute beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from kfcomm.bench.report import ReportColumn, ReportTable, Row, show_number
from kfcomm.common.sizes import show_seconds, show_size
from kfcomm.simulate import CallResult, SimulatedNetwork, StepResult

_FORMAT: Final = 1


def _time(title: str, seconds: Callable[[Row], float]) -> ReportColumn[Row]:
    return ReportColumn(
        title, "ms", lambda row: show_number(1e3 * seconds(row)), is_setting=False,
        shown=lambda row: show_seconds(seconds(row)),
    )  # fmt: skip


STEP_COLUMNS: Final[tuple[ReportColumn[tuple[str, StepResult]], ...]] = (
    ReportColumn("strategy", "", lambda row: row[0], is_word=True, always=True),
    ReportColumn("hosts", "", lambda row: str(row[1].num_hosts)),
    ReportColumn("ranks", "", lambda row: str(row[1].size)),
    _time("step", lambda row: row[1].seconds),
    _time("compute", lambda row: row[1].compute_s),
    _time("under way", lambda row: row[1].communication_s),
    _time("overlapped", lambda row: row[1].overlapped_s),
    _time("exposed", lambda row: row[1].exposed_s),
    _time("bound", lambda row: row[1].bound_s),
    ReportColumn("busiest port", "", lambda row: row[1].busiest.port, is_setting=False, is_word=True),
)
CALL_COLUMNS: Final[tuple[ReportColumn[tuple[int, CallResult]], ...]] = (
    ReportColumn("call", "", lambda row: row[1].name or f"{row[0]}", is_word=True, always=True),
    ReportColumn("verb", "", lambda row: row[1].verb, is_word=True, always=True),
    ReportColumn("graphs", "", lambda row: row[1].graphs, is_word=True, always=True),
    ReportColumn("size", "", lambda row: show_size(row[1].nbytes), always=True),
    _time("posted", lambda row: row[1].posted_s),
    _time("done", lambda row: row[1].done_s),
    _time("under way", lambda row: row[1].seconds),
)


def label(strategy: str, step: StepResult) -> str:
    """Strategy and world of a step."""
    return f"{strategy}, {step.size} ranks on {step.num_hosts} hosts"


@dataclass(slots=True)
class SimulatedSteps:
    """Steps on a simulated network; implements ``report.Shown``."""

    network: SimulatedNetwork  # the simulated one
    source: str  # where it is described
    workload: str  # as it was given
    results: list[tuple[str, StepResult]] = field(default_factory=list)  # so far, by strategy of the step

    def title(self) -> str:
        """One line on what was simulated."""
        return f"simulated step; network: {self.source}"

    def as_text(self) -> str:
        """A table of the steps, and one of the calls of each."""
        if not self.results:
            return ""
        parts = [self.title(), ReportTable.of(self.results, STEP_COLUMNS).as_text()]
        for strategy, step in self.results:
            calls = ReportTable.of(list(enumerate(step.calls, 1)), CALL_COLUMNS).as_text()
            parts += ["", f"calls, {label(strategy, step)}", calls]
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
        """A page with the steps as bars, and each with its calls and compute over time."""
        from kfcomm.bench import pages  # imports matplotlib

        return pages.simulated_steps(self)
