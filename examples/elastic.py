"""Train on handwritten digits while ranks die, join and leave; each sample is used once in each pass all the same.

::

    kfcomm run -n 4 --elastic 2:6 python examples/elastic.py               # make demo-elastic
    kfcomm run -n 4 --elastic 2:6 python examples/elastic.py --html elastic.html

One rank kills itself, and the launcher starts another in its place; then six ranks are asked for, and then five. What
happened is told in the end by the first rank, and drawn: members, throughput, pauses and loss.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

try:
    import threadpoolctl
except ModuleNotFoundError as error:
    raise SystemExit(f'this example needs {error.name}: pip install "kfcomm[demo]"') from None
from digits import ACCURACY_WANTED, LEARNING_RATE, MOMENTUM, Model, load_data
from pages import panels, write_page

import kfcomm
from kfcomm.common.html import ReportPage, Section
from kfcomm.common.sizes import show_seconds
from kfcomm.elastic import Elastic, ElasticSampler, State

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

BATCH_SIZE = 64  # over all ranks, however many there are
COMPUTING_S = 0.005  # stands for a model that is worth several processes
KILLED = 100  # the step in which one dies
LOOKED_AT = 50  # every so many steps it is looked whether all are there, and another size is asked for
NEXT_SIZE = {4: 6, 6: 5}


def gradients_of(model: Model, images: Array, labels: Array) -> tuple[float, dict[str, Array]]:
    """Summed over some samples, perhaps none: the loss, and the gradient of each parameter."""
    if not len(labels):
        return 0.0, {one.name: np.zeros_like(one.value) for one in model.parameters()}
    loss, gradient = model.loss(images, labels)
    found: dict[str, Array] = {}
    gradient *= np.float32(len(labels))
    for layer in reversed(model.layers):
        gradient, gradients = layer.backward(gradient)
        found |= {parameter.name: mine for parameter, mine in gradients}
    return loss * len(labels), found


def train(comm: Any, passes: int) -> tuple[State, Model, Any]:
    """The whole life of one rank, wherever it comes in."""
    (images, labels), _ = load_data(seed=0)
    model = Model(seed=0)
    values = {one.name: one.value for one in model.parameters()}
    state = State(
        values=values, velocity={name: np.zeros_like(value) for name, value in values.items()},
        used=np.zeros(len(labels)), rows=[],
    )  # fmt: skip
    with Elastic(comm, state) as elastic:
        for step in elastic.steps(ElasticSampler(len(labels), BATCH_SIZE), passes=passes, used_in="step"):
            if comm.births[comm.rank] == 1 and step.number == KILLED:
                os.kill(os.getpid(), signal.SIGKILL)
            if comm.rank == 0 and step.number > KILLED and step.number % LOOKED_AT == 0 and comm.size in NEXT_SIZE:
                comm.propose_size(NEXT_SIZE[comm.size])
            time.sleep(COMPUTING_S)
            loss, gradients = gradients_of(model, images[step.indices], labels[step.indices])
            used = np.zeros(len(labels))
            used[step.indices] = 1
            told = np.concatenate([[loss], used])
            # one call for all that says which samples the step has used: it is finished for all of them, or none
            total = comm.all_reduce_many({"told": told, **gradients}, name="step")
            count = total["told"][1:].sum()
            for name, value in state.values.items():
                state.velocity[name] *= MOMENTUM
                state.velocity[name] -= np.float32(LEARNING_RATE / count) * total[name]
                value += state.velocity[name]
            state.used += total["told"][1:]
            births = list(comm.births)
            state.rows = [*state.rows, [step.number, time.time(), births, int(count), float(total["told"][0] / count)]]
    return state, model, elastic


def tell(state: State, model: Model) -> bool:
    """Print what happened; whether all went well."""
    before: list[int] = state.rows[0][2]
    for number, _, births, _, _ in state.rows[1:]:
        gone, come = sorted(set(before) - set(births)), sorted(set(births) - set(before))
        if gone or come:
            changes = [f"{what} {ranks}" for what, ranks in (("without", gone), ("with", come)) if ranks]
            print(f"step {number}: {len(births)} ranks go on, {' and '.join(changes)}")
        before = births
    _, (images, labels) = load_data(seed=0)
    accuracy = float((model.logits(images).argmax(axis=1) == labels).mean())
    times = Counter(state.used.astype(int).tolist())
    print(f"{len(state.rows)} steps; each of {len(state.used)} samples was used {list(times)} times")
    print(f"test accuracy: {accuracy:.4f} (wanted: at least {ACCURACY_WANTED})")
    return accuracy >= ACCURACY_WANTED and len(times) == 1


def draw(state: State, path: Path) -> None:
    """Members, throughput, pauses and loss over time, as a page."""
    from kfcomm.common.drawing import COLORS

    numbers, times, births, counts, losses = zip(*state.rows, strict=True)
    at_s = np.array(times) - times[0]
    lengths_s = np.diff(at_s, prepend=at_s[0] - COMPUTING_S)
    usual_s = float(np.median(lengths_s))
    changes = [at for at, one, before in zip(at_s[1:], births[1:], births, strict=False) if one != before]
    heights = {"rank at birth": 1.8, "samples / s": 1.8, "ms beyond\nthe usual step": 1.8, "loss": 1.8}
    with panels(heights, salt="elastic") as figure:
        members, throughput, pauses, loss = figure.axes.values()
        for axes in figure.axes.values():
            for number, at in enumerate(changes):
                label = "" if number else "ranks die, join or leave"
                axes.axvline(at, color=COLORS[1], linewidth=0.9, linestyle="--", label=label)
        for birth in sorted({one for each in births for one in each}):
            there = [at for at, each in zip(at_s, births, strict=True) if birth in each]
            label = "" if birth else "a rank takes part"
            members.barh(birth, there[-1] - there[0], left=there[0], height=0.6, color=COLORS[0], label=label)
        throughput.plot(at_s, np.array(counts) / lengths_s, linewidth=0.8, color=COLORS[0])
        pauses.bar(at_s, 1e3 * np.maximum(lengths_s - usual_s, 0), width=0.03, color=COLORS[0])
        loss.semilogy(at_s, losses, linewidth=0.8, color=COLORS[0])
        members.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
    sizes = sorted({len(each) for each in births})
    headline = (
        f"The ranks changed {len(changes)} times ({sizes[0]} to {sizes[-1]} of them); training paused for at most "
        f"{show_seconds(max(lengths_s - usual_s))}, and each sample was used {int(max(state.used))} times."
    )
    lead = f"{len(numbers)} steps, loss {losses[0]:.3f} at first and {losses[-1]:.4f} in the end"
    write_page(path, ReportPage("elastic training", headline, [lead], [Section("Over time", figure.svg)]))


def main(options: argparse.Namespace) -> bool:
    """Join the world that this process was started in, or that runs already."""
    with kfcomm.sync.init(elastic=True) as comm:
        state, model, elastic = train(comm, options.passes)
        is_first = comm.rank == 0 and not elastic.is_released
    if not is_first:
        return True
    if options.html is not None:
        draw(state, options.html)
    return tell(state, model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--html", type=Path, metavar="FILE", help="draw what happened")
    with threadpoolctl.threadpool_limits(1):
        sys.exit(0 if main(parser.parse_args()) else 1)
