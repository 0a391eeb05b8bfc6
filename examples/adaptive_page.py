"""Report and page of trainings that adapt, and of those that do not, on one axis of seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from pages import panels, table, write_page

from kfcomm.common.html import ReportPage, Section

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

SMOOTHED = 0.95  # what the past weighs in a smoothed line
TOGETHER = 0.08  # of the axis: decisions of a policy that are nearer have one mark, so that its numbers have room


class Row(NamedTuple):
    """A step: when it ended, and what is drawn of it."""

    at_s: float
    loss: float
    noise_scale: float
    batch: int
    samples_per_s: float
    workers: int


class Decided(NamedTuple):
    """Decision of a policy."""

    at_s: float
    policy: str
    what: str
    why: str


@dataclass
class Run:
    """A training, as its first rank saw it."""

    name: str
    rows: list[Row] = field(default_factory=list)
    decisions: list[Decided] = field(default_factory=list)
    slow_s: float = math.inf

    def column(self, name: str) -> Array:
        """One column of the steps."""
        return np.array([getattr(row, name) for row in self.rows])

    @property
    def losses(self) -> Array:
        """Smoothed."""
        return smoothed(self.column("loss"))

    def reaches_s(self, loss: float) -> float:
        """After how many seconds the loss is reached for good; inf if never."""
        above = np.flatnonzero(self.losses > loss * (1 + 1e-6))
        after = above[-1] + 1 if len(above) else 0
        return self.rows[after].at_s if after < len(self.rows) else math.inf


def smoothed(values: Array) -> Array:
    """A moving average, corrected for its start."""
    found, weights, mean = np.empty(len(values)), 0.0, 0.0
    for at, value in enumerate(values):
        mean = SMOOTHED * mean + (1 - SMOOTHED) * value
        weights = SMOOTHED * weights + 1 - SMOOTHED
        found[at] = mean / weights
    return found


def tell(runs: Sequence[Run]) -> bool:
    """Print what happened; whether batch, workers and strategy have changed."""
    adaptive = runs[0]
    batches, workers = (list(dict.fromkeys(adaptive.column(name).tolist())) for name in ("batch", "workers"))
    changes = [one for one in adaptive.decisions if one.what.startswith("strategy ")]
    answer = next((one.what for one in changes if one.at_s > adaptive.slow_s), "the graphs did not need it")
    print(f"the noise scale raised the batch: {batches[0]} -> {max(batches)} samples")
    print(f"workers: {' -> '.join(map(str, workers))}")
    print(f"a link was slow from second {adaptive.slow_s:.1f} on; {answer}")
    wanted = max(run.losses[-1] for run in runs)
    for run in runs:
        in_the_end = f"loss {run.losses[-1]:.3f} after {run.rows[-1].at_s:.1f} s"
        print(f"{run.name}: {in_the_end}; below {wanted:.3f} from second {run.reaches_s(wanted):.1f} on")
    return max(batches) > batches[0] and len(workers) > 1 and bool(changes)


def draw(runs: Sequence[Run], path: Path) -> None:
    """Loss, noise scale, batch, throughput, workers and decisions over time, as a page."""
    adaptive = runs[0]
    heights = {"loss": 2.0, "noise scale": 1.4, "batch": 1.3, "samples / s": 1.4, "workers": 0.7, "decisions": 0.8}
    with panels(heights, salt="adaptive") as figure:
        _draw_lines(figure.axes, runs)
        _mark_decisions(figure.axes["decisions"], adaptive)
        for one in figure.axes.values():
            if math.isfinite(adaptive.slow_s):
                one.axvspan(adaptive.slow_s, adaptive.rows[-1].at_s, color="#d55e00", alpha=0.12, linewidth=0)
            one.set_xlim(0, 1.01 * max(run.rows[-1].at_s for run in runs))
        figure.axes["loss"].legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(runs), frameon=False)
    rows = [
        (str(number), f"{one.at_s:.1f}", one.policy, one.what, one.why)
        for number, one in enumerate(adaptive.decisions, 1)
    ]
    sections = [
        Section("One run on one machine", figure.svg),
        Section("Decisions", table(("", "s", "policy", "what", "why"), rows)),
    ]
    lead = ["The batch follows the noise scale, a worker joins, and a link that has become slow is avoided."]
    quiet = "Shaded: a link is slow. Thin lines: the same training, with nothing that adapts."
    write_page(path, ReportPage("adaptive training", headline(runs), lead, sections, quiet))


def headline(runs: Sequence[Run]) -> str:
    """The result in one sentence."""
    adaptive, *others = runs
    if not others:
        return f"{len(adaptive.decisions)} decisions brought the loss to {adaptive.losses[-1]:.3f}."
    wanted = max(run.losses[-1] for run in runs)
    best = min(others, key=lambda run: run.reaches_s(wanted))
    mine_s, best_s = adaptive.reaches_s(wanted), best.reaches_s(wanted)
    other = f"the best of the others, {best.name}, after {best_s:.1f} s"
    return f"The adaptive run is below a loss of {wanted:.3f} after {mine_s:.1f} s; {other}."


def _draw_lines(axes: dict[str, Any], runs: Sequence[Run]) -> None:
    from kfcomm.common.drawing import COLORS, LINE_WIDTH, mark_axis

    for number, run in enumerate(runs):
        lines = {name: run.column(name.replace(" ", "_")) for name in ("noise scale", "batch", "workers")}
        lines |= {"loss": run.losses, "samples / s": smoothed(run.column("samples_per_s"))}
        width = LINE_WIDTH * (0.7 if number else 1.5)
        for name, values in lines.items():
            style = "steps-post" if name in ("batch", "workers") else "default"
            axes[name].plot(
                run.column("at_s"), values, color=COLORS[number], linewidth=width, drawstyle=style, label=run.name,
                zorder=2 if number else 3,
            )  # fmt: skip
    for name in ("loss", "noise scale", "batch", "samples / s"):
        axes[name].set_yscale("log")
        mark_axis(axes[name].yaxis, "")
    axes["loss"].yaxis.set_major_formatter("{x:g}")
    most = max(runs[0].column("workers"))
    axes["workers"].set_yticks(range(1, most + 1))
    axes["workers"].set_ylim(0.5, most + 0.5)


def _mark_decisions(axes: Any, run: Run) -> None:
    """A line for each policy."""
    policies = list(dict.fromkeys(one.policy for one in run.decisions))
    for line, policy in enumerate(policies):
        mine = [(number, one.at_s) for number, one in enumerate(run.decisions, 1) if one.policy == policy]
        for group in marks(mine, TOGETHER * run.rows[-1].at_s):
            at_s = group[0][1]
            axes.plot(at_s, line, "o", color="#0072b2", markersize=5)
            axes.annotate(
                numbers([number for number, _ in group]),
                (at_s, line),
                (6, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
    axes.set_yticks(range(len(policies)), policies)
    axes.set_ylim(len(policies) - 0.4, -0.6)
    axes.set_ylabel("")


def numbers(given: Sequence[int]) -> str:
    """Ascending ones, as short as can be: 7, or 7–9, or 7, 9, or 7 … 12 with others between."""
    first, last = given[0], given[-1]
    if len(given) == 1:
        return str(first)
    if last - first == len(given) - 1:
        return f"{first}–{last}"
    return f"{first}, {last}" if len(given) == 2 else f"{first} … {last}"


def marks(decisions: Sequence[tuple[int, float]], near_s: float) -> list[list[tuple[int, float]]]:
    """Numbers and seconds of decisions, those together that come within ``near_s`` of the first of them."""
    groups: list[list[tuple[int, float]]] = []
    for one in decisions:
        if groups and one[1] - groups[-1][0][1] < near_s:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups
