"""Diagrams of the documentation: boxes in a grid, and arrows between neighbours.

    python docs/pictures.py      writes docs/style/*.svg

A test compares the files with what this writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 150, 62, 56, 54, 14
COLOURS: Final = {"plain": ("#edf2ff", "#748ffc"), "good": ("#ebfbee", "#51cf66"), "bad": ("#fff0f0", "#fa5252")}
"""Fill and border of each kind of box."""
FONT: Final = "DejaVu Sans, Helvetica, Arial, sans-serif"
HEAD_OF_ARROWS: Final = (
    '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path d="M0 0.6 L8 4 L0 7.4 z" fill="#495057"/></marker></defs>'
)


@dataclass(frozen=True)
class Box:
    """One box.

    Attributes:
        at: column and row.
        lines: the first is in bold.
    """

    at: tuple[int, int]
    lines: tuple[str, ...]
    kind: str = "plain"

    @property
    def left(self) -> int:
        """Left edge."""
        return MARGIN + self.at[0] * (WIDTH + GAP_X)

    @property
    def top(self) -> int:
        """Upper edge."""
        return MARGIN + self.at[1] * (HEIGHT + GAP_Y)


@dataclass(frozen=True)
class Arrow:
    """An arrow from one box to another in the same row or column, by their numbers."""

    start: int
    end: int


CALL = (
    (
        Box((0, 0), ("call", "array, name, options")),
        Box((1, 0), ("plan", "cached by name")),
        Box((2, 0), ("posted", "matched by name", "and use count")),
        Box((3, 0), ("under way", "slot, chunks along", "graphs, or NCCL")),
        Box((4, 0), ("done", "result, and no link", "reads the input"), "good"),
        Box((2, 1), ("waits", "for ranks that have", "not posted")),
        Box((3, 1), ("failed", "mismatch, timeout,", "abort, lost peer"), "bad"),
        Box((4, 1), ("all ranks know", "an error on each rank", "where it is pending"), "bad"),
    ),
    (Arrow(0, 1), Arrow(1, 2), Arrow(2, 3), Arrow(3, 4), Arrow(2, 5), Arrow(3, 6), Arrow(6, 7), Arrow(5, 6)),
)
STEP = (
    (
        Box((0, 0), ("boundary", "same position?", "requests, plans")),
        Box((1, 0), ("step", "indices of a batch")),
        Box((2, 0), ("calls", "recorded in the log")),
        Box((3, 0), ("results", "the same on all ranks"), "good"),
        Box((4, 0), ("next boundary", "samples count once"), "good"),
        Box((2, 1), ("a rank is lost", "calls fail in the log,", "not in the program"), "bad"),
        Box((3, 1), ("agreement", "who survives, and", "what is done")),
        Box((4, 1), ("finished", "result sent, or call", "repeated, for all"), "good"),
    ),
    (Arrow(0, 1), Arrow(1, 2), Arrow(2, 3), Arrow(3, 4), Arrow(2, 5), Arrow(5, 6), Arrow(6, 7), Arrow(7, 4)),
)
RANK = (
    (
        Box((0, 0), ("process", "imports, data, model")),
        Box((1, 0), ("init", "waits to be admitted")),
        Box((2, 0), ("epoch", "a rank of a world", "that never changes")),
        Box((3, 0), ("next epoch", "another rank perhaps,", "the same uid")),
        Box((4, 0), ("released, or closes", "leaves between steps"), "good"),
        Box((1, 1), ("spare", "waits in init until", "a rank is lost")),
        Box((2, 1), ("silent, or ended", "stopped, killed,", "out of reach"), "bad"),
        Box((3, 1), ("lost", "the others agree,", "and continue"), "bad"),
        Box((4, 1), ("comes back", "PeerLost; may join", "as a new rank"), "bad"),
    ),
    (
        Arrow(0, 1), Arrow(1, 2), Arrow(2, 3), Arrow(3, 4), Arrow(5, 1), Arrow(2, 6), Arrow(6, 7), Arrow(7, 8),
    ),
)  # fmt: skip
PICTURES = {"call": CALL, "step": STEP, "rank": RANK}


def as_svg(boxes: tuple[Box, ...], arrows: tuple[Arrow, ...]) -> str:
    """Draw the boxes and arrows."""
    width = max(box.left for box in boxes) + WIDTH + MARGIN
    height = max(box.top for box in boxes) + HEIGHT + MARGIN
    size = f'width="{width}" height="{height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {size} font-family="{FONT}">',
            HEAD_OF_ARROWS,
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *(_line(boxes[arrow.start], boxes[arrow.end]) for arrow in arrows),
            *(part for box in boxes for part in _box(box)),
            "</svg>",
            "",
        ]
    )


def _line(start: Box, end: Box) -> str:
    across, down = end.at[0] - start.at[0], end.at[1] - start.at[1]
    x, y = start.left + WIDTH // 2, start.top + HEIGHT // 2
    x1, y1 = x + _sign(across) * WIDTH // 2, y + _sign(down) * HEIGHT // 2
    x2, y2 = end.left + WIDTH // 2 - _sign(across) * WIDTH // 2, end.top + HEIGHT // 2 - _sign(down) * HEIGHT // 2
    return f'<path d="M{x1} {y1} L{x2} {y2}" stroke="#495057" stroke-width="1.5" marker-end="url(#end)"/>'


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)


def _box(box: Box) -> Iterator[str]:
    fill, border = COLOURS[box.kind]
    yield (
        f'<rect x="{box.left}" y="{box.top}" width="{WIDTH}" height="{HEIGHT}" rx="7" fill="{fill}" '
        f'stroke="{border}" stroke-width="1.5"/>'
    )
    middle, first = box.left + WIDTH // 2, box.top + HEIGHT // 2 + 4 - 8 * (len(box.lines) - 1)
    for number, line in enumerate(box.lines):
        weight = "bold" if number == 0 else "normal"
        yield (
            f'<text x="{middle}" y="{first + 16 * number}" font-size="12" font-weight="{weight}" '
            f'text-anchor="middle" fill="#212529">{escape(line)}</text>'
        )


if __name__ == "__main__":
    for name, (boxes, arrows) in PICTURES.items():
        (Path(__file__).parent / "style" / f"{name}.svg").write_text(as_svg(boxes, arrows), "utf-8")
