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
    type=click.Path(dir_okay=False, path_type=Path),
    callback=of_kind(".json"),
    metavar="FILE",
    help="Write the merged trace here.",
)
@click.option("--otlp", metavar="URL", help="Send calls as spans to this OpenTelemetry collector; needs kfcomm[otel].")
def merge(places: tuple[str, ...], output: Path | None, otlp: str | None) -> None:
    """Make one trace of those of all ranks, on one clock: for ui.perfetto.dev or chrome://tracing.

    The output lists missing and truncated traces, and how each rank's clock was aligned. The exit code is 2 if the
    files are of different jobs or one of them is malformed.

    \b
      kfcomm timeline merge traces -o merged.json
      kfcomm timeline merge traces --otlp http://localhost:4318
    """  # noqa: D301  click wants the character, not its name
    from kfcomm.monitor import timeline as traces

    with reported_errors():
        if output is not None and otlp is None:
            merged = traces.merge(traces.read_files(places), output)
        elif otlp is not None and output is None:
            from kfcomm.monitor.timeline.otlp import send

            merged = send(traces.read_files(places), otlp)
        else:
            raise click.UsageError(f"expected --output or --otlp, got {'both' if output else 'neither'}")
    for line in _told(merged):
        click.echo(line)
    kind = "calls" if otlp else "events"
    click.echo(f"{output or otlp}: {merged.num_events} {kind} of {len(merged.traces)} ranks")


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
