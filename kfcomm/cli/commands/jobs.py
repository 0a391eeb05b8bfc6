"""`kfcomm jobs`: running jobs of this user on this host."""

from __future__ import annotations

import json
from typing import Any

import click

from kfcomm.cli.options import reported_errors
from kfcomm.common.sizes import ranges
from kfcomm.errors import ConfigError


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Write it for machines.")
def jobs(as_json: bool) -> None:
    """List your jobs that run on this host: name, age, ranks, state, command.

    A name is that of `kfcomm run --name`, else that of the program, with a number. The other commands take the name, or
    how it begins. Seen are jobs with monitoring on (the default), and elastic ones.
    """
    with reported_errors():
        rows = _rows()
    if as_json:
        click.echo(json.dumps(rows))
        return
    if not rows:
        click.echo("no job of yours runs on this host")
        return
    lines = [("job", "age", "ranks here", "state", "command"), *(_shown(row) for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(4)]
    for line in lines:
        click.echo("  ".join([*(text.ljust(width) for text, width in zip(line, widths, strict=False)), line[-1]]))


def _rows() -> list[dict[str, Any]]:
    from kfcomm.launch import requests
    from kfcomm.monitor import live

    seen = {job.name: job for job in live.jobs()}
    elastic = {}
    for name in requests.jobs():
        try:
            elastic[name] = requests.ask(name, "status")
        except ConfigError:  # it has ended meanwhile, or is ending
            continue
    rows = []
    for name in sorted({*seen, *elastic}):
        job = seen.get(name)
        row: dict[str, Any] = {"job": name, "age_s": None, "ranks": [], "elastic": None, "command": ""}
        if job is not None:
            row.update(age_s=job.age_s, ranks=list(job.ranks), command=job.program)
        if (told := elastic.get(name)) is not None:
            row["elastic"] = {key: told[key] for key in ("size", "least", "most")}
            row["ranks"] = row["ranks"] or told["running"]
            origin = requests.Origin.from_json(told.get("origin", {}))
            if origin is not None:
                command = f"{requests.command_line(origin.command)}, in {origin.directory}"
                row.update(age_s=origin.age_s, command=command)
        rows.append(row)
    return rows


def _shown(row: dict[str, Any]) -> tuple[str, str, str, str, str]:
    from kfcomm.launch.requests import shown_age

    size, age_s = row["elastic"], row["age_s"]
    state = "runs" if size is None else f"elastic: {size['size']} wanted, {size['least']} to {size['most']}"
    return row["job"], "" if age_s is None else shown_age(age_s), ranges(row["ranks"]), state, row["command"]
