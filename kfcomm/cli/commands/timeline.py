"""`kfcomm timeline`: traces of all ranks, merged or summarised."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kfcomm.cli.options import Commands, of_kind, reported_errors
from kfcomm.common.sizes import ranks_in_words

if TYPE_CHECKING:
    from kfcomm.monitor.timeline import Merged


@click.group(cls=Commands)
def timeline() -> None:
    """Put the timelines of all ranks together.

    A job writes them with `kfcomm run --timeline DIR`, or KFCOMM_TIMELINE=DIR.
    """


@timeline.command()
@click.argument("places", nargs=-1, required=True, metavar="DIR|FILE...")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    callback=of_kind(".json"),
    metavar="FILE",
    help="Write the merged trace here.",
)
def merge(places: tuple[str, ...], output: Path) -> None:
    """Make one trace of those of all ranks, on one clock: for ui.perfetto.dev or chrome://tracing.

    The output lists missing and truncated traces, and how each rank's clock was aligned. The exit code is 2 if the
    files are of different jobs or one of them is malformed.

    \b
      kfcomm timeline merge traces -o merged.json
    """  # noqa: D301  click wants the character, not its name
    from kfcomm.monitor import timeline as traces

    with reported_errors():
        merged = traces.merge(traces.read_files(places), output)
    for line in _told(merged):
        click.echo(line)
    click.echo(f"{output}: {merged.num_events} events of {len(merged.traces)} ranks")


@timeline.command()
@click.argument("places", nargs=-1, required=True, metavar="DIR|FILE...")
@click.option(
    "-n",
    "--count",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    metavar="N",
    help="How many of the slowest to list.",
)
def summary(places: tuple[str, ...], count: int) -> None:
    """Say which collectives took longest, and which ranks were waited for.

    \b
      kfcomm timeline summary traces
    """  # noqa: D301  click wants the character, not its name
    from kfcomm.monitor import timeline as traces

    with reported_errors():
        text = traces.as_text(traces.summarize(traces.read_files(places)), count)
    click.echo(text)


def _told(merged: Merged) -> Iterator[str]:
    if merged.missing:
        yield f"missing: {ranks_in_words(merged.missing)} of {merged.traces[0].about.size}"
    for trace in merged.traces:
        rank = trace.about.rank
        if not trace.is_whole:
            count = merged.unfinished.get(rank, 0)
            yield (
                f"rank {rank}: {trace.path} breaks off (its process was killed, or still runs); "
                f"{count} collectives unfinished"
            )
        if trace.left_out > 0:
            yield f"rank {rank}: {trace.left_out} notes were left out, more than could be written in time"
        yield f"rank {rank}: clock: {merged.clocks[rank].how}"
