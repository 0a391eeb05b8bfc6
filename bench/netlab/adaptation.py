"""A link that drops in mid-run, and a policy that answers: the figure of "Adaptation", printed and recorded.

    python -m bench.netlab.adaptation

Hosts with equal links reduce an array step after step, along a ring at first, watched by ``AvoidSlowLinks``. Before one
of the steps one host's link gets a part of its rate. Then every strategy, and ``packed_trees`` of a fresh probe, are
timed in the new state, in turns; the first round, in which connections are made, is not counted. The one with the
lowest median is the best for the new state.

What must be reached: detected, and at least 90 % of the throughput of the best within five steps of that.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from bench.netlab.hosts import even
from bench.netlab.lab import Netlab
from bench.netlab.measure import conduct, measure
from bench.netlab.rates import parse_rate, show_rate
from bench.netlab.steps import Step, rounds
from bench.records import Record, say
from kfcomm.common.sizes import parse_sizes
from kfcomm.strategies import names

AIM_SHARE = 0.9
AIM_STEPS = 5
PACKED = "bench.netlab.adapting:packed"


@dataclass(frozen=True, slots=True)
class Case:
    """Case to measure.

    Attributes:
        hosts: how many.
        rate: of all links, bits per second.
        low_rate: of the one that drops.
        dropped: its host.
        nbytes: of the array.
        steps: of the program.
        drop_before: the step before which it drops.
        strategy: at first.
    """

    hosts: int
    rate: float
    low_rate: float
    dropped: str
    nbytes: int
    steps: int
    drop_before: int
    strategy: str


@dataclass(frozen=True, slots=True)
class Ran:
    """One step of the program.

    Attributes:
        strategy: under which it ran.
        span_s: of its all_reduce, from the first rank's call to the last rank's result.
        met_s: of the meeting and its decisions: from the last rank's result to the last one's next step.
    """

    strategy: str
    span_s: float
    met_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of a case.

    Attributes:
        detected: the step at whose end the policy found the change; None if it did not.
        best: the best strategy for the new state, and its median.
        best_s: seconds.
        reached: the first step after detection with at least 90 % of the best's throughput; None if no step has.
        share: of the best's throughput: the median of all steps from five steps after detection on.
    """

    detected: int | None
    best: str
    best_s: float
    reached: int | None
    share: float

    @property
    def is_reached(self) -> bool:
        """Whether it is as it must be."""
        if self.detected is None or self.reached is None:
            return False
        return self.reached - self.detected <= AIM_STEPS and self.share >= AIM_SHARE


def judge(
    ran: Sequence[Ran], decisions: Sequence[dict[str, Any]], state: dict[str, list[float]], case: Case
) -> Verdict:
    """Judge the steps and decisions by the spans of each strategy in the new state."""
    best = min(state, key=lambda name: statistics.median(state[name]))
    best_s = statistics.median(state[best])
    found = next((one for one in decisions if "measures the links" in one["what"]), None)
    if found is None or found["step"] < case.drop_before:
        return Verdict(None, best, best_s, None, 0.0)
    after = range(found["step"] + 1, len(ran))
    reached = next((step for step in after if best_s / ran[step].span_s >= AIM_SHARE), None)
    settled = [ran[step].span_s for step in after if step > found["step"] + AIM_STEPS]
    share = best_s / statistics.median(settled)
    return Verdict(found["step"], best, best_s, reached, share)


def run(case: Case, num_rounds: int) -> tuple[list[Ran], list[dict[str, Any]], dict[str, list[float]]]:
    """Let it happen; the steps, the decisions, and the spans of each strategy in the new state."""
    program = [Step("adaptive", case.nbytes)] * case.steps

    def before_step(number: int, step: Step) -> None:
        if number == case.drop_before:
            lab.set_rate(case.dropped, case.low_rate)

    with Netlab(even(case.hosts, case.rate)) as lab:
        env = {"KFCOMM_STRATEGY": case.strategy}
        records = conduct(lab, "bench.netlab.adapting", program, before_step=before_step, env=env)
        say("netlab: the program has ended; times every strategy in the new state")
        steps = rounds([*names(), PACKED], [case.nbytes], num_rounds + 1)
        timings = measure(lab, steps)[len(steps) // (num_rounds + 1) :]
    state: dict[str, list[float]] = {}
    for timing in timings:
        state.setdefault(timing.step.strategy.rpartition(":")[2], []).append(timing.span_s)
    if any(record["decisions"] != records[0]["decisions"] for record in records):
        raise RuntimeError("the ranks have decided differently")
    return (
        [_ran([record["times"][at] for record in records]) for at in range(case.steps)],
        records[0]["decisions"],
        state,
    )


def _ran(times: Sequence[dict[str, Any]]) -> Ran:
    start_s = min(one["start_s"] for one in times)
    end_s, met_s = (max(one[at] for one in times) for at in ("end_s", "met_s"))
    return Ran(times[0]["strategy"], end_s - start_s, met_s - end_s)


def table(ran: Sequence[Ran], state: dict[str, list[float]], verdict: Verdict, case: Case) -> str:
    """The figures as text."""
    lines = ["step  strategy                    ms   of the best   meeting ms"]
    for step, one in enumerate(ran):
        share = "" if step < case.drop_before else f"{verdict.best_s / one.span_s:.0%}"
        dropped = f"  {case.dropped} drops to {show_rate(case.low_rate)}" if step == case.drop_before else ""
        lines.append(f"{step:4}  {one.strategy:22}{one.span_s * 1e3:8.1f}{share:>14}{one.met_s * 1e3:13.2f}{dropped}")
    lines += ["", "In the new state, median of its rounds:"]
    for name in sorted(state, key=lambda name: statistics.median(state[name])):
        lines.append(f"      {name:22}{statistics.median(state[name]) * 1e3:8.1f}")
    return "\n".join(lines)


@click.command(help=__doc__ and __doc__.split("\n\n")[0])
@click.option("--hosts", type=int, default=8, show_default=True, metavar="N")
@click.option("--rate", default="200mbit", show_default=True, metavar="RATE")
@click.option("--low", default="50mbit", show_default=True, metavar="RATE", help="Of the link that drops.")
@click.option("--size", default="8MiB", show_default=True, help="Of the array.")
@click.option("--steps", type=int, default=36, show_default=True)
@click.option("--drop-before", type=int, default=14, show_default=True, metavar="STEP")
@click.option("--strategy", default="ring", show_default=True, help="At first.")
@click.option("--rounds", "num_rounds", type=click.IntRange(min=1), default=5, show_default=True, help="That count.")
@click.option("--output", type=click.Path(path_type=Path), help="bench/results/adaptation-DATE.json by default.")
def main(
    hosts: int, rate: str, low: str, size: str, steps: int, drop_before: int, strategy: str, num_rounds: int,
    output: Path | None,
) -> None:  # fmt: skip
    """Run, print, record."""
    high_rate, low_rate = parse_rate(rate), parse_rate(low)
    if high_rate is None or low_rate is None:
        raise click.UsageError("expected two numeric rates: an unlimited link cannot drop")
    case = Case(hosts, high_rate, low_rate, f"h{hosts // 2}", parse_sizes(size)[0], steps, drop_before, strategy)
    record = Record("adaptation", output)
    ran, decisions, state = run(case, num_rounds)
    verdict = judge(ran, decisions, state, case)
    print(table(ran, state, verdict, case), "", *(one["text"] for one in decisions), sep="\n")
    print(
        f"\ndetected at the end of step {verdict.detected}; best for the new state: {verdict.best}, "
        f"{verdict.best_s * 1e3:.1f} ms; 90 % of it from step {verdict.reached} on, {verdict.share:.1%} in the end"
    )
    figures_ = {
        "case": asdict(case),
        "verdict": {
            **asdict(verdict), "minimum": AIM_SHARE, "within_steps": AIM_STEPS, "is_reached": verdict.is_reached
        },
        "steps": [asdict(one) for one in ran],
        "decisions": decisions,
        "new_state_s": state,
    }  # fmt: skip
    record.write(figures_)
    sys.exit(0 if verdict.is_reached else 1)


if __name__ == "__main__":
    main(prog_name="python -m bench.netlab.adaptation")
