"""Agreement algorithms with a too large batch: 16 ranks in one process, printed, recorded and drawn.

::

    python -m bench.agreement --seeds 3 --record agreement.json --plot agreement.svg
    python -m bench.agreement --seeds 1 --attach

One process learns with a small batch. Sixteen ranks learn from as many images, each with that batch: by S-SGD with the
learning rate scaled linearly, without and with a warm-up; by SMA, PairAveraging, local SGD and AdaSGD with the unscaled
rate. Where the models of the ranks differ, their mean is tested. KungFu's paper has 59 % for S-SGD against 75 % at 16
workers. With ``--attach`` the model is torch's, and agrees by ``kfcomm.torch.attach``.

To reach: those with the unscaled rate within 1 % of the small batch, where S-SGD loses 5 % or more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.agreement import plain
from bench.agreement.ways import BATCH, CASES, KEPT, RANKS, SCALED, SMALL, WAYS, Case, Way

MAY_LOSE, MUST_LOSE = 0.01, 0.05


def learn(case: Case, way: Way, seed: int, *, by_attach: bool) -> list[float]:
    """Return the accuracy after each tenth of the epochs."""
    if by_attach:
        from bench.agreement import attached

        return attached.learn(case, way, seed)
    with np.errstate(all="ignore"):  # what diverges overflows
        return asyncio.run(plain.learn(case, way, seed))


def draw(record: list[dict[str, Any]], path: Path) -> None:
    """The accuracy of each way along training, of all seeds."""
    from matplotlib.figure import Figure

    names = [case.name for case in CASES]
    figure = Figure(figsize=(5 * len(names), 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for number, way in enumerate(WAYS):
            curves = [one["accuracy"] for one in record if one["set"] == name and one["way"] == way]
            parts = [100 * (at + 1) / len(curves[0]) for at in range(len(curves[0]))]
            for curve in curves:
                axes.plot(parts, [100 * value for value in curve], color=f"C{number}", alpha=0.3)
            means = [100 * statistics.mean(each) for each in zip(*curves, strict=True)]
            axes.plot(parts, means, color=f"C{number}", label=way)
        axes.set(title=f"{name}, {RANKS} ranks", xlabel="% of the epochs", ylabel="accuracy, %", ylim=(0, 100))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(WAYS))
    figure.savefig(path)


def show(case: Case, finals: dict[str, list[float]]) -> bool:
    """Print the line of a set; whether what is to be reached is reached."""
    means = {way: statistics.mean(each) for way, each in finals.items()}
    click.echo(f"{case.name}:")
    for way, each in finals.items():
        lost = means[SMALL] - means[way]
        shown = ", ".join(f"{100 * one:.1f}" for one in each)
        click.echo(f"  {way:24} {100 * means[way]:5.1f} %  loses {100 * lost:5.1f}  ({shown})")
    kept = all(means[SMALL] - means[way] <= MAY_LOSE for way in KEPT if way in means)
    return kept and means[SMALL] - means.get(SCALED, 0.0) >= MUST_LOSE


def main() -> int:
    """Learn as the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m bench.agreement")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="of each set, in place of its own number")
    parser.add_argument("--attach", action="store_true", help="torch, by kfcomm.torch.attach")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    record: list[dict[str, Any]] = []
    is_reached = True
    for case in CASES:
        ran = case if given.epochs is None else replace(case, epochs=given.epochs)
        finals: dict[str, list[float]] = {}
        for name, way in WAYS.items():
            for seed in range(given.seeds):
                found = learn(ran, way, seed, by_attach=given.attach)
                record.append({"set": case.name, "way": name, "seed": seed, "accuracy": found})
                finals.setdefault(name, []).append(found[-1])
        is_reached = show(ran, finals) and is_reached
    click.echo("reached" if is_reached else "not reached")
    if given.record is not None:
        about = {"python": platform.python_version(), "ranks": RANKS, "batch": BATCH, "by_attach": given.attach}
        about["runs"] = record
        given.record.write_text(json.dumps(about, indent=1) + "\n")
    if given.plot is not None:
        draw(record, given.plot)
    return 0 if is_reached else 1


if __name__ == "__main__":
    sys.exit(main())
