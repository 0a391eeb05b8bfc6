"""False changes: a policy on a network that is noisy, and otherwise unchanged.

    python -m bench.netlab.noise --policy AutoStrategy

Equal hosts reduce an array step after step, with ``auto`` at first. In some of the steps one host's link has a part of
its rate, and now and then processes compete for the processors. What follows the first steps, in which a policy may try
strategies, should be no change at all.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from bench.netlab.adapting import POLICIES, POLICY
from bench.netlab.hosts import even
from bench.netlab.lab import Netlab
from bench.netlab.measure import conduct
from bench.netlab.rates import parse_rate
from bench.netlab.steps import Step
from bench.records import Record
from kfcomm.common.sizes import parse_sizes

_SLOW_SHARE, _LEAST_RATE, _MOST_RATE = 0.05, 0.4, 0.9
_BUSY_SHARE, _MOST_BUSY = 0.02, 2
_BUSY = "import time\nend = time.monotonic() + 10\nwhile time.monotonic() < end: pass"


class Noise:
    """Noise between steps: links that are slow for one step, and processes that work for ten seconds."""

    def __init__(self, lab: Netlab, rate: float, seed: int) -> None:
        self._lab = lab
        self._rate = rate
        self._chance = random.Random(seed)
        self._slow = ""
        self._busy: list[subprocess.Popen[bytes]] = []

    def before_step(self, _number: int, _step: Step) -> None:
        """Let the network be as it should be, or not."""
        if self._slow:
            self._lab.set_rate(self._slow, self._rate)
            self._slow = ""
        if self._chance.random() < _SLOW_SHARE:
            self._slow = self._chance.choice(self._lab.hosts).name
            self._lab.set_rate(self._slow, self._rate * self._chance.uniform(_LEAST_RATE, _MOST_RATE))
        self._busy = [process for process in self._busy if process.poll() is None]
        if len(self._busy) < _MOST_BUSY and self._chance.random() < _BUSY_SHARE:
            self._busy.append(subprocess.Popen([sys.executable, "-c", _BUSY]))

    def end(self) -> None:
        """Wait for the processes."""
        for process in self._busy:
            process.kill()
            process.wait()


@contextlib.contextmanager
def noisy(lab: Netlab, rate: float, seed: int) -> Iterator[Noise]:
    """Noise that is over afterwards."""
    noise = Noise(lab, rate, seed)
    try:
        yield noise
    finally:
        noise.end()


def changes(strategies: Sequence[str]) -> list[int]:
    """Steps whose strategy is not that of the step before."""
    return [number for number in range(1, len(strategies)) if strategies[number] != strategies[number - 1]]


@click.command(help=__doc__ and __doc__.split("\n\n")[0])
@click.option("--policy", type=click.Choice(list(POLICIES)), default="AvoidSlowLinks", show_default=True)
@click.option("--hosts", type=int, default=5, show_default=True, metavar="N")
@click.option("--rate", default="200mbit", show_default=True, metavar="RATE")
@click.option("--size", default="4MiB", show_default=True, help="Of the array.")
@click.option("--steps", type=int, default=1900, show_default=True, help="About ten minutes.")
@click.option("--settled", type=int, default=100, show_default=True, help="Steps in which changes are no fault.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="bench/results/noise-DATE.json by default.")
def main(
    policy: str, hosts: int, rate: str, size: str, steps: int, settled: int, seed: int, output: Path | None
) -> None:
    """Run, print, record; the exit code is 1 after a false change."""
    number_rate, nbytes = parse_rate(rate), parse_sizes(size)[0]
    if number_rate is None:
        raise click.UsageError("expected a numeric rate")
    record = Record("noise", output)
    program = [Step("adaptive", nbytes)] * steps
    with Netlab(even(hosts, number_rate)) as lab, noisy(lab, number_rate, seed) as noise:
        env = {"KFCOMM_STRATEGY": "auto", POLICY: policy}
        found = conduct(lab, "bench.netlab.adapting", program, before_step=noise.before_step, env=env)[0]
    times = found["times"]
    changed = changes([time["strategy"] for time in times])
    false = [number for number in changed if number >= settled]
    took_s = times[-1]["end_s"] - times[0]["start_s"]
    for decision in found["decisions"]:
        click.echo(decision["text"])
    click.echo(f"{policy}: {steps} steps, {took_s:.0f} s; changes: {changed}, of them false: {len(false)}")
    record.write(
        {"policy": policy, "steps": steps, "seed": seed, "seconds": took_s, "changes": changed, "false": false}
    )
    sys.exit(1 if false else 0)


if __name__ == "__main__":
    main(prog_name="python -m bench.netlab.noise")
