"""Results as a table: the same cells for the terminal and for a page.

Settings that are equal in all lines stand once, above them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from kfcomm.bench.figures import Result
from kfcomm.common.sizes import show_size

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """One column.

    Attributes:
        title: its head.
        unit: of its numbers; empty for words.
        cell: the text for a row.
        is_setting: it shows an option, not a result.
        is_word: it shows words, which are set to the left.
        always: it is shown even if all rows say the same.
    """

    title: str
    unit: str
    cell: Callable[[Row], str]
    is_setting: bool = True
    is_word: bool = False
    always: bool = False


def show_number(value: float) -> str:
    """Four digits: enough for what can be measured, and easy to compare down a column; of small numbers, two."""
    if value >= 1000:
        return f"{value:.0f}"
    if value < 0.01:
        return f"{value:.2g}"
    return f"{value:.{3 if value < 10 else 2 if value < 100 else 1}f}"


COLUMNS: Final[tuple[Column[Result], ...]] = (
    Column("collective", "", lambda result: result.case.workload or result.case.collective.value, is_word=True),
    Column("mode", "", lambda result: result.case.mode or "", is_word=True),
    Column("op", "", lambda result: result.case.op or "", is_word=True),
    Column("dtype", "", lambda result: result.case.dtype, is_word=True),
    Column("strategy", "", lambda result: result.case.strategy, is_word=True),
    Column("transport", "", lambda result: result.case.transport, is_word=True),
    Column("size", "", lambda result: show_size(result.case.nbytes), always=True),
    Column("iterations", "", lambda result: str(result.case.iterations)),
    Column("p50", "µs", lambda result: show_number(result.p50_s * 1e6), is_setting=False),
    Column("p99", "µs", lambda result: show_number(result.p99_s * 1e6), is_setting=False),
    Column("algbw", "GB/s", lambda result: show_number(result.algbw), is_setting=False),
    Column("busbw", "GB/s", lambda result: show_number(result.busbw), is_setting=False),
)


@dataclass(frozen=True, slots=True)
class Table:
    """The cells.

    Attributes:
        common: title and value of each setting that is the same in all lines.
        columns: the columns that are left.
        rows: their texts, by line.
    """

    common: tuple[tuple[str, str], ...]
    columns: tuple[Column[Any], ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, results: Sequence[Row], among: Sequence[Column[Row]]) -> Table:
        """The table of at least one result, with those of the columns in which there is something to see."""
        common: list[tuple[str, str]] = []
        columns: list[Column[Row]] = []
        for column in among:
            cells = {column.cell(result) for result in results}
            if len(cells) > 1 or not column.is_setting or column.always:
                columns.append(column)
            elif cells != {""}:
                common.append((column.title, column.cell(results[0])))
        rows = tuple(tuple(column.cell(result) for column in columns) for result in results)
        return cls(tuple(common), tuple(columns), rows)

    def as_text(self) -> str:
        """Lines with words to the left, numbers to the right."""
        heads = [tuple(column.title for column in self.columns), tuple(column.unit for column in self.columns)]
        widths = [max(map(len, cells)) for cells in zip(*heads, *self.rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if column.is_word else cell.rjust(width)
                for cell, width, column in zip(cells, widths, self.columns, strict=True)
            ).rstrip()
            for cells in (*heads, *self.rows)
        ]
        above = self.settings()
        return "\n".join([above, *lines] if above else lines)

    def settings(self) -> str:
        """Settings that are equal in all lines."""
        return ", ".join(f"{title} {value}" for title, value in self.common)
