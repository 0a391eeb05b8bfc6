"""A picture of training steps: what the program waited for, and which gradients were under way when."""

from __future__ import annotations

import time
from collections.abc import Mapping
from html import escape
from types import TracebackType
from typing import Any, ClassVar, Self

import kfcomm.sync
from kfcomm.engine.observer import Observer
from kfcomm.types import override

WIDTH, ROW, LEFT, GAP = 960, 14, 150, 3
COLOURS = {"backward": "#7aa6c2", "waiting": "#d1495b", "gradient": "#8fb78f"}


class Recorder(Observer):
    """An observer that keeps spans of the program and of collectives.

    Attributes:
        bars: row, colour, title, begin and end in seconds of each.
    """

    sees_chunks: ClassVar = True

    def __init__(self, comm: kfcomm.sync.Communicator) -> None:
        self._engine = comm._session.engine
        self._begun: dict[Any, float] = {}
        self.bars: list[tuple[str, str, str, float, float]] = []

    def __enter__(self) -> Self:
        self._before = self._engine.observers
        self._engine.observe((*(self._before or ()), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.observe(self._before)

    @override
    def posted(self, operation: Any) -> None:
        self._begun[operation] = time.monotonic()

    @override
    def failed(self, operation: Any, reason: str, *, is_last: bool) -> None:
        self._begun.pop(operation, None)

    @override
    def done(self, operation: Any, *, is_last: bool) -> None:
        begun = self._begun.pop(operation, None)
        if begun is not None:
            name = operation.collective.key.name
            self.bars.append((name, "gradient", name, begun, time.monotonic()))

    @override
    def span(self, name: str, since_ns: int, until_ns: int, /, **_: Any) -> None:
        kind = name.split()[0]
        self.bars.append(("program", kind, name, since_ns / 1e9, until_ns / 1e9))


def draw(ways: Mapping[str, Recorder]) -> str:
    """One SVG: below each other the ways, in each the program above its gradients, on one scale of time."""
    longest = max(_end(one) - _begin(one) for one in ways.values())
    lines: list[str] = []
    y = 0.0
    for title, one in ways.items():
        y += 2 * ROW
        lines.append(f'<text x="4" y="{y - 4}" font-weight="bold">{escape(title)}</text>')
        for row in _rows(one):
            lines.append(f'<text x="4" y="{y + ROW - 4}">{escape(row[:26])}</text>')
            for name, kind, label, begun, ended in one.bars:
                if name == row:
                    x = LEFT + (begun - _begin(one)) / longest * (WIDTH - LEFT)
                    wide = max(0.5, (ended - begun) / longest * (WIDTH - LEFT))
                    tip = escape(f"{label}: {1e3 * (ended - begun):.1f} ms")
                    lines.append(
                        f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{ROW - GAP}" '
                        f'fill="{COLOURS.get(kind, "#999")}"><title>{tip}</title></rect>'
                    )
            y += ROW
    foot = f"{1e3 * longest:.0f} ms from left to right. Blue: backward. Red: waiting. Green: gradients under way."
    lines.append(f'<text x="{LEFT}" y="{y + ROW}">{foot}</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 2 * ROW:.0f}" font-family="sans-serif" '
    )
    return head + 'font-size="10">\n' + "\n".join(lines) + "\n</svg>\n"


def _rows(one: Recorder) -> list[str]:
    found = [bar[0] for bar in sorted(one.bars, key=lambda bar: bar[3]) if bar[0] != "program"]
    return ["program", *dict.fromkeys(found)]


def _begin(one: Recorder) -> float:
    return min(bar[3] for bar in one.bars)


def _end(one: Recorder) -> float:
    return max(bar[4] for bar in one.bars)
